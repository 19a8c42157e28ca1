"""The manifest of a JobSet against the parts of its schema that it uses, and its names.

`tests/support/job_set_schema.json` has the types, required keys and choices of JobSet v1alpha2
(kubernetes-sigs/jobset 08dfbdf) for these keys; any other key is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_distill.cli import main
from megatron_distill.errors import ConfigError
from megatron_distill.launching.kubernetes import PodDemand, job_set
from megatron_distill.launching.program import Program
from tests.guards.source_tree import ROOT

SCHEMA = json.loads((ROOT / "tests" / "support" / "job_set_schema.json").read_text())
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")


def violations(value: Any, schema: dict[str, Any], place: str = "") -> Iterator[str]:
    """Where a value differs from a schema."""
    if schema["type"] == "quantity":
        if not re.fullmatch(r"\d+(\.\d+)?(m|[KMGT]i?)?", str(value)):
            yield f"{place}: {value!r} is not a quantity"
    elif type(value) is not TYPES[schema["type"]]:
        yield f"{place}: {value!r} is no {schema['type']}"
    elif value not in schema.get("enum", [value]):
        yield f"{place}: {value!r} is none of {schema['enum']}"
    elif isinstance(value, list):
        for one in value:
            yield from violations(one, schema["items"], f"{place}[]")
    elif isinstance(value, dict) and ("properties" in schema or "additional" in schema):
        known = schema.get("properties", {})
        yield from (f"{place}.{key} is missing" for key in schema.get("required", ())
                    if key not in value)  # fmt: skip
        for key, inner in value.items():
            below = known.get(key, schema.get("additional"))
            if below is None:
                yield f"{place}.{key} is unknown"
            else:
                yield from violations(inner, below, f"{place}.{key}")


def demand(**changes: Any) -> PodDemand:
    whole = {
        "name": "distill", "namespace": "research", "nodes": 2, "image": "registry/distill:1",
        "claims": [("data", "/data"), ("code", "/code")], "folder": "/code", "gpus_per_node": 8,
        "cpus_per_node": "64", "memory_per_node": "512Gi", "rules": ("--max-starts", "3"),
    }  # fmt: skip
    return PodDemand(**(whole | changes))


PROGRAM = Program("train", ("tiny.yaml", "output=/data/runs/a"))


def test_the_manifest_fits_the_schema() -> None:
    manifest = yaml.safe_load(yaml.safe_dump(job_set(demand(), PROGRAM)))
    assert list(violations(manifest, SCHEMA)) == []
    (rule,) = manifest["spec"]["failurePolicy"]["rules"]
    assert RULE_NAME.fullmatch(rule["name"])


@pytest.mark.parametrize(
    ("place", "value", "found"),
    [
        ("spec.failurePolicy.maxRestarts", "3", "'3' is no integer"),
        ("spec.failurePolicy.rules", [{"action": "FailJobSet"}], ".name is missing"),
        ("spec.failurePolicy.rules", [{"name": "a", "action": "Fail"}], "'Fail' is none of"),
        ("spec.restarts", 3, "spec.restarts is unknown"),
    ],
)
def test_a_wrong_manifest_is_found(place: str, value: Any, found: str) -> None:
    manifest = json.loads(json.dumps(job_set(demand(), PROGRAM)))
    *path, last = place.split(".")
    section = manifest
    for key in path:
        section = section[key]
    section[last] = value
    (only,) = violations(manifest, SCHEMA)
    assert found in only


def test_pods_reach_each_other_by_the_names_that_the_job_set_gives_them() -> None:
    spec = job_set(demand(nodes=3), PROGRAM)["spec"]
    (group,) = spec["replicatedJobs"]
    names = [
        f"distill-{group['name']}-0-{index}.{spec['network']['subdomain']}" for index in range(3)
    ]
    job = group["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    command = container["command"]
    assert command[command.index("--pods") + 1].split(",") == names
    assert command[-3:] == ["train", "tiny.yaml", "output=/data/runs/a"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (3, 3, "Indexed")


def test_a_name_that_kubernetes_refuses_is_named() -> None:
    for name in ("Distill", "a_b", "-a", "8b", "a" * 48):  # with -nodes-0-0-abcde
        with pytest.raises(ConfigError, match=f"--name {name}: write small letters"):
            job_set(demand(name=name), PROGRAM)
    assert job_set(demand(name="a" * 47), PROGRAM)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"namespace": "Foo_"}, "--namespace Foo_: "),
        ({"namespace": ""}, "--namespace '': "),
        ({"namespace": "a" * 64}, "at most 63 characters"),
        ({"namespace": "a.b"}, "--namespace a.b: "),
        ({"image": ""}, "--image '': "),
        ({"image": " i"}, "--image ' i': "),
        ({"python": ""}, "--image-python '': "),
        ({"variables": {"ATTEMPT": "1"}}, "--variable ATTEMPT=1: the manifest sets ATTEMPT, to "),
        ({"variables": {"KUBERNETES_NODE": "1"}}, "sets KUBERNETES_NODE, to name the pod's node"),
        ({"claims": [("Data_1", "/data")]}, "--claim Data_1:/data: "),
        ({"claims": [("-a", "/data")]}, "--claim -a:/data: "),
        ({"claims": [("a..b", "/data")]}, "--claim a..b:/data: "),
        ({"claims": [("a" * 254, "/data")]}, "at most 253 characters"),
        ({"claims": [("a", "data")]}, "--claim a:data: "),
        ({"claims": [("a", "/data:ro")]}, "--claim a:/data:ro: "),
        ({"claims": [("a", "/data"), ("b", "/data")]}, "--claim b:/data: --claim a:/data "),
        ({"claims": [("a", "/data"), ("b", "/data/x/..")]}, "--claim b:/data/x/..: --claim a:"),
        ({"claims": [("a", "/data/"), ("b", "//data")]}, "--claim b://data: --claim a:/data/ "),
        ({"claims": [("a", "/dev/shm")]}, "--claim a:/dev/shm: the pods' shared memory is "),
    ],
)
def test_a_value_that_kubernetes_refuses_is_named_with_its_option(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as found:
        job_set(demand(**changes), PROGRAM)
    assert text in str(found.value)


def test_names_and_folders_that_kubernetes_takes_are_no_error() -> None:
    claims = [("0-data.team1", "/data"), ("a" * 253, "/data/models"), ("0-data.team1", "/scratch")]
    assert job_set(demand(claims=claims, namespace="8-b", image="r:5000/d@sha256:0"), PROGRAM)


def expanded(text: str) -> str:
    """A text as Kubernetes writes it into the environment, or starts it as a word."""
    return re.sub(r"\$(\$|\(\w+\))", lambda found: "$" if found[1] == "$" else "REPLACED", text)


def test_variables_and_words_are_literal_in_the_pods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"NCCL_SOCKET_IFNAME": "eth1,eth2", "X": "$(ATTEMPT) $$(Y) $HOME a$$", "N": "1"}
    words = [f"--variable={name}={text}" for name, text in {"N": "0", **values}.items()]
    program = ["x", "$$(ATTEMPT)", "--command", str(tmp_path / "program.py")]
    (tmp_path / "program.py").write_text(f"print({f'output: {tmp_path}/a'!r})\n")
    more = ["--nodes", "1", "--image", "i", "--claim", f"data:{tmp_path}", "--dry-run"]
    assert main(["submit", "kubernetes", *program, *more, *words]) == 0
    manifest = yaml.safe_load(capsys.readouterr().out)
    assert list(violations(manifest, SCHEMA)) == []
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    attempt, node, *given = container["env"]
    assert (attempt["name"], node["name"]) == ("ATTEMPT", "KUBERNETES_NODE")
    assert node["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert {one["name"]: expanded(one["value"]) for one in given} == values
    assert [expanded(word) for word in container["command"][-2:]] == ["x", "$$(ATTEMPT)"]


@pytest.mark.parametrize("variable", ["X", "=1", "A-B=1", "1A=1"])
def test_a_variable_that_no_pod_could_have_is_refused(
    variable: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "kubernetes", "a.yaml", "--nodes", "1", "--image", "i", "--dry-run"]
    with pytest.raises(SystemExit):
        main([*words, "--variable", variable])
    assert f"--variable {variable}: write NAME=VALUE, as NCCL_SO" in capsys.readouterr().err


def test_the_command_writes_the_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "kubernetes", str(ROOT / "configs" / "tiny.yaml"), f"output={tmp_path}/a",
             "--nodes", "2", "--image", "i", "--claim", f"data:{tmp_path}"]  # fmt: skip
    assert main([*words, "--dry-run"]) == 0
    assert list(violations(yaml.safe_load(capsys.readouterr().out), SCHEMA)) == []
    assert not (tmp_path / "a").exists()
    for more, text in (
        ([], "give --dry-run"),
        (["--claim", "data"], "NAME:FOLDER"),
        (["--claim", "data:data"], "data: a folder in the pods has a path from the root"),
        (["--claim", "b:"], "--claim b:: write NAME:FOLDER"),
        (["--work-folder", "code"], "code: a folder in the pods has a path from the root"),
        (
            ["--memory-per-node", "512GB"],
            "--memory-per-node 512GB: not a quantity; write it as 512Gi",
        ),
        (["--cpus-per-node", "all"], "--cpus-per-node all: not a quantity; write it as 64"),
        (
            ["--ranks-per-node", "8", "--gpus-per-node", "4", "--dry-run"],
            "--ranks-per-node 8: is more than --gpus-per-node 4, and each rank needs a GPU of its",
        ),
        (["--grace-seconds", "inf"], "--grace-seconds inf: must be a finite number"),
        (["--health-seconds", "0", "--dry-run"], "--health-seconds 0: must be a finite number"),
        (["--health-command", " ", "--dry-run"], "--health-command ' ': is empty; give a shell"),
    ):
        wrong = [*words, *more]
        with pytest.raises(SystemExit):
            main(wrong)
        assert text in capsys.readouterr().err
    for counts in (["--ranks-per-node", "2"], ["--ranks-per-node", "1", "--gpus-per-node", "2"]):
        assert main([*words, *counts, "--dry-run"]) == 0
    capsys.readouterr()
    for more in (["--namespace", "Foo_"], ["--image", ""], ["--claim", f"a:{tmp_path}"]):
        assert main([*words, *more, "--dry-run"]) == 1
        found = capsys.readouterr()
        assert (found.out, found.err.startswith(f"error: {more[0]} ")) == ("", True)


def test_pods_check_their_nodes_and_keep_away_from_those_that_were_bad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launches = tmp_path / "a" / "launches"
    launches.mkdir(parents=True)
    lines = [f"2026-11-30T12:00:0{second}\tgpu-{second % 2}\tbroken\n" for second in range(3)]
    (launches / "bad_nodes").write_text("".join(lines))
    command = "test $(nvidia-smi -L | wc -l) = 8 || echo $$"
    words = ["submit", "kubernetes", str(ROOT / "configs" / "tiny.yaml"), f"output={tmp_path}/a",
             "--nodes", "1", "--image", "i", "--claim", f"data:{tmp_path}", "--gpus-per-node", "8",
             "--health-command", command, "--health-seconds", "90", "--dry-run"]  # fmt: skip
    assert main(words) == 0
    manifest = yaml.safe_load(capsys.readouterr().out)
    assert list(violations(manifest, SCHEMA)) == []
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    rule = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    # Parts of one term all hold, and each takes one name.
    (term,) = rule["nodeSelectorTerms"]
    assert term["matchFields"] == [
        {"key": "metadata.name", "operator": "NotIn", "values": [node]}
        for node in ("gpu-0", "gpu-1")
    ]
    started = [expanded(word) for word in pod["containers"][0]["command"]]
    wanted = {"--gpus": "8", "--health-command": command, "--health-seconds": "90"}
    assert {option: started[started.index(option) + 1] for option in wanted} == wanted


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["output=/data/runs/a"], "/data/runs/a/launches"),
        (["output=runs/a", "--claim", "data:/data"], "/code/runs/a/launches"),
        (["output=/database/a", "--claim", "data:/data"], "/database/a/launches"),
        (["output=/data/../a", "--claim", "data:/data"], "/a/launches"),
        (["store.path=/data/a", "--claim", "data:/data/a"], "/data/a.launches"),
        (["output=runs/a", "--claim", "code:/code"], None),
        (["store.path=/data/a", "--claim", "data:/data/"], None),
    ],
)
def test_a_run_or_store_that_would_end_with_its_pods_is_refused(
    words: list[str], place: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    command, file = ("capture", "cache") if words[0].startswith("store") else ("train", "tiny")
    submit = ["submit", "kubernetes", str(ROOT / "configs" / f"{file}.yaml"), "--command", command]
    more = ["--nodes", "1", "--image", "i", "--work-folder", "/code", "--dry-run"]
    assert main([*submit, *words, *more]) == (0 if place is None else 1)
    text = capsys.readouterr().err
    if place is not None:
        assert text.startswith(f"error: {words[0]}: in the pods {place} is on no --claim")
        assert "Give --claim NAME:FOLDER above it" in text


@pytest.mark.slow
def test_the_name_of_a_job_set_is_that_of_its_run_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`kubectl apply` would take a second run of one name for a change of the first."""

    def name(*words: str, command: str = "train") -> str:
        file = str(ROOT / "configs" / ("cache.yaml" if command == "capture" else "tiny.yaml"))
        submit = ["submit", "kubernetes", file, "--command", command, "--work-folder", "/data/code"]
        more = ["--nodes", "1", "--image", "i", "--claim", "data:/data", "--dry-run"]
        assert main([*submit, *words, *more]) == 0
        manifest = yaml.safe_load(capsys.readouterr().out)
        (group,) = manifest["spec"]["replicatedJobs"]
        pod = group["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
        found = manifest["metadata"]["name"]
        assert pod[pod.index("--job") + 1] == manifest["spec"]["network"]["subdomain"] == found
        assert isinstance(found, str)
        return found

    first = name("output=/data/runs/a")
    assert re.fullmatch(r"megatron-distill-[0-9a-f]{8}", first)
    assert job_set(demand(name=first, nodes=10_000), PROGRAM)
    same = ("output=/data/runs/a/", "output=../runs/a", "output=/data/x/../runs/a")
    assert {name(output) for output in same} == {first}
    assert name("output=/data/runs/a", "train.steps=7") == first  # the same run, changed
    store = "store.path=/data/runs/a"
    others = [
        name("output=/data/runs/b"),
        name(store, command="capture"),
        name(store, "store.jobs=2", "store.job=0", command="capture"),
        name(store, "store.jobs=2", "store.job=1", command="capture"),
    ]
    assert len({first, *others}) == 5
    assert name("output=/data/runs/b", "--name", "mine") == "mine"

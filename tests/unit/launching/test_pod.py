"""A pod: its status after its ranks, and without them; the check of its node."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megatron_distill.launching import pod
from megatron_distill.launching.pod import _record, main
from megatron_distill.launching.records import (
    Launches,
    LaunchRecord,
    NodeOutcome,
    Status,
    bad_nodes,
)


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A script with settings, whose folder is `run`."""
    script = tmp_path / "program.py"
    script.write_text(f"print({f'output: {tmp_path}/run'!r})\n")
    return str(script)


def start(program: str, attempt: int = 0, *more: str, pods: str = "localhost") -> int:
    words = ["--pods", pods, "--ranks-per-node", "1", *more]
    return main(["--job", "distill", "--attempt", f"{attempt}", *words, "--", program])


class Ranks:
    """Stands in for the ranks of a pod: they end in one way each time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *outcomes: NodeOutcome) -> None:
        self.left = list(outcomes)
        monkeypatch.setattr(pod.NodePart, "run", lambda part, **_: self.run(part))

    def run(self, part: pod.NodePart) -> NodeOutcome:
        for rank in (2, 3):
            trace = f"Traceback (most recent call last)\nRuntimeError: cause of {rank}\n"
            (part.folder / f"rank_{rank:05d}.err").write_text(trace)
        return self.left.pop(0)


def test_the_status_of_a_pod_follows_from_its_ranks_until_starts_bring_no_checkpoint(
    program: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = time.time()
    failed = NodeOutcome("localhost", 0, Status.FAILED, now, 3, 1, "error: rank 3 failed")
    wrong = NodeOutcome("localhost", 0, Status.MISCONFIGURED, now, 3, 1, "error: disk full")
    ended = [NodeOutcome("localhost", 0, one, now) for one in (Status.UNFINISHED, Status.ENDED)]
    ranks = Ranks(monkeypatch, *ended, failed, wrong)
    assert [start(program, attempt) for attempt in (0, 1)] == [75, 75]
    assert "error" not in capsys.readouterr().err

    # The first rank that failed here, with its traceback.
    assert start(program, 2) == 1
    text = capsys.readouterr().err
    assert "rank 3 on localhost failed first" in text
    assert "RuntimeError: cause of 3" in text
    assert "cause of 2" not in text
    assert "error: rank 3 failed" in text

    assert start(program, 3) == 78
    text = capsys.readouterr().err
    assert "3 launches since step 0 brought no new checkpoint; see the logs in" in text
    assert ranks.left == [wrong]
    (tmp_path / "run" / "checkpoints" / "step_0000020").mkdir(parents=True)
    assert start(program, 3) == 78
    text = capsys.readouterr().err
    assert "error: disk full" in text
    assert "Traceback" not in text
    launches = Launches(tmp_path / "run" / "launches", tmp_path / "run", "")
    found = [launches.outcome(one) for one in launches.all()]
    assert [None if one is None else one.status for one in found] == [
        *(Status.UNFINISHED, Status.UNFINISHED, Status.FAILED, Status.MISCONFIGURED)
    ]


def test_a_folder_that_cannot_be_written_ends_the_job_instead_of_a_thousand_starts(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").write_text("a file")
    assert start(program) == 78
    text = capsys.readouterr().err
    assert f"error: output={tmp_path}/run: cannot write in {tmp_path}/run/launches (Not a" in text
    assert "or name another folder" in text


def test_a_user_s_file_ends_the_launches_of_pods(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launches = Launches(tmp_path / "run" / "launches", tmp_path / "run", "")
    launches.folder.mkdir(parents=True)
    launches.stop_file.touch()
    assert start(program) == 0
    assert f"not started: remove {launches.stop_file} to go on" in capsys.readouterr().err
    assert launches.all() == []

    launch = LaunchRecord("distill", 0, "distill", ["train"], ["n1"], ["n1"], 0, 1.0)
    launches.begin(launch)
    for is_stopped, text in ((True, "no further launch: "), (False, "goes on from step 0")):
        _record(launches, launch, Status.UNFINISHED, None)
        outcome = launches.outcome(launch)
        assert outcome.next.startswith(text)
        if is_stopped:
            launches.stop_file.unlink()


@pytest.mark.parametrize(
    "other", ["healthy", "bad", pytest.param("late", marks=pytest.mark.slow), "alone"]
)
def test_a_pod_on_a_bad_node_starts_no_rank_and_names_the_node(
    other: str,
    program: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The next submission leaves it out, unless every node fails: then the check may be wrong."""
    monkeypatch.setenv("KUBERNETES_NODE", "gpu-17")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    ranks = Ranks(monkeypatch)
    launches = Launches(tmp_path / "run" / "launches", tmp_path / "run", "")
    health = launches.folder / "distill-0" / "health"
    health.mkdir(parents=True)
    # That of a JobSet of the same name before counts for no pod of this one but the others.
    (health / "a.json").write_text(json.dumps({"node": "a", "problems": []}))
    if other in ("healthy", "bad"):
        problems = [] if other == "healthy" else ["broken too"]
        (health / "b.json").write_text(json.dumps({"node": "b", "problems": problems}))
    pods = "a" if other == "alone" else "a,b.distill"
    check = ["--health-command", "echo GPU 3 is hot; exit 3", "--health-seconds", "2"]
    assert start(program, 0, *check, pods=pods) == 1
    text = capsys.readouterr().err
    assert "error: node gpu-17: 'echo GPU 3 is hot; exit 3' failed with status 3: GPU 3 is" in text
    assert "`kubectl cordon` keeps pods away from it" in text
    assert "Traceback" not in text
    recorded = [one.node for one in bad_nodes(launches.folder)]
    assert recorded == (["gpu-17"] if other == "healthy" else [])
    (launch,) = launches.all()
    outcome = launches.outcome(launch)
    assert outcome is not None
    assert outcome.status is Status.FAILED
    assert "gpu-17" in outcome.reason
    assert ranks.left == []

    # A healthy one runs them.
    ranks.left.append(NodeOutcome("a", 0, Status.DONE, time.time()))
    assert start(program, 1, "--health-command", "true", pods=pods) == 0
    assert "node gpu-17: healthy: " in capsys.readouterr().err


def test_a_pod_without_the_gpus_of_its_manifest_names_them(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("KUBERNETES_NODE", raising=False)
    assert start(program, 0, "--gpus", "8") == 1
    lacks = "error: node localhost: has no nvidia-smi, and 8 GPUs per node must be checked"
    assert lacks in capsys.readouterr().err

"""Checks of a node before a launch: its health, and what it sees."""

from __future__ import annotations

import platform
import resource
import shutil
import socket
import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

import megatron_distill
from megatron_distill.launching import node
from megatron_distill.launching.checks.node_health import Health, gpu_problems, main, verdict
from megatron_distill.launching.checks.node_view import (
    named_paths,
    node_differences,
    seen_files,
    versions,
)
from megatron_distill.launching.records import (
    Launches,
    LaunchRecord,
    NodeOutcome,
    Status,
    read_record,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a launch."""
    launch = LaunchRecord("7", 0, "7", ["train"], ["n1"], ["127.0.0.1"], 0, 1.0)
    return Launches(tmp_path, tmp_path, "").begin(launch)


def checked(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Health:
    monkeypatch.setenv("DISTILL_NODE_NAME", "n1")
    monkeypatch.setenv("PATH", str(folder))  # nvidia-smi is there alone
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    assert main(["--launch", str(folder), *words]) == 0
    found = read_record(folder / "health" / "n1.json", Health)
    assert found.node == "n1"
    return found


def problems(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    return checked(folder, monkeypatch, *words).problems


def write_nvidia_smi(folder: Path, text: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


def hang(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_nvidia_smi(folder, "exec /bin/sleep 60")
    monkeypatch.setattr(node, "_GPU_SECONDS", 0.2)


def test_a_healthy_node_has_no_problems(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(folder, monkeypatch, "--command", "true") == []


def test_the_verdict_on_a_healthy_node_is_what_the_checks_have_seen() -> None:
    torch = {"Python": "3.12", "torch": "2.13.0"}
    whole = Health("n1", [], torch, {}, port=17123, gpus=4)
    assert verdict(whole) == "healthy: 4 GPUs, torch 2.13.0, port 17123 free"
    assert verdict(replace(whole, gpus=1, port=None)) == "healthy: 1 GPU, torch 2.13.0"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--command", "echo first; echo bad link >&2; exit 3"], "failed with status 3: bad link"),
        (["--command", "/bin/sleep 60; :", "--command-seconds", "0.1"], "not ended within 0.1 s"),
        (["--gpus", "8"], "has no nvidia-smi, and 8 GPUs per node must be checked"),
    ],
)
def test_a_problem_is_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], problem: str
) -> None:
    (found,) = problems(folder, monkeypatch, *words)
    assert problem in found


def test_a_node_that_cannot_find_the_first_one_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that only the ssh of the machine that submits has a name for."""
    names, addresses = ["n0", "n1"], ["n0.invalid", "127.0.0.1"]
    launch = LaunchRecord("7", 0, "7", ["train"], names, addresses, 0, 1.0)
    (found,) = problems(Launches(tmp_path, tmp_path, "").begin(launch), monkeypatch)
    assert found.startswith("finds no n0.invalid, by which ranks reach n0 (")
    assert found.endswith("needs its address, --hosts n0=10.0.0.1")


def test_a_node_on_which_others_use_every_port_of_the_launch_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as used, socket.socket() as free:
        used.bind(("", 0))
        used.listen()
        free.bind(("", 0))
        taken, port = used.getsockname()[1], free.getsockname()[1]
        free.close()
        launch = LaunchRecord("7", 0, "7", ["train"], ["n1"], ["127.0.0.1"], 0, 1.0)
        launches = Launches(tmp_path, tmp_path, "")
        folder = launches.begin(replace(launch, ports=[taken, port]))
        assert checked(folder, monkeypatch).port == port
        launches.begin(replace(launch, ports=[taken]))
        (found,) = problems(folder, monkeypatch)
    assert found == f"has no free port for the rendezvous: others use {taken}"


def test_a_node_that_does_not_share_the_folder_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "health").mkdir()
    (found,) = problems(tmp_path, monkeypatch)
    assert "the run's folder must be shared" in found
    assert main(["--launch", str(tmp_path / "nowhere")]) == 1
    assert f"does not see {tmp_path}/nowhere: share it with all" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTILL_NODE_NAME", "n1")
    (folder / "health").rmdir()
    (folder / "health").write_text("a file where the folder would be")
    assert main(["--launch", str(folder)]) == 1
    assert f"n1: cannot write in {folder}: " in capsys.readouterr().err


def test_a_node_with_few_open_files_or_a_full_temporary_folder_is_bad(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {resource.RLIMIT_NOFILE: (1024, 4095)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert problems(folder, monkeypatch) == [
        "allows 4095 open files, fewer than 4096 (ulimit -H -n)"
    ]
    limits[resource.RLIMIT_NOFILE] = (1024, 4096)
    assert problems(folder, monkeypatch) == []
    usage = shutil.disk_usage(folder)._replace(free=99_000_000)
    monkeypatch.setattr(shutil, "disk_usage", {tempfile.gettempdir(): usage}.__getitem__)
    assert problems(folder, monkeypatch) == [f"has 99 MB left in {tempfile.gettempdir()}"]


def test_memory_errors_of_gpus_count_where_they_are_corrected_at_all() -> None:
    assert list(gpu_problems("0, 0\n1, 3\n2, [N/A]\n")) == ["GPU 1 has 3 uncorrected memory errors"]


def test_gpus_without_spare_rows_or_that_the_driver_wants_reset_are_bad() -> None:
    table = "0, 0, No, None\n1, 0, Yes, None\n2, 0, 1, Reset\n3, [N/A], [N/A], [N/A]\n"
    table += "4, [GPU requires reset], [N/A]\n5, 0, 0, [Insufficient Permissions]\n"
    assert list(gpu_problems(table)) == [
        "GPU 1 has a bad row of memory and no spare one left",
        "GPU 2 has a bad row of memory and no spare one left",
        "GPU 2 is not to be used before the driver's 'Reset' (nvidia-smi -q)",
        "GPU 4 is not to be used before the driver's '[GPU requires reset]' (nvidia-smi -q)",
    ]


def test_gpus_are_counted_and_looked_at_where_no_scheduler_allots_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checked(folder, monkeypatch).versions["GPUs"] == "0"
    listed = "echo 'GPU 0: H100'; echo 'GPU 1: H100'"
    write_nvidia_smi(folder, f'case "$1" in --list-gpus) {listed} ;; *) echo "1, 3" ;; esac')
    found = checked(folder, monkeypatch)
    assert found.problems == ["GPU 1 has 3 uncorrected memory errors"]
    assert found.versions["GPUs"] == "2"
    assert found.gpus == 2
    # Ranks that leave GPUs over may run beside those of a smaller machine.
    assert checked(folder, monkeypatch, "--ranks-per-node", "1").versions["GPUs"] == "1"
    assert problems(folder, monkeypatch, "--gpus", "3")[0] == "has 2 of 3 GPUs"
    allotted = checked(folder, monkeypatch, "--gpus", "2")
    assert allotted.gpus == 2
    assert "GPUs" not in allotted.versions


def test_an_older_driver_is_asked_for_what_it_knows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = """echo 'Field "gpu_recovery_action" is not a valid field to query.'; exit 2"""
    of_name = f"*gpu_recovery_action*) {unknown} ;; --list-gpus) echo 'GPU 0: V100' ;;"
    write_nvidia_smi(
        folder, f'case "$1" in {of_name} *remapped*) {unknown} ;; *) echo "0, 2" ;; esac'
    )
    assert problems(folder, monkeypatch) == ["GPU 0 has 2 uncorrected memory errors"]
    failed = f"*gpu_recovery_action*) {unknown} ;; --list-gpus) echo 'GPU 0: A100' ;;"
    write_nvidia_smi(folder, f'case "$1" in {failed} *remapped*) echo "0, 0, Yes" ;; esac')
    assert problems(folder, monkeypatch) == ["GPU 0 has a bad row of memory and no spare one left"]
    newer = "--list-gpus) echo 'GPU 0: H100' ;; *) echo '0, 0, No, Reboot' ;;"
    write_nvidia_smi(folder, f'case "$1" in {newer} esac')
    assert problems(folder, monkeypatch) == [
        "GPU 0 is not to be used before the driver's 'Reboot' (nvidia-smi -q)"
    ]


def test_gpus_that_no_rank_has_are_not_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 'case "$*" in *--list-gpus*) echo "GPU 0: V100"; echo "GPU 1: V100" ;;'
    write_nvidia_smi(
        folder, f'{asked} *--id=0*) echo "0, 0" ;; *) echo "0, 0"; echo "1, 3" ;; esac'
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    bad = ["GPU 1 has 3 uncorrected memory errors"]
    assert problems(folder, monkeypatch) == problems(folder, monkeypatch, "--gpus", "2") == bad
    assert problems(folder, monkeypatch, "--ranks-per-node", "1") == []
    for visible in ("0", "", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert problems(folder, monkeypatch) == []


def test_gpus_that_hang_are_a_problem_and_no_further_check_hangs_on_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang(folder, monkeypatch)
    found = checked(folder, monkeypatch, "--command", "echo run >&2; exit 3")
    assert found.problems == ["nvidia-smi has not answered within 0.2 s; restart the machine"]
    assert "GPUs" not in found.versions
    assert found.gpus is None


def test_gpus_that_hang_when_ranks_begin_are_a_recorded_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang(folder, monkeypatch)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    words = ["--launch", str(folder), "--endpoint", "n1:1", "--index", "0", "--", "program.py"]
    assert node.main(words) == 0
    outcome = read_record(folder / "nodes" / "0.json", NodeOutcome)
    assert outcome.status is Status.FAILED
    assert outcome.message.startswith("error: n1: nvidia-smi has not answered within 0.2 s; re")


def test_paths_are_found_in_settings_and_caches_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    settings = {
        "output": "runs/a",
        "precision": "bf16",
        "data": {"sources": [{"paths": ["corpus", "/data/*.jsonl"]}], "cache": "/scratch/cache"},
        "template": "a/b\nc",
        "long": "x" * 300,
        "steps": 3,
    }
    assert list(named_paths(settings)) == ["runs/a", "corpus", "/data/*.jsonl"]


def test_a_node_sees_folders_files_patterns_and_prefixes(tmp_path: Path) -> None:
    for name in ("one.jsonl", "two.jsonl", "tokens.bin", "tokens.idx"):
        (tmp_path / name).write_text(name)
    names = [".", "one.jsonl", "*.jsonl", "tokens", "none", "none*"]
    found = seen_files([str(tmp_path / name) for name in names])
    assert list(found.values()) == [
        "a folder", "1 file of 9 bytes", "2 files of 18 bytes", "2 files of 20 bytes",
        "nothing", "nothing",
    ]  # fmt: skip


def test_the_versions_are_those_of_this_process() -> None:
    found = versions()
    assert found["Python"] == platform.python_version()
    assert found["torch"] == metadata.version("torch")
    assert found["megatron-distill"].startswith(megatron_distill.__version__)


def view(version: str, **files: str) -> dict[str, dict[str, str]]:
    return {"versions": {"torch": version}, "files": files}


def test_a_node_is_compared_with_most_nodes_and_of_two_with_the_first() -> None:
    views = {"n1": view("2.12", a="a folder"), "n2": view("2.13", a="a folder"), "n3": view("2.13")}
    assert node_differences(views) == {"n1": ["has torch: 2.12, but n2: 2.13"]}
    two = {"n1": view("2.13", a="nothing"), "n2": view("2.13", a="a folder")}
    assert node_differences(two) == {"n2": ["sees under a: a folder, but n1: nothing"]}
    assert node_differences({"n1": view("2.13")}) == node_differences({}) == {}


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("0,1", 2), ("3", 1), ("GPU-a,GPU-b,GPU-c", 3), ("0,1,2,3,4,5", 4), ("", 4)],
)
def test_ranks_are_for_the_gpus_that_cuda_s_variable_leaves(
    visible: str | None, count: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = "".join(f"GPU {number}: H100\n  MIG 1g.10gb\n" for number in range(4))
    write_nvidia_smi(folder, f"printf '{listed}'")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert node.ranks_here(announce=False) == count

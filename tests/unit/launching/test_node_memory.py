"""The memory of a node: the least of the host's own and of the limits above a process."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from megatron_distill.launching import node_memory
from megatron_distill.launching.node_memory import NodeMemory, host_memory

VARIABLES = (
    *("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU"),
    *("SLURM_CPUS_ON_NODE", "SLURM_GPUS_ON_NODE"),
)


@pytest.fixture(autouse=True)
def no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(node_memory, "_group_limits", lambda: ())


def test_without_limits_it_is_that_of_the_machine() -> None:
    total = psutil.virtual_memory().total
    assert host_memory() == NodeMemory("this machine", total, is_limit=False)


@pytest.mark.parametrize(
    ("variables", "title", "mib"),
    [
        ({"SLURM_MEM_PER_NODE": "64"}, "this job (SLURM_MEM_PER_NODE=64)", 64),
        (
            {"SLURM_MEM_PER_CPU": "16", "SLURM_CPUS_ON_NODE": "2"},
            "this job (SLURM_MEM_PER_CPU=16)",
            32,
        ),
        (
            {"SLURM_MEM_PER_GPU": "16", "SLURM_GPUS_ON_NODE": "8"},
            "this job (SLURM_MEM_PER_GPU=16)",
            128,
        ),
    ],
)
def test_a_job_has_the_memory_that_it_asked_for(
    variables: dict[str, str], title: str, mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert host_memory() == NodeMemory(title, mib * 2**20, is_limit=True)


@pytest.mark.parametrize(
    "variables", [{"SLURM_MEM_PER_NODE": "0"}, {"SLURM_MEM_PER_CPU": "16"}], ids=["all", "unknown"]
)
def test_all_memory_of_a_node_and_an_unknown_number_of_cores_are_no_limit(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not host_memory().is_limit


@pytest.mark.parametrize(
    ("line", "files", "expected"),
    [
        ("0::/jobs/7", {"jobs/7/memory.max": "max", "jobs/memory.max": "4096"}, [4096]),
        ("0::/", {"memory.max": "512"}, [512]),
        ("0::/of/the/host", {"memory.max": "512"}, [512]),
        (
            "4:cpu,memory:/job",
            {"memory/job/memory.limit_in_bytes": "64", "memory/memory.limit_in_bytes": "128"},
            [64, 128],
        ),
        ("8:pids:/job", {"memory/job/memory.limit_in_bytes": "64"}, []),
    ],
    ids=["group above", "root", "container", "version 1", "no memory"],
)
def test_control_groups_limit_a_process_and_so_do_those_above(
    line: str, files: dict[str, str], expected: list[int], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.undo()
    for name, text in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    own = tmp_path / "cgroup"
    own.write_text(f"{line}\n")
    found = list(node_memory._group_limits(tmp_path / "groups", own))
    assert [one.count for one in found] == expected
    assert all(one.is_limit for one in found)
    assert list(node_memory._group_limits(tmp_path, tmp_path / "missing")) == []

"""Checks of a node: the shared folder, a command, GPUs, and the record that they leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_distill.launching.node_health import gpu_problems, main
from megatron_distill.launching.records import Launch, Launches


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a launch."""
    launch = Launch("7", 0, "7", ["train"], ["n1"], ["n1"], 0, 1.0)
    return Launches(tmp_path, tmp_path, "").begin(launch)


def problems(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    monkeypatch.setenv("DISTILL_NODE_NAME", "n1")
    monkeypatch.setenv("PATH", str(folder))  # a machine without nvidia-smi
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    assert main(["--launch", str(folder), *words]) == 0
    found = json.loads((folder / "health" / "n1.json").read_text())
    assert found["node"] == "n1"
    return list(found["problems"])


def test_a_healthy_node_has_no_problems(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(folder, monkeypatch, "--command", "true") == []


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--command", "echo first; echo bad link >&2; exit 3"], "failed with status 3: bad link"),
        (["--command", "/bin/sleep 60; :", "--command-seconds", "0.1"], "not ended within 0.1 s"),
        (["--gpus", "8"], "has no nvidia-smi, and 8 GPUs are asked for"),
    ],
)
def test_a_problem_is_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], problem: str
) -> None:
    (found,) = problems(folder, monkeypatch, *words)
    assert problem in found


def test_a_node_that_does_not_share_the_folder_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "health").mkdir()
    (found,) = problems(tmp_path, monkeypatch)
    assert "the run's folder must be shared" in found
    assert main(["--launch", str(tmp_path / "nowhere")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_memory_errors_of_gpus_count_where_they_are_corrected_at_all() -> None:
    assert list(gpu_problems("0, 0\n1, 3\n2, [N/A]\n")) == ["GPU 1 has 3 uncorrected memory errors"]

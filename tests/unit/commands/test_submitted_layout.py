"""The layout of a job against its ranks, before anything is submitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.cli import main
from megatron_distill.errors import ConfigError
from megatron_distill.launching.ssh import ranks_on
from tests.guards.source_tree import ROOT

TINY = str(ROOT / "configs" / "tiny.yaml")
PAIR = str(ROOT / "configs" / "llama31_8b_to_1b.yaml")  # of models that are not here
CAPTURE = str(ROOT / "configs" / "llama31_8b_pruned_topk_store_capture.yaml")


def test_a_layout_that_does_not_fit_the_hosts_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "ssh", TINY, f"output={tmp_path}/a", "parallel.tensor=4"]
    assert main([*words, "--hosts", "a,b", "--shell", "env"]) == 78
    error = capsys.readouterr().err
    assert error.startswith("error: this configuration on 2 processes: 1 problem")
    assert "parallel.context = 4 * 1 * 1: " in error
    assert not (tmp_path / "a").exists()


def test_a_host_that_does_not_count_its_gpus_is_named() -> None:
    with pytest.raises(ConfigError, match="no route; the hosts need this folder"):
        ranks_on(["sh", "-c", "echo no route >&2; exit 255"])
    traceback = "Traceback:\n  line 1\nmegatron_distill.errors.TrainingError: it hangs"
    with pytest.raises(ConfigError, match=r"announce=False\)\)': it hangs; the hosts need"):
        ranks_on(["sh", "-c", f"echo '{traceback}' >&2; exit 1"])


@pytest.mark.parametrize(
    ("place", "words", "key"),
    [
        (
            ["kubernetes", "--image", "i"],
            [PAIR, "--gpus-per-node", "6"],
            "parallel.context = 4 * 1 * 1: ",
        ),
        (
            ["kubernetes", "--image", "i"],
            [TINY, "parallel.tensor=2"],
            "parallel.context = 2 * 1 * 1: ",
        ),
        (
            ["slurm"],
            [TINY, "parallel.tensor=2", "--ranks-per-node", "1"],
            "parallel.context = 2 * 1 * 1: ",
        ),
        (
            ["slurm", "--command", "capture"],
            [CAPTURE, "--gpus-per-node", "6"],
            "parallel.context = 4 * 1 * 1: ",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_one_error(
    place: list[str], words: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", *place, *words, "--nodes", "1", "--dry-run"]) == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.count("error: ") == 1
    assert "1 problem" in found.err
    assert key in found.err


def test_models_on_the_claims_of_pods_need_not_be_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["submit", "kubernetes", PAIR, "--nodes", "2", "--gpus-per-node", "8", "--image", "i"]
    words += ["output=/data/runs/a", "--claim", "data:/data"]
    assert main([*words, "--dry-run"]) == 0
    assert "--ranks-per-node" in capsys.readouterr().out

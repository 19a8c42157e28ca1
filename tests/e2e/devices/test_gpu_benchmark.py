"""The benchmark of GPUs runs whole on small shapes, and a part that fails costs no other."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from tests.e2e.processes import ROOT
from tests.e2e.runs import environment

PARTS = ("attention", "step", "capture")
SECONDS = 400


def measured(folder: Path, *words: str) -> tuple[int, str, dict[str, object]]:
    """Run the benchmark; return its status, the text of the results and the raw figures."""
    command = [sys.executable, "benchmarks/gpu.py", "--quick", "--output", str(folder), *words]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, timeout=SECONDS, check=False
    )
    text = (folder / "gpu.md").read_text(encoding="utf-8")
    return done.returncode, text, json.loads((folder / "gpu.json").read_text())["parts"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--output", str(tmp_path / "results")])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    assert end.value.code == 2
    assert "no GPU is visible; --quick tests the harness without one" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_every_part_is_measured_and_written(tmp_path: Path) -> None:
    parts = (*PARTS, "losses") if find_spec("modelopt") else PARTS
    status, text, raw = measured(tmp_path, "--parts", ",".join(parts))
    assert status == 0, text
    assert set(raw) == set(parts)
    assert all(raw.values())
    assert "tokens/s" in text
    assert "slower" in text
    assert "aten::" in (tmp_path / "gpu_profile.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_part_without_time_is_named_and_fails(tmp_path: Path) -> None:
    status, text, raw = measured(tmp_path, "--parts", "capture", "--seconds", "0")
    assert status == 1
    assert raw == {"capture": None}
    assert "the time was over" in text

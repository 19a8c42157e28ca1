"""The benchmark of GPUs runs whole on small shapes, and a part that fails costs no other."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from benchmarks import gpu
from benchmarks.harness.op_profile import LOSS_RANGE, markdown
from tests.e2e.processes import ROOT
from tests.e2e.runs import environment

PARTS = ("attention", "step", "capture", "losses")
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
    status, text, raw = measured(tmp_path, "--parts", ",".join(PARTS))
    assert status == 0, text
    assert set(raw) == set(PARTS)
    assert all(raw.values())
    assert "tokens/s" in text
    assert "slower" in text
    assert "aten::" in (tmp_path / "gpu_profile.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_part_without_time_is_named_and_fails(tmp_path: Path) -> None:
    status, text, raw = measured(tmp_path, "--parts", "capture", "--seconds", "0")
    assert status == 1
    assert raw == {"capture": {}}
    assert "the time was over" in text


def test_an_unknown_part_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["gpu.py", "--quick", "--parts", "step,speed", "--output", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        gpu.main()
    assert "the parts are step, capture, attention, losses, tests" in capsys.readouterr().err


def test_a_case_that_fails_costs_no_other(tmp_path: Path) -> None:
    def fails(_: float) -> None:
        raise SystemExit("CUDA out of memory")

    def never_ends(seconds: float) -> None:
        raise subprocess.TimeoutExpired("worker", seconds)

    report = gpu.Report(tmp_path / "gpu", {"GPU": "none"})
    part = gpu.Part("attention", time.monotonic() + 60, report.write)
    report.parts.append(part)
    assert part.measure("masked", fails) is None
    assert part.measure("endless", never_ends) is None
    assert part.measure("ours", lambda _: {"peak": 3}) == {"peak": 3}
    part.end = time.monotonic()
    assert part.measure("late", lambda _: {"peak": 4}) is None
    # Written although the part has not ended.
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"] == {
        "attention": {"ours": {"peak": 3}}
    }
    text = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "## attention (running)" in text
    for line in ("masked: CUDA out of memory", "endless: not ended after", "late: not run"):
        assert line in text
    assert report.failed == ["attention"]


def test_a_kernel_counts_once_in_a_profile() -> None:
    events = EventList(use_device="cuda")
    times = {"product": (10, 40, "aten::mm"), "rows": (50, 60, "_StoredGradients")}
    loss = _event(1, LOSS_RANGE, 0, 100, is_user_annotation=True)
    loss.append_kernel(LOSS_RANGE, 0, 100)  # as torch has it: the span of the kernels inside
    events.append(loss)
    events.append(_event(9, LOSS_RANGE, 0, 100, DeviceType.CUDA, is_user_annotation=True))
    for number, (kernel, (start, end, name)) in enumerate(times.items(), 2):
        operator = _event(number, name, start, end)
        operator.append_kernel(kernel, 0, end - start)
        events.append(operator)
        events.append(_event(10 + number, kernel, start, end, DeviceType.CUDA))
    events._build_tree()
    lines = markdown(events, on_cuda=True).splitlines()
    assert "| matrix products, heads included | 0 | 75.0% |" in lines
    assert "| losses and their gradients, without products | 0 | 25.0% |" in lines
    assert not any("everything else" in line or "product |" in line for line in lines)


def _event(
    number: int,
    name: str,
    start: int,
    end: int,
    device: DeviceType = DeviceType.CPU,
    *,
    is_user_annotation: bool = False,
) -> FunctionEvent:
    return FunctionEvent(
        number,
        name,
        thread=1,
        start_us=start,
        end_us=end,
        use_device="cuda",
        device_type=device,
        is_user_annotation=is_user_annotation,
    )

"""The benchmark of GPUs runs whole on small shapes, and a part that fails costs no other."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from benchmarks import gpu
from benchmarks.harness.children import ChildFailed, run_child
from benchmarks.harness.environment import installed
from benchmarks.harness.op_profile import LOSS_RANGE, markdown
from tests.e2e.forked_launches import run_forked
from tests.e2e.processes import ROOT, wait_until
from tests.e2e.runs import environment

PARTS = ("attention", "step", "run", "capture", "kernels", "losses")
SECONDS = 400


def measured(folder: Path, *words: str) -> tuple[int, str, dict[str, object]]:
    """Run the benchmark; return its status, the text of the results and the raw figures."""
    command = [sys.executable, "benchmarks/gpu.py", "--quick", "--output", str(folder), *words]
    done = run_forked(command, environment(), ROOT, seconds=SECONDS)
    text = (folder / "gpu.md").read_text(encoding="utf-8")
    return done.returncode, text, json.loads((folder / "gpu.json").read_text())["parts"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_with_a_message(
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
    loop, alone = raw["run"]["run"]["loop"], raw["run"]["run"]["alone"]
    assert (len(loop), len(alone)) == (19, 20)  # between the starts of 20 steps
    assert min(*loop, *alone) > 0
    assert raw["kernels"]["kernels"]["js_divergence, near its teacher"]["all"] > 0
    assert "aten::" in (tmp_path / "gpu_profile.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    losses = {(row[1], row[2]) for row in cells if len(row) == 7}
    assert ("forward_kl", "copy of 10 bytes per logit") in losses
    assert any(family.endswith(", 499 ids") for family, _ in losses)
    has_modelopt = installed("nvidia-modelopt") is not None
    assert {("forward_kl", "ModelOpt"), ("top-k", "ModelOpt")} <= losses or not has_modelopt
    assert ("jsd", "Liger") in losses or installed("liger-kernel") is None
    steps = [row[2:-1] for row in cells if len(row) == 9 and row[2] in ("ours", "peer")]
    assert [row[0] for row in steps] == (["ours", "peer"] if has_modelopt else ["ours"])
    for subject, *_, teacher, peak in steps:
        assert int(peak.replace(",", "")) > 0
        assert subject == "peer" or 0 < int(teacher.removesuffix("%")) < 100


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
    assert (
        "the parts are step, run, capture, attention, kernels, losses, tests"
        in capsys.readouterr().err
    )


def test_a_case_that_fails_costs_no_other(tmp_path: Path) -> None:
    def fails(_: float) -> None:
        raise ChildFailed("CUDA out of memory")

    def never_ends(seconds: float) -> None:
        raise ChildFailed(f"not ended after {seconds:.0f} s", {"peak": 2})

    report = gpu.Report(tmp_path / "gpu", {"GPU": "none"})
    part = gpu.Part("attention", time.monotonic() + 60, report.write)
    report.parts.append(part)
    assert part.measure("masked", fails) is None
    assert part.measure("endless", never_ends) == {"peak": 2}  # written before
    assert part.measure("ours", lambda _: {"peak": 3}) == {"peak": 3}
    part.end = time.monotonic()
    assert part.measure("late", lambda _: {"peak": 4}) is None
    # Written although the part has not ended.
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"] == {
        "attention": {"endless": {"peak": 2}, "ours": {"peak": 3}}
    }
    text = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "## attention (running)" in text
    for line in ("masked: CUDA out of memory", "endless: not ended after", "late: not run"):
        assert line in text
    assert report.failed == ["attention"]


GPU_TESTS = """\
import pytest

pytestmark = pytest.mark.gpu


def test_passes() -> None:
    assert 1 + 1 == 2


def test_fails() -> None:
    assert 1 + 1 == 3, "not on this device"
"""


@pytest.mark.slow
def test_the_part_of_the_tests_counts_and_names_those_that_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_device.py").write_text(GPU_TESTS)
    (folder / "test_host.py").write_text("def test_of_the_host() -> None:\n    assert False\n")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    part = gpu.Part("tests", time.monotonic() + SECONDS, lambda: None)
    gpu._tests(gpu.SMALL, part)
    found = part.raw["tests"]
    assert found["status"] == 1
    ended = {name.split("::")[-1]: outcome for name, outcome in found["ended"].items()}
    assert ended == {"test_passes": "PASSED", "test_fails": "FAILED"}
    assert part.lines == ["1 of 2 tests that ended have passed."]
    (failure,) = part.failures
    assert "not on this device" in failure
    assert "test_device.py::test_fails" in failure


WORKER = """\
import json, pathlib, subprocess, sys, time
result = pathlib.Path(sys.argv[sys.argv.index("--result") + 1])
result.write_text(json.dumps({"peak": 4}))
if "--fail" in sys.argv:
    sys.exit("the profiler failed")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("words", "seconds", "reason"),
    [
        pytest.param(("--fail",), 60.0, "the profiler failed", id="fails"),
        # The worker starts within these seconds on a busy machine too, and they are waited for.
        pytest.param((), 15.0, "not ended after 15 s", id="takes too long", marks=pytest.mark.slow),
    ],
)
def test_figures_written_before_a_failure_are_kept(
    tmp_path: Path, words: tuple[str, ...], seconds: float, reason: str
) -> None:
    worker, grandchild = tmp_path / "worker.py", tmp_path / "pid"
    worker.write_text(WORKER)
    with pytest.raises(ChildFailed, match=reason) as failed:
        run_child(str(worker), [str(grandchild), *words], processes=1, name="step", seconds=seconds)
    assert failed.value.result == {"peak": 4}
    if not words:
        # A GPU would still be in use.
        assert not alive(int(grandchild.read_text()))


def test_a_benchmark_that_is_asked_to_end_leaves_no_process(tmp_path: Path) -> None:
    worker, grandchild = tmp_path / "worker.py", tmp_path / "pid"
    worker.write_text(WORKER)
    program = f"""
from benchmarks.harness.children import run_child
run_child({str(worker)!r}, [{str(grandchild)!r}], processes=1, name="step", seconds=60)
"""
    running = subprocess.Popen([sys.executable, "-c", program], env=environment(), cwd=ROOT)
    wait_until(lambda: grandchild.exists() and grandchild.read_text() != "", running)
    running.terminate()
    assert running.wait(SECONDS) == 128 + signal.SIGTERM
    assert not alive(int(grandchild.read_text()))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_each_test_of_pytest_counts_once() -> None:
    name = "tests/e2e/devices/test_gpu.py::test_a_course[teacher's {}]"
    lines = [
        f"[gw0] [ 12%] PASSED {name.format('rank')} ",
        f"[gw1] [ 25%] FAILED {name.format('layout')} ",
        "tests/kernels/test_row_kernels.py::test_on_a_gpu PASSED              [ 50%]",
        "[gw1] [ 60%] SKIPPED tests/e2e/devices/test_gpu.py::test_text ",
        "E   assert seen == {'a::b PASSED': 1}",
        f"FAILED {name.format('layout')} - assert 1 == 2",
    ]
    assert gpu._outcomes(lines) == {
        name.format("rank"): "PASSED",
        name.format("layout"): "FAILED",
        "tests/kernels/test_row_kernels.py::test_on_a_gpu": "PASSED",
    }


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

"""A measurement of this machine is a device that plans, and names what disturbs it."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_distill.cli import main
from megatron_distill.planning.calibration.neighbours import (
    busy_seconds,
    measured_beside,
    own_seconds,
)
from megatron_distill.planning.device import load_device
from megatron_distill.runtime.torchrun import available_cores
from tests.unit.commands.test_plan import RUN


@pytest.mark.slow
def test_the_measured_machine_plans_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, config = tmp_path / "mine.yaml", tmp_path / "run.yaml"
    assert main(["calibrate", "--output", str(file)]) == 0
    device = load_device(str(file))
    assert device.measured_in > 0
    assert f"measured in {device.measured_in:.0f} s\n" in capsys.readouterr().out
    assert device.source.startswith("measured by megatron-distill calibrate")
    for curve in (device.product_efficiency, device.memory_efficiency):
        assert all(0 < share <= 1 for _, share in curve)
    assert set(device.choice_ns) == set(device.logit_ns) == {"fp32", "bf16"}
    assert set(device.narrow_choice_ns) == {"fp32", "bf16"}
    assert set(device.aliased_logit_ns) == {"fp32"}
    assert {"kernel_us", "choice_ns.fp32", "node.latency_us"} <= set(device.spread)
    assert len(device.step_factors) == (1 if available_cores() == 1 else 3)
    assert device.layer_us.keys() == device.step_factors.keys()
    for factors in device.step_factors.values():
        assert {"teacher", "forward", "loss", "backward"} <= set(factors["fp32"])
    # The first steps' losses have the rates of logits, so that their factor is one; it is less
    # where the products alone were measured in a slower minute than the steps.
    first = "one rank" if available_cores() == 1 else "idle cores"
    factor, each = device.step_factors[first]["fp32"]["loss"], device.logit_ns["fp32"]
    assert factor == pytest.approx(1.0, abs=5e-4) or (factor < 1.0 and each < 0.02)
    config.write_text(RUN)
    capsys.readouterr()
    assert main(["plan", str(config), "--devices", "2", "--device", str(file)]) == 0
    assert "plan for 2 x " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--run", "runs/first"], "--run and --device go together"),
        (["--document-length", "512"], "--document-length 512: must be 1 or more, and goes with"),
    ],
)
def test_options_of_a_run_go_together(
    given: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["calibrate", *given])
    assert end.value.code == 2
    assert problem in capsys.readouterr().err


def test_the_work_of_others_is_counted_and_ones_own_is_not() -> None:
    busy, own = busy_seconds(), own_seconds()
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline = time.monotonic() + 60
        while sum(psutil.Process(other.pid).cpu_times()[:2]) < 0.4:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        of_others = busy_seconds() - busy - (own_seconds() - own)
        assert of_others > 0.3  # it may have neighbours
    finally:
        other.kill()
        other.wait()
    assert own_seconds() - own > 0.2  # as an ended child its work is this process's own


def test_a_disturbed_measurement_is_marked(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("megatron_distill"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="megatron_distill"):
        assert measured_beside(0.2, cores=2) == "measured by megatron-distill calibrate"
        assert not caplog.records
        source = measured_beside(1.14, cores=2)
    assert source.endswith("calibrate, while other processes used 1.1 of 2 cores")
    assert "other processes used 1.1 of 2 cores meanwhile, so that the rates are too low" in (
        caplog.text
    )

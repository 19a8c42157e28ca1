"""A measurement of this machine is a device that plans, whatever its speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.cli import main
from megatron_distill.planning.device import load_device
from tests.unit.commands.test_plan import RUN


@pytest.mark.slow
def test_the_measured_machine_plans_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, config = tmp_path / "mine.yaml", tmp_path / "run.yaml"
    assert main(["calibrate", "--output", str(file)]) == 0
    device = load_device(str(file))
    assert device.source == "measured by megatron-distill calibrate"
    for curve in (device.product_efficiency, device.memory_efficiency):
        assert all(0 < share <= 1 for _, share in curve)
    config.write_text(RUN)
    capsys.readouterr()
    assert main(["plan", str(config), "--devices", "2", "--device", str(file)]) == 0
    assert "plan for 2 x " in capsys.readouterr().out


def test_a_run_and_its_device_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["calibrate", "--run", "runs/first"])
    assert end.value.code == 2
    assert "--run and --device go together" in capsys.readouterr().err

"""Calibrations in the hour of a measurement, and planned times beside measured ones."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from benchmarks.harness.environment import ROOT
from megatron_distill.config import teacher_ranks
from megatron_distill.planning.device import DeviceProfile, read_device
from megatron_distill.planning.search import planned
from megatron_distill.train.reports.planned_run import configured_choice, open_shapes, planned_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron_distill.config import RunConfig

__all__ = [
    "PLANNED_COLUMNS",
    "calibrated",
    "dumped",
    "loaded",
    "measured_in_turns",
    "plan_cells",
    "planned_seconds",
    "step_cells",
]

PLANNED_COLUMNS: Final = ("planned (s)", "error")
_CHILD_SECONDS: Final = 600


def calibrated() -> DeviceProfile:
    """Return the machine as a process of its own measures it now, in about a minute."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "this-cpu.yaml"
        words = ["-m", "megatron_distill.cli", "calibrate", "--output", str(path)]
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True, timeout=_CHILD_SECONDS)
        return read_device(path)


def measured_in_turns(
    names: Sequence[str], seconds_of: Callable[[str, int], list[float]], *, rounds: int
) -> tuple[dict[str, list[list[float]]], list[DeviceProfile]]:
    """Return the seconds of the steps of runs by name and round, and calibrations around them.

    seconds_of: runs one of them in a round, counted from 0. Every second round is backwards. The
    machine is calibrated before each round and at the end.
    """
    seconds: dict[str, list[list[float]]] = {name: [] for name in names}
    devices = []
    for number in range(rounds):
        devices.append(calibrated())
        for name in names if number % 2 == 0 else names[::-1]:
            steps = seconds_of(name, number)
            seconds[name].append(steps)
            sys.stdout.write(f"round {number + 1}: {name}: {1e3 * median(steps):.1f} ms\n")
            sys.stdout.flush()
    devices.append(calibrated())
    return seconds, devices


def dumped(devices: Sequence[DeviceProfile]) -> list[dict[str, Any]]:
    """Return devices as a record has them."""
    return [one.model_dump(mode="json") for one in devices]


def loaded(devices: Sequence[dict[str, Any]]) -> list[DeviceProfile]:
    """Return the devices of a record."""
    return [DeviceProfile.model_validate(one) for one in devices]


def planned_seconds(
    config: RunConfig, devices: Sequence[DeviceProfile], *, ranks: int
) -> list[float]:
    """Return the planner's seconds of a step of a run, for each device that its ranks share.

    ranks: of the launch, a teacher's own included. Vocabularies have the rows that the
    configuration gives.
    """
    run = planned_run(config, open_shapes(config))
    own = sum(count for _, count in teacher_ranks(config, ranks_per_node=ranks))
    choice = configured_choice(config, run, ranks=ranks, teachers=own)
    threads = config.runtime.threads
    return [
        planned(run, choice, device.shared_by(ranks, threads=threads)).time.total
        for device in devices
    ]


def step_cells(rounds: Sequence[Sequence[float]], plans: Sequence[float]) -> list[str]:
    """Return cells in ms: the median step of all rounds with their extremes, then `plan_cells`."""
    of_rounds = [1e3 * median(steps) for steps in rounds]
    step = median(second for steps in rounds for second in steps)
    shown = f"{1e3 * step:.1f} ({min(of_rounds):.1f} to {max(of_rounds):.1f})"
    return [shown, *plan_cells(plans, step, unit=1e-3)]


def plan_cells(plans: Sequence[float], seconds: float, *, unit: float = 1.0) -> list[str]:
    """Return the cells of `PLANNED_COLUMNS`: the median, the extremes, and the error.

    unit: seconds of one of the table's. Without plans the cells are empty.
    """
    if not plans:
        return ["", ""]
    middle, least, most = (each / unit for each in (median(plans), min(plans), max(plans)))
    digits = 3 if unit == 1.0 else 1
    shown = f"{middle:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"
    return [shown, f"{100 * (median(plans) / seconds - 1):+.1f} %"]

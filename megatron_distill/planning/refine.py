"""A device's rates refined by the measured steps of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, get_args

from megatron_distill.errors import DataError
from megatron_distill.planning.device import DeviceProfile, Phase
from megatron_distill.planning.parameters import stage_numbers
from megatron_distill.planning.run import Choice, PlannedRun
from megatron_distill.planning.step_time import phase_seconds

__all__ = ["MeasuredSteps", "read_steps", "refined"]

# The first steps compile, allocate and fill caches.
_WARM: Final = 3
# A phase shorter than this share of the step is too short to measure its rate.
_LEAST: Final = 0.005


@dataclass(frozen=True)
class MeasuredSteps:
    """Medians over a run's steps: seconds of each phase on the first rank, and of the step."""

    phases: Mapping[Phase, float]
    step: float
    count: int
    tokens_per_second: float
    tflops_per_device: float

    def devices(self, flops_per_token: float) -> int:
        """Return the number of devices of the run, which its log has by its FLOPs alone."""
        total = flops_per_token * self.tokens_per_second
        return max(1, round(total / (self.tflops_per_device * 1e12)))


def read_steps(path: Path) -> MeasuredSteps:
    """Read a `metrics.jsonl`. Raises DataError: it has too few steps with phases."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the last line of a run that is being written
        if isinstance(record, dict) and "timers" in record and "step_seconds" in record:
            records.append(record)
    records = records[_WARM:]
    if not records:
        raise DataError(
            f"{path}: has no step with `timers` after the first {_WARM}; let the run make more"
        )

    def middle(values: Sequence[float]) -> float:
        return float(median(values))

    return MeasuredSteps(
        {
            phase: middle([record["timers"].get(phase, 0.0) / 1e3 for record in records])
            for phase in get_args(Phase)
        },
        middle([record["step_seconds"] for record in records]),
        len(records),
        middle([record["tokens_per_second"] for record in records]),
        middle([record["tflops_per_device"] for record in records]),
    )


def refined(
    device: DeviceProfile,
    run: PlannedRun,
    choice: Choice,
    measured: MeasuredSteps,
    *,
    shared_by: int,
    threads: int | None = None,
) -> DeviceProfile:
    """Return the device with factors that make the run's predicted phases the measured ones.

    shared_by, threads: ranks of a machine that share a CPU, and threads of each, as in
    `DeviceProfile.shared_by`. Phases that the run hardly has keep theirs. A CPU's factors hold for
    runs of that precision with one rank, several, or idle cores, as it had.
    """
    plain = device.model_copy(update={"factors": {}})
    on_cpu = device.cores is not None
    shared = plain.shared_by(shared_by, threads=threads)
    numbers = stage_numbers(run.student, choice.layout, choice.layers)
    predicted = phase_seconds(run, choice, shared, numbers)
    before = device.step_factors.get(shared.sharing, {})
    factors = dict(before.get(run.precision, {}) if on_cpu else device.factors)
    for phase, seconds in measured.phases.items():
        enough = min(seconds, predicted[phase]) > _LEAST * measured.step
        # Waiting for other stages is a result of the other phases.
        waits = phase == "communication" and choice.layout.pipeline > 1
        if enough and not waits:
            known = factors.get(phase, 1.0) if on_cpu else 1.0
            factors[phase] = round(known * seconds / predicted[phase], 4)
    if not on_cpu:
        return device.model_copy(update={"factors": factors})
    own = {**device.step_factors, shared.sharing: {**before, run.precision: factors}}
    replaced = f"step_factors.{shared.sharing}.{run.precision}."
    spread = {key: one for key, one in device.spread.items() if not key.startswith(replaced)}
    return device.model_copy(update={"factors": {}, "step_factors": own, "spread": spread})

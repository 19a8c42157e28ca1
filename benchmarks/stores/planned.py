"""The steps of `training_worker`, and the planner's prediction of one from a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from benchmarks.steps.cases import LAYOUTS, WORKLOADS, Body, Case, Workload
from benchmarks.steps.planned import planned_from_store
from megatron_distill.planning.device import DeviceProfile

__all__ = ["TRAINED", "planned_training"]

# The quickstart's student: with so little work per token a store is hardest to hide.
_SMALL: Final = Workload(
    "quickstart", Body(2, 96, 256, 4, 2), Body(4, 192, 512, 6, 2), 2048, 128, 4, 2
)
# One sequence per step of the larger one, so that many steps can be taken.
TRAINED: Final = {
    one.name: Case(one, LAYOUTS["TP1"], "fp32")
    for one in (replace(WORKLOADS["v32k"], micro_batch_size=1), _SMALL)
}


def planned_training(
    workload: str, devices: Sequence[DeviceProfile], *, ids: int, threads: int
) -> list[float]:
    """Return the planner's seconds of a step from a store with so many ids, for each device."""
    case = TRAINED[workload]
    return [
        planned_from_store(case, device, ids=ids, threads=threads).time.total for device in devices
    ]

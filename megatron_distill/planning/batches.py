"""The time of a step's batches: reading samples and a store's answers, and preparing tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from megatron_distill.planning.device import DeviceProfile
    from megatron_distill.planning.run import Choice, PlannedRun

__all__ = ["batch_seconds", "step_reading_seconds", "store_seconds"]

# Seconds in which one core decodes a token of a store, and each of its ids with u8, the default: a
# plan opens no store to see another codec. Fitted to `read` of benchmarks/results/store.md.
_STORE_TOKEN: Final = 0.09e-6
_STORE_ID: Final = 5.1e-9
# Of Python's threads on a CPU, in calls of torch: what a micro-batch takes to be read and prepared
# beside the step, with one tokenizer and what two take more; and a step's figures. Fitted to the
# threads' times in runs of benchmarks/recipes.py.
_CALLS_OF_BATCH: Final = 900
_CALLS_OF_ALIGNED: Final = 1600
_CALLS_OF_STEP: Final = 350


def store_seconds(run: PlannedRun, choice: Choice) -> float:
    """Return the time in which a replica reads its answers of a step from a store."""
    return run.tokens / choice.data * (_STORE_TOKEN + run.store_ids * _STORE_ID)


def step_reading_seconds(run: PlannedRun, choice: Choice) -> float:
    """Return the time in which one rank reads the samples of a step, for all ranks."""
    if choice.place == "store" and run.teacher is not None:
        return 0.0  # a store that would be captured has the samples
    return run.tokens * run.reading_seconds


def batch_seconds(run: PlannedRun, choice: Choice, device: DeviceProfile, *, waits: float) -> float:
    """Return the time by which the calls of a step's batches delay those of the step, on a CPU.

    Python's threads take turns: only while the step waits do the calls of the next batch delay none
    of its own. waits: seconds in which it does. On a GPU the calls run ahead of the kernels.
    """
    if device.kind != "cpu":
        return 0.0
    calls = _CALLS_OF_BATCH + _CALLS_OF_ALIGNED * run.is_aligned
    each = device.kernel_us * 1e-6
    beside = max(0.0, choice.micro_batches(run) * calls * each - waits)
    # Ranks that share a core do not write down their figures at the same time.
    return beside + _CALLS_OF_STEP * each * device.core_share

"""The time of a step's batches: reading samples and a store's answers, and preparing tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from megatron_distill.planning.device import reading_seconds

if TYPE_CHECKING:
    from megatron_distill.planning.device import DeviceProfile
    from megatron_distill.planning.run import Choice, PlannedRun

__all__ = ["batch_seconds", "reading_limit", "step_reading_seconds", "store_seconds"]

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
# Share of a step from which the wait for its samples is told.
_NOTABLE: Final = 0.02


def store_seconds(run: PlannedRun, choice: Choice) -> float:
    """Return the time in which a replica reads its answers of a step from a store."""
    return run.tokens / choice.data * (_STORE_TOKEN + run.store_ids * _STORE_ID)


def step_reading_seconds(run: PlannedRun, choice: Choice) -> float:
    """Return the time in which one rank reads the samples of a step, for all ranks."""
    if choice.place == "store" and run.teacher is not None:
        return 0.0  # a store that would be captured has the samples
    return run.tokens * run.reading_seconds


def reading_limit(run: PlannedRun, choice: Choice, *, step: float) -> str:
    """Return the sentences on a step that waits for its samples, empty where it does not.

    step: its seconds without that wait.
    """
    reading = step_reading_seconds(run, choice)
    if reading - step < _NOTABLE * reading:
        return ""
    text = (
        f"Reading limits 1: one rank reads the samples of all in {reading:,.3g} s, "
        f"{run.tokens / reading / 1e6:,.2f} million tokens/s, where the rest of the step takes "
        f"{step:,.3g} s. More or faster devices do not help. "
    )
    if run.is_aligned:
        return f"{text}More `data.workers` do, on as many cores."
    if run.reading_seconds > reading_seconds(texts=0.0, aligned_by=None):
        return f"{text}Texts that `megatron-distill data tokenize` has prepared do."
    return text.rstrip()


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

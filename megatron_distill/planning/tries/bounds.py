"""The order of choices by the time of a step, and bounds of it that take less to compute.

They leave slow choices out of a search, by the work of few of a layout's stages or of none alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from megatron_distill.planning.batches import step_reading_seconds, store_seconds
from megatron_distill.planning.step_time import (
    known_heads,
    layer_times,
    partly_recomputed,
    pass_factors,
    sends_beside_work,
    stage_message,
    student_rank,
    teacher_seconds,
    teacher_stages,
)

if TYPE_CHECKING:
    from megatron_distill.planning.device import DeviceProfile
    from megatron_distill.planning.operations import Rank
    from megatron_distill.planning.run import Choice, PlannedRun
    from megatron_distill.planning.step_time import StepTime

__all__ = ["Order", "least_order", "least_order_of_family", "least_seconds", "order_of"]

# Of choices in a ranking: seconds of a step, and where reading decides those, of its rest.
Order = tuple[float, float]
# Share of a time that sums of floating-point numbers in another order differ by, and much more.
_ROUNDED: Final = 1e-6
# The same of reading alone, which the parts of a step add up to.
_SUMMED: Final = 1e-12
_DIGITS: Final = 9  # of seconds, in which times that rank alike are equal


def order_of(time: StepTime) -> Order:
    """Return the key of a ranking: where reading decides all times, the shortest rest is first."""
    return round(time.total, _DIGITS), time.total - time.data


def least_order(run: PlannedRun, choice: Choice, device: DeviceProfile) -> Order:
    """Return a key that the choice's own one is not below."""
    return _with_reading(run, choice, least_seconds(run, choice, device))


def least_order_of_family(run: PlannedRun, choice: Choice, device: DeviceProfile) -> Order:
    """Return a key that none is below of the choices with its sizes and any number of stages.

    Those have as much recomputation as it has, or more.
    """
    return _with_reading(run, choice, _least_seconds_of_work(run, choice, device))


def _with_reading(run: PlannedRun, choice: Choice, least: float) -> Order:
    reading = (1 - _SUMMED) * step_reading_seconds(run, choice)
    return round(max(least, reading), _DIGITS), least


def least_seconds(run: PlannedRun, choice: Choice, device: DeviceProfile) -> float:
    """Return a time that no step of the choice goes below, without its updates and reading.

    A teacher's passes count whole, and few of the student's stages do.
    """
    own = _student_seconds(run, choice, device)
    if choice.place == "store":
        longest = max(own, store_seconds(run, choice))
    else:
        teacher, bubble = teacher_seconds(run, choice, device)
        is_beside = choice.place == "own ranks"
        longest = max(own, teacher) if is_beside else own + teacher + bubble
    return (1 - _ROUNDED) * longest


def _least_seconds_of_work(run: PlannedRun, choice: Choice, device: DeviceProfile) -> float:
    """Return a time that no step goes below with the choice's sizes and any number of stages.

    At best the stages share the work evenly: twice as many have half of it each, and as half as
    many replicas are left, twice the micro-batches.
    """
    if device.core_share < 1.0:
        return 0.0  # a waiting stage lends its cores
    rank = student_rank(run, choice, device)
    work = _seconds_of_layers(run, choice, device, rank)(range(run.student.num_layers))
    if not run.several:  # replicas decide how many of several teachers run
        work += _seconds_of_heads(run, choice, device, rank)
        if choice.is_same_layout:
            work += sum(stage.forward for stage in teacher_stages(run, choice, device))
    return (1 - _ROUNDED) * choice.micro_batches(run) * work / choice.layout.pipeline


def _student_seconds(run: PlannedRun, choice: Choice, device: DeviceProfile) -> float:
    """Return a time that the student's passes do not go below.

    The stages that do not count whole count once, with the bubble that they make before and behind
    the others.
    """
    if device.core_share < 1.0:
        return 0.0
    rank, last = student_rank(run, choice, device), choice.layout.pipeline - 1
    seconds = _seconds_of_layers(run, choice, device, rank)
    of_heads = _seconds_of_heads(run, choice, device, rank)
    message = 0.0
    if last and not sends_beside_work(choice, device):
        message = stage_message(run.student, rank, ranks=choice.ranks)
    of_stages = {
        stage: sum(map(seconds, choice.chunk_layers(stage))) + of_heads * (stage == last) + message
        for stage in {0, last // 2, last}
    }
    chunks, count = choice.layout.virtual_pipeline or 1, choice.micro_batches(run)
    # The path through the last stage passes all others; through another one not always.
    slowest = of_stages[last] if chunks == 1 else max(of_stages.values())
    others = seconds(range(run.student.num_layers)) + of_heads + (last + 1) * message - slowest
    through = count * slowest + max(0.0, others) / chunks
    return max(through, count * max(of_stages.values()))


def _seconds_of_layers(
    run: PlannedRun, choice: Choice, device: DeviceProfile, rank: Rank
) -> Callable[[range], float]:
    """Return what gives the time of both passes of consecutive layers."""
    times, (ahead, back, _) = layer_times(run, rank), pass_factors(run, device)

    def seconds(layers: range) -> float:
        passes = partly_recomputed(choice, times, layers)
        return passes.forward_seconds * ahead + passes.backward_seconds * back

    return seconds


def _seconds_of_heads(run: PlannedRun, choice: Choice, device: DeviceProfile, rank: Rank) -> float:
    heads, (_, _, loss) = known_heads(run, choice, rank), pass_factors(run, device)
    return (heads.forward_seconds + heads.backward_seconds) * loss

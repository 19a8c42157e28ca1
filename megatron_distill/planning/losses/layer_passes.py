"""Seconds of the losses between layers on one rank: of a micro-batch's passes, and of projectors.

A loss is computed in the forward pass of the student's layer, and its gradient in the backward pass
of the layer, on the layer's stage (`losses.features`). Rates as of `operations`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from megatron_distill.planning.losses.gathered_layers import gathered_layers
from megatron_distill.planning.losses.layer_messages import (
    blocks_of_maps,
    heads_of_maps,
    projector_groups,
    projector_numbers,
)
from megatron_distill.planning.losses.layer_work import PairWork, map_work, state_work
from megatron_distill.planning.operations import Passes, Rank, element_seconds

if TYPE_CHECKING:
    from megatron_distill.planning.device import DeviceProfile
    from megatron_distill.planning.run import Choice, LayerLoss, PlannedRun

__all__ = ["FeatureTimes", "pair_work", "projector_seconds"]

_TWO_MAPS: Final = 8  # bytes of an element of both models' maps
# Bytes of a projector's number in a step besides the gradient's sum: gradient, weight and both
# moments, the latter three written too; the gradient is zeroed and read for its norm.
_UPDATE_BYTES: Final = 4 + 3 * 8 + 2 * 4


def pair_work(run: PlannedRun, choice: Choice, loss: LayerLoss) -> PairWork:
    """Return the work of one pair of layers for a micro-batch on a rank of the student."""
    assert run.teacher is not None
    layout = choice.layout
    if loss == "attention":
        return map_work(
            *heads_of_maps(run, choice),
            batch=choice.micro_batch_size,
            length=run.sequence_length,
            context=layout.context,
            width=run.width,
        )
    tokens = choice.micro_batch_size * run.sequence_length / layout.context
    sizes = run.projector or (run.teacher.hidden_size,)
    split = layout.tensor if layout.sequence else 1
    return state_work(loss, tokens / split, sizes, width=run.width)


class FeatureTimes:
    """The times of the losses between layers, each kind of loss computed once.

    rank: of the student. Projectors have the precision of the run, without fp8.
    """

    def __init__(self, run: PlannedRun, choice: Choice, rank: Rank) -> None:
        self._run, self._choice = run, choice
        self._rank = replace(rank, precision=run.precision)
        self._known: dict[tuple[LayerLoss, bool], Passes] = {}

    def passes(self, layers: range, *, stage: int, trains: bool = True) -> Passes:
        """Return the time of the losses of a chunk's layers, counted from 0, on a pipeline rank.

        trains: with the backward pass; else of the pass that measures for the balance.
        """
        pairs = self._choice.compared_layers(self._run)
        if not pairs:
            return Passes()
        counts = Counter(pair.loss for pair in pairs if pair.student - 1 in layers)
        total = Passes()
        for loss, count in counts.items():
            if (loss, trains) not in self._known:
                self._known[loss, trains] = self._of_pair(loss, stage, trains=trains)
            total += self._known[loss, trains].times(count)
        return total

    def _of_pair(self, loss: LayerLoss, stage: int, *, trains: bool) -> Passes:
        run, work = self._run, pair_work(self._run, self._choice, loss)
        tensor, context = self._messages(loss, stage)
        once = tensor + context
        if trains:
            ahead, back = (one.seconds(self._rank) for one in (work.value, work.gradient))
            return Passes(ahead, back, once, once, 2 * tensor, 2 * context)
        measured = work.gradient if run.measures == "gradients" else work.value
        return Passes(measured.seconds(self._rank), 0.0, once, 0.0, tensor, context)

    def _messages(self, loss: LayerLoss, stage: int) -> tuple[float, float]:
        """Return the time of one pass of a pair over tensor and over context ranks."""
        run, choice, device = self._run, self._choice, self._rank.device
        if loss != "attention":
            gathered = gathered_layers(run, choice, stage)
            pairs = max(1, gathered.pairs)
            tensor, context = gathered.seconds(device)
            return tensor / pairs, context / pairs
        split, blocks = choice.layout.tensor, blocks_of_maps(run, choice)
        summed = _TWO_MAPS * choice.micro_batch_size * blocks.scores / blocks.count
        return blocks.count * device.link(split).summed(summed, ranks=split), 0.0


def projector_seconds(
    run: PlannedRun, choice: Choice, device: DeviceProfile
) -> tuple[float, float]:
    """Return the time in which a step sums the projectors' gradients, and that of their updates."""
    numbers = projector_numbers(run, choice)
    if not numbers:
        return 0.0, 0.0
    groups = projector_groups(choice)
    summed = sum(device.link(span).summed(4.0 * numbers, ranks=size) for size, span in groups)
    if device.update_ns:
        return summed, numbers * device.update_ns * 1e-9
    return summed, element_seconds(device, float(numbers) * _UPDATE_BYTES)

"""Times of pipeline stages for a micro-batch, and of all of its micro-batches through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_distill.planning.operations import Passes

__all__ = ["StageTimes", "alternating_seconds", "pipeline_seconds", "sum_of"]


@dataclass(frozen=True)
class StageTimes:
    """One pipeline rank's times of one micro-batch, the heads on the last rank.

    chunks: its layers, one entry per virtual stage. message: of a hidden state to the next stage.
    features: the part of the losses between layers in the chunks.
    """

    chunks: tuple[Passes, ...]
    heads: Passes
    message: float
    features: Passes = Passes()

    @cached_property
    def layers(self) -> Passes:
        """All chunks together."""
        return sum_of(self.chunks)

    @cached_property
    def forward(self) -> float:
        """Seconds of the forward pass."""
        return self.layers.forward_seconds + self.heads.forward_seconds

    @cached_property
    def backward(self) -> float:
        """Seconds of the backward pass."""
        return self.layers.backward_seconds + self.heads.backward_seconds

    @cached_property
    def total(self) -> float:
        """Seconds of both passes."""
        return self.forward + self.backward

    def times(self, factor: float) -> StageTimes:
        """Return the times of `factor` such micro-batches."""
        chunks = tuple(chunk.times(factor) for chunk in self.chunks)
        heads, features = self.heads.times(factor), self.features.times(factor)
        return StageTimes(chunks, heads, self.message * factor, features)

    def __add__(self, other: StageTimes) -> StageTimes:
        chunks = tuple(a + b for a, b in zip(self.chunks, other.chunks, strict=True))
        return StageTimes(
            chunks,
            self.heads + other.heads,
            self.message + other.message,
            self.features + other.features,
        )


def sum_of(passes: Sequence[Passes]) -> Passes:
    """Return the passes of all, one after another."""
    return sum(passes[1:], start=passes[0])


def pipeline_seconds(times: Sequence[float], micro_batches: int, *, chunks: int = 1) -> float:
    """Return the time of a pipeline whose stages take `times` per micro-batch.

    Exact for passes in one direction, and for passes in both through equal stages.
    """
    slowest = max(times)
    return micro_batches * slowest + (sum(times) - slowest) / chunks


def alternating_seconds(
    forward: Sequence[float], backward: Sequence[float], micro_batches: int
) -> float:
    """Return the time of both passes of m micro-batches through stages in the order of 1F1B.

    A stage i has q = min(P - i, m) forward passes before its first backward pass. It ends the last
    forward pass when it has done the others with m - q backward passes, from its start or from the
    first backward pass on. The longest of the stages' paths through all others counts. It is the
    time of a walk exactly where the last stage is the slowest, else a lower bound close to it.
    """
    stages, longest = len(forward), 0.0
    for stage, (ahead, back) in enumerate(zip(forward, backward, strict=True)):
        before = sum(forward[:stage]) + sum(backward[:stage])
        behind = sum(forward[stage + 1 :]) + sum(backward[stage + 1 :])
        warm = min(stages - stage, micro_batches)
        rest, both = micro_batches - warm, ahead + back
        last_forward = micro_batches * ahead + rest * back
        if rest:
            last_forward = max(last_forward, ahead + behind + rest * both)
        paths = (
            micro_batches * both,
            last_forward + behind + back,
            ahead + behind + micro_batches * back + rest * ahead,
        )
        longest = max(longest, before + max(paths))
    return longest

"""The teacher's layers that losses between layers gather, where it has a tokenizer of its own.

The ends of a chunk may be on different ranks of a sequence (`train.features`). So the ranks of the
student's stage gather the layer for each pair: under sequence parallelism over the tensor ranks,
then over the context ranks. They do so in the forward and in the backward pass. Afterwards each
rank takes a state of the teacher for each of its own positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from megatron_distill.models.pipeline_stages import ranks_of_layers

if TYPE_CHECKING:
    from megatron_distill.planning.device import DeviceProfile
    from megatron_distill.planning.run import Choice, PlannedRun

__all__ = ["GatheredLayers", "gathered_layers"]

_PASSES: Final = 2  # of a micro-batch, forward and backward


@dataclass(frozen=True)
class GatheredLayers:
    """The gathers of one pass of a micro-batch on a rank of a stage.

    Attributes:
        pairs: of layers, one after the other.
        tensor: bytes of a layer after the gather over the tensor ranks; 0: there is none.
        context: likewise over the context ranks.
        taken: bytes of the states at the rank's own positions.
    """

    pairs: int
    tensor: float
    context: float
    taken: float
    tensor_ranks: int
    context_ranks: int

    @property
    def peak(self) -> float:
        """Bytes that exist beside the rank's part of the layer: input and result of each copy."""
        if not self.pairs:
            return 0.0
        return max(self.tensor + self.context, (self.context or self.tensor) + self.taken)

    def received(self, *, measures: bool) -> tuple[float, float]:
        """Return the bytes that a rank receives per micro-batch from tensor and context ranks.

        measures: a forward pass before the step's own has the losses too.
        """
        count = self.pairs * (_PASSES + measures)
        tensor = self.tensor * (self.tensor_ranks - 1) / self.tensor_ranks
        return count * tensor, count * self.context * (self.context_ranks - 1) / self.context_ranks

    def seconds(self, device: DeviceProfile) -> tuple[float, float]:
        """Return the time of one pass over the tensor and over the context ranks."""
        split = device.link(self.tensor_ranks).gathered(self.tensor, ranks=self.tensor_ranks)
        wide = device.link(self.tensor_ranks * self.context_ranks)
        whole = wide.gathered(self.context, ranks=self.context_ranks)
        return self.pairs * split, self.pairs * whole


def gathered_layers(run: PlannedRun, choice: Choice, stage: int) -> GatheredLayers:
    """Return the gathers on a rank of a stage; without pairs where the tokens are the student's."""
    layout, pairs = choice.layout, 0
    if run.is_aligned:
        ranks = ranks_of_layers(choice.layers, layout.pipeline)
        pairs = sum(
            ranks[pair.student - 1] == stage and not pair.is_of_attention
            for pair in choice.compared_layers(run)
        )
    if not pairs:
        return GatheredLayers(0, 0.0, 0.0, 0.0, 1, 1)
    assert run.teacher is not None
    split = layout.tensor if layout.sequence else 1
    per_token = run.teacher.hidden_size * run.width
    part = choice.teacher_tokens(run) * per_token
    own = choice.micro_batch_size * run.sequence_length / (layout.context * split) * per_token
    return GatheredLayers(
        pairs,
        float(part) if split > 1 else 0.0,
        float(part * layout.context) if layout.context > 1 else 0.0,
        own,
        split,
        layout.context,
    )

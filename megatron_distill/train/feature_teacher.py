"""A live teacher some of whose layers speak as well, to the stages of the student's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses import FeaturePair
from megatron_distill.models.stages import ranks_of_layers
from megatron_distill.models.tapped_layer import tap_layers
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.groups import Layout
from megatron_distill.signals import WithFeatures
from megatron_distill.train.teacher import OnlineTeacher


@dataclass(frozen=True)
class Route:
    """A layer of the teacher, the pipeline rank that has it, and one whose student wants it."""

    layer: int
    source: int
    destination: int


def routes(
    pairs: Sequence[FeaturePair], *, student_layers: int, teacher_layers: int, layout: Layout
) -> tuple[Route, ...]:
    """Return where the teacher's layers have to go, each once, in one order on all ranks."""
    of_teacher = ranks_of_layers(teacher_layers, layout.without_virtual_stages())
    of_student = ranks_of_layers(student_layers, layout)
    wanted = {(pair.teacher, of_student[pair.student - 1]) for pair in pairs}
    return tuple(Route(layer, of_teacher[layer - 1], rank) for layer, rank in sorted(wanted))


class FeatureTeacher:
    """An online teacher that answers with the outputs of some layers too.

    They are kept for a whole step, in the teacher's type: on the stage of the student's layer the
    hidden states of every micro-batch, and on the teacher's own stage until they are sent.
    """

    def __init__(self, online: OnlineTeacher, ways: Sequence[Route]) -> None:
        self.online = online
        self._routes = tuple(ways)
        self._rank = online.groups.pipeline.rank()
        self._kept: dict[int, Tensor] = {}
        self._micro_batches = 0
        mine = {route.layer for route in ways if route.source == self._rank}
        tap_layers([online.model], {layer: partial(self._keep, layer) for layer in mine})

    def signals(self, batches: Sequence[Batch]) -> Sequence[WithFeatures]:
        """Return the teacher's signal of each micro-batch, and the features that this stage needs.

        Collective: those of the online teacher; then, in the pipeline group, one message for each
        teacher's layer and other stage that wants it: 2 bytes (in bf16) per hidden feature and
        token of this rank's micro-batches.
        """
        self._micro_batches = len(batches)
        signals = self.online.signals(batches)
        kept, self._kept = self._kept, {}
        features = exchange(
            kept,
            self._routes,
            like=self._buffer(batches),
            device=batches[0].tokens_bs.device,
            group=self.online.groups.pipeline,
        )
        return [
            WithFeatures(signal, {layer: states[index] for layer, states in features.items()})
            for index, signal in enumerate(signals)
        ]

    def _keep(self, layer: int, hidden_sbH: Tensor, *, micro_batch: int) -> Tensor:
        if layer not in self._kept:
            self._kept[layer] = hidden_sbH.new_empty((self._micro_batches, *hidden_sbH.shape))
        self._kept[layer][micro_batch] = hidden_sbH
        return hidden_sbH

    def _buffer(self, batches: Sequence[Batch]) -> Tensor:
        """Return what describes one layer's outputs of a step, without memory."""
        layout = self.online.groups.layout
        micro_batch_size, length = batches[0].tokens_bs.shape
        if layout.sequence:
            length //= layout.tensor
        shape = (len(batches), length, micro_batch_size, self.online.architecture.hidden_size)
        return torch.empty(shape, dtype=self.online.model.config.params_dtype, device="meta")


def exchange(
    kept: Mapping[int, Tensor],
    ways: Sequence[Route],
    *,
    like: Tensor,
    device: torch.device,
    group: dist.ProcessGroup,
) -> dict[int, Tensor]:
    """Send the kept layers' outputs where they are wanted; return those wanted here.

    All messages are under way together, numbered alike on both sides, so that no order of sends and
    receives can block.

    Collective: `group`, one message of the size of `like` for each route between two ranks of it.
    """
    rank = group.rank()
    found: dict[int, Tensor] = {}
    messages: list[dist.P2POp] = []
    for number, way in enumerate(ways):
        if way.destination == rank:
            is_mine = way.source == rank
            found[way.layer] = kept[way.layer] if is_mine else torch.empty_like(like, device=device)
        if way.source == way.destination or rank not in (way.source, way.destination):
            continue
        is_sender = way.source == rank
        messages.append(
            dist.P2POp(
                dist.isend if is_sender else dist.irecv,
                kept[way.layer] if is_sender else found[way.layer],
                group=group,
                tag=number,
                group_peer=way.destination if is_sender else way.source,
            )
        )
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
    return found

"""A live teacher some of whose layers speak as well, to the stages of the student's layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses import FeaturePair
from megatron_distill.models.architecture import Architecture, ranks_of_layers
from megatron_distill.models.gpt import HiddenStateGPT, hidden_for_head, run_model
from megatron_distill.models.layers import tap_layers
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.groups import Groups, Layout
from megatron_distill.signals import HiddenState, WithFeatures
from megatron_distill.train.pipeline_schedule import run_schedule

# What it is, `output`, `query` or `key`, and of which layer, from 1.
Feature = tuple[str, int]


@dataclass(frozen=True)
class Route:
    """Something of a teacher's layer, the pipeline rank that has it, and one that wants it."""

    feature: Feature
    source: int
    destination: int


def routes(
    pairs: Sequence[FeaturePair], *, student_layers: int, teacher_layers: int, layout: Layout
) -> tuple[Route, ...]:
    """Return what of the teacher has to go where, each once, in one order on all ranks."""
    of_teacher = ranks_of_layers(teacher_layers, layout.without_virtual_stages())
    of_student = ranks_of_layers(student_layers, layout)
    wanted = {
        ((what, pair.teacher), of_student[pair.student - 1])
        for pair in pairs
        for what in (("query", "key") if pair.is_of_attention else ("output",))
    }
    return tuple(
        Route(feature, of_teacher[feature[1] - 1], rank) for feature, rank in sorted(wanted)
    )


class FeatureTeacher:
    """An online teacher that tells what some of its layers do too.

    That is kept for a whole step, in the teacher's type: on the stage of the student's layer for
    every micro-batch, and on the teacher's own stage until it is sent.
    """

    def __init__(self, online: OnlineTeacher, ways: Sequence[Route]) -> None:
        self.online = online
        self._routes = tuple(ways)
        self._kept: dict[Feature, Tensor] = {}
        self._micro_batches = 0
        # Those layers alone that are on this rank.
        features = {way.feature for way in ways if way.source == online.groups.pipeline.rank()}
        tap_layers(
            [online.model],
            {layer: partial(self._put_out, layer) for what, layer in features if what == "output"},
            {layer: partial(self._attended, layer) for what, layer in features if what == "query"},
        )

    def signals(self, batches: Sequence[Batch]) -> Sequence[WithFeatures]:
        """Return the teacher's signal of each micro-batch, and the features that this stage needs.

        Collective: those of the online teacher; then, in the pipeline group, a message for each
        feature and other stage that wants it. For hidden states that is 2 bytes (in bf16) per
        number and token of this rank's micro-batches, for queries and keys 2 bytes per number of
        this tensor rank's heads, the keys of the whole sequence.
        """
        self._micro_batches = len(batches)
        signals = self.online.signals(batches)
        kept, self._kept = self._kept, {}
        features = exchange(
            kept,
            self._routes,
            shapes=self._shapes(batches),
            dtype=self.online.model.config.params_dtype,
            device=batches[0].tokens_bs.device,
            group=self.online.groups.pipeline,
        )
        return [
            WithFeatures(signal, {name: states[index] for name, states in features.items()})
            for index, signal in enumerate(signals)
        ]

    def _put_out(self, layer: int, hidden_sbH: Tensor, *, micro_batch: int) -> Tensor:
        self._keep(("output", layer), hidden_sbH, micro_batch)
        return hidden_sbH

    def _attended(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,  # noqa: ARG002 - that of the student's layer is the same
        *,
        micro_batch: int,
    ) -> tuple[Tensor, Tensor]:
        self._keep(("query", layer), query, micro_batch)
        self._keep(("key", layer), key, micro_batch)
        return query, key

    def _keep(self, feature: Feature, tensor: Tensor, micro_batch: int) -> None:
        if feature not in self._kept:
            self._kept[feature] = tensor.new_empty((self._micro_batches, *tensor.shape))
        self._kept[feature][micro_batch] = tensor

    def _shapes(self, batches: Sequence[Batch]) -> dict[str, tuple[int, ...]]:
        """Return the shape of what is kept of a step, by what it is."""
        shape, layout = self.online.architecture, self.online.groups.layout
        size, length = batches[0].tokens_bs.shape
        whole = batches[0].document_ids_bS.shape[1]
        heads, key_heads = (
            count // layout.tensor for count in (shape.num_attention_heads, shape.num_kv_heads)
        )
        shared = length // layout.tensor if layout.sequence else length
        return {
            "output": (len(batches), shared, size, shape.hidden_size),
            "query": (len(batches), length, size, heads, shape.head_size),
            "key": (len(batches), whole, size, key_heads, shape.head_size),
        }


def exchange(
    kept: Mapping[Feature, Tensor],
    ways: Sequence[Route],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
) -> dict[Feature, Tensor]:
    """Send the kept features where they are wanted; return those wanted here.

    All messages are under way together, numbered alike on both sides, so that no order of sends and
    receives can block.

    Collective: `group`, one message of the feature's shape for each route between two ranks of it.
    """
    rank = group.rank()
    found: dict[Feature, Tensor] = {}
    messages: list[dist.P2POp] = []
    for number, way in enumerate(ways):
        feature = way.feature
        if way.destination == rank:
            is_mine = way.source == rank
            empty = partial(torch.empty, shapes[feature[0]], dtype=dtype, device=device)
            found[feature] = kept[feature] if is_mine else empty()
        if way.source == way.destination or rank not in (way.source, way.destination):
            continue
        is_sender = way.source == rank
        messages.append(
            dist.P2POp(
                dist.isend if is_sender else dist.irecv,
                kept[feature] if is_sender else found[feature],
                group=group,
                tag=number,
                group_peer=way.destination if is_sender else way.source,
            )
        )
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
    return found


@dataclass(frozen=True)
class OnlineTeacher:
    """A frozen model that answers each micro-batch with its final hidden state and its head shard.

    The hidden states of a whole step are kept on the last stage, in the layout in which the model
    leaves them (the sequence split under sequence parallelism); no logits are.
    """

    model: HiddenStateGPT
    architecture: Architecture
    head_weight: Tensor | None  # rows of the student's vocabulary shard; on the last stage only
    groups: Groups
    sequence_length: int

    @torch.no_grad()
    def signals(self, batches: Sequence[Batch]) -> Sequence[HiddenState] | Sequence[None]:
        """Return one signal per micro-batch on the last pipeline stage, None elsewhere.

        Collective: the forward half of `run_schedule`, then per micro-batch one all-gather of the
        hidden state in the tensor group under sequence parallelism, when the signal is built.
        """
        context_size = self.groups.context.size()
        outputs = run_schedule(
            partial(_forward, context_size=context_size),
            [self.model],
            list(enumerate(batches)),
            groups=self.groups,
            micro_batch_size=batches[0].tokens_bs.shape[0],
            sequence_length=self.sequence_length,
            forward_only=True,
            collect_outputs=True,
        )
        if self.head_weight is None:
            return [None] * len(batches)
        return [
            HiddenState(
                hidden=hidden_for_head(hidden_sbh, groups=self.groups),
                weight=self.head_weight,
                logit_softcap=self.architecture.logit_softcap,
                logit_scale=self.architecture.logit_scale,
            )
            for hidden_sbh in outputs
        ]


def _forward(
    iterator: Iterator[tuple[int, Batch]], model: torch.nn.Module, *, context_size: int
) -> tuple[Tensor, Callable[..., Tensor]]:
    number, batch = next(iterator)
    output = run_model(model, batch, context_size=context_size, micro_batch=number)
    return output, _keep_output


def _keep_output(output: Tensor, *, non_loss_data: bool) -> Tensor:
    assert non_loss_data
    return output

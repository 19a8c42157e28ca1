"""A live teacher, and one that also sends features of its layers to the student's stages."""

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
from megatron_distill.models.taps import VisibleKeys
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.groups import Groups, Layout
from megatron_distill.signals import HiddenState, WithFeatures
from megatron_distill.train.pipeline_schedule import run_schedule

# The kind of feature, `output`, `query` or `key`, and its layer, counted from 1.
Feature = tuple[str, int]


@dataclass(frozen=True)
class Route:
    """A feature of a teacher layer, its pipeline rank, and a pipeline rank that needs it."""

    feature: Feature
    source: int
    destination: int


def routes(
    pairs: Sequence[FeaturePair], *, student_layers: int, teacher_layers: int, layout: Layout
) -> tuple[Route, ...]:
    """Return the routes of all teacher features, without duplicates, in one order on all ranks."""
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
    """An online teacher that also returns features of selected layers.

    Features are held for a whole step, in the teacher's dtype. The stage of the student's layer
    holds them for every micro-batch; the teacher's own stage holds them until they are sent.
    """

    def __init__(self, online: OnlineTeacher, ways: Sequence[Route]) -> None:
        self.online = online
        self._routes = tuple(ways)
        self._kept: dict[Feature, Tensor] = {}
        self._micro_batches = 0
        # Only the layers on this rank.
        features = {way.feature for way in ways if way.source == online.groups.pipeline.rank()}
        tap_layers(
            [online.model],
            {layer: partial(self._put_out, layer) for what, layer in features if what == "output"},
            {layer: partial(self._attended, layer) for what, layer in features if what == "query"},
        )

    def signals(self, batches: Sequence[Batch]) -> Sequence[WithFeatures]:
        """Return the teacher's signal of each micro-batch, and the features that this stage needs.

        Collective: those of the online teacher; then, in the pipeline group, one message per
        feature and each different stage that needs it. Hidden states take 2 bytes (in bf16) per
        value and token of this rank's micro-batches. Queries and keys take 2 bytes per value of
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
        visible: VisibleKeys,  # noqa: ARG002 - the student's queries see the same keys
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
        """Return the shape of a step's features, by kind."""
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
    """Send the stored features to their destinations; return the features for this rank.

    All messages are in flight together, with the same tags on both sides, so that no order of
    sends and receives can deadlock.

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
    """A frozen model; the signal of a micro-batch is its final hidden state and its head shard.

    The last stage holds the hidden states of a whole step, in the model's output layout (split
    along the sequence under sequence parallelism); no logits are stored.
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

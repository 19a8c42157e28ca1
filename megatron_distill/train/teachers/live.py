"""A live teacher, and one that also sends features of its layers to the student's stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses import ChunkTerm, FeaturePair, Term, ranked_term
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.execution import Execution
from megatron_distill.models.gpt import (
    HiddenStateGPT,
    align_head,
    hidden_for_head,
    run_model,
    vocab_shard,
)
from megatron_distill.models.layers import tap_layers
from megatron_distill.models.taps import VisibleKeys
from megatron_distill.ops import VocabShard
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import (
    HiddenState,
    IdTarget,
    OnDemand,
    Signals,
    TermView,
    WithFeatures,
)
from megatron_distill.train.model_source import ModelSource
from megatron_distill.train.step import run_schedule
from megatron_distill.train.teachers.attention_heads import feature_kinds, sizes_per_position
from megatron_distill.train.teachers.host_states import Feature, HostFeatures, HostStates


@dataclass(frozen=True)
class Route:
    """A feature of a teacher layer, its pipeline rank, and a pipeline rank that needs it."""

    feature: Feature
    source: int
    destination: int


def routes(
    pairs: Sequence[FeaturePair], *, of_student: Sequence[int], of_teacher: Sequence[int]
) -> tuple[Route, ...]:
    """Return the routes of all teacher features, without duplicates, in one order on all ranks.

    `of_student` and `of_teacher` are the pipeline ranks of the layers; see `ranks_of_layers`.
    """
    wanted = {
        ((what, pair.teacher), of_student[pair.student - 1])
        for pair in pairs
        for what in feature_kinds(of_attention=pair.is_of_attention)
    }
    return tuple(
        Route(feature, of_teacher[feature[1] - 1], rank) for feature, rank in sorted(wanted)
    )


class FeatureTeacher:
    """An online teacher that also returns features of selected layers, in the teacher's dtype.

    With one pipeline stage the features of one micro-batch exist at a time, as the layers left
    them, unless a list keeps the signals. With several, the stage of the student's layer holds them
    for every micro-batch of a step. The teacher's own stage holds them until they are sent. `host`
    holds them off the device: the stages then send one micro-batch after another.
    """

    def __init__(
        self, online: OnlineTeacher, ways: Sequence[Route], host: HostFeatures | None = None
    ) -> None:
        self.online = online
        self._routes = tuple(ways)
        self._host = host
        self._captured: dict[Feature, Tensor] = {}
        self._micro_batches = 0
        # Only the layers on this rank.
        features = {way.feature for way in ways if way.source == online.groups.pipeline.rank()}
        tap_layers(
            [online.model],
            {layer: partial(self._put_out, layer) for what, layer in features if what == "output"},
            {layer: partial(self._attended, layer) for what, layer in features if what == "query"},
        )

    def signals(self, batches: Sequence[Batch]) -> OnDemand[WithFeatures] | Sequence[WithFeatures]:
        """Return the teacher's signal of each micro-batch, and the features that this stage needs.

        With one pipeline stage both are computed when they are taken.

        Collective: those of the online teacher; then, with several stages, in the pipeline group
        one message per feature and each different stage that needs it. Hidden states take 2 bytes
        (in bf16) per value and token of this rank's micro-batches. Queries and keys take 2 bytes
        per value of this tensor rank's heads, the keys of the whole sequence.
        """
        if self.online.runs_in_step:
            in_step = self.online.signals(batches)
            return OnDemand(len(batches), partial(self._one, in_step))
        self._micro_batches = len(batches)
        signals = self.online.signals(batches)
        if self._host is not None:
            self._exchange_each(batches, self._host)
            rank = self.online.groups.pipeline.rank()
            needed = [way.feature for way in self._routes if way.destination == rank]
            return [
                WithFeatures(signal, self._host.of(index, needed))
                for index, signal in enumerate(signals)
            ]
        captured, self._captured = self._captured, {}
        features = self._exchange(captured, self._routes, batches, len(batches))
        return [
            WithFeatures(signal, {name: states[index] for name, states in features.items()})
            for index, signal in enumerate(signals)
        ]

    def _exchange(
        self,
        captured: Mapping[Feature, Tensor],
        ways: Sequence[Route],
        batches: Sequence[Batch],
        count: int,
    ) -> dict[Feature, Tensor]:
        return exchange(
            captured,
            ways,
            shapes=self._shapes(batches[0], count),
            dtype=self.online.model.config.params_dtype,
            device=batches[0].tokens_bs.device,
            group=self.online.groups.pipeline,
        )

    def _exchange_each(self, batches: Sequence[Batch], host: HostFeatures) -> None:
        """Send the features that other stages need; one micro-batch is on the device at a time."""
        rank = self.online.groups.pipeline.rank()
        moving = [way for way in self._routes if way.source != way.destination]
        sent = {way.feature for way in moving if way.source == rank}
        if not any(rank in (way.source, way.destination) for way in moving):
            return
        for number in range(len(batches)):
            own = {feature: host.take(feature, number).unsqueeze(0) for feature in sorted(sent)}
            for feature, received in self._exchange(own, moving, batches, 1).items():
                host.put(feature, number, received[0])

    def _one(self, signals: Signals, micro_batch: int) -> WithFeatures:
        signal = signals[micro_batch]
        assert not isinstance(signal, WithFeatures)
        if self._host is not None:
            features = [way.feature for way in self._routes]
            return WithFeatures(signal, self._host.of(micro_batch, features))
        captured, self._captured = self._captured, {}
        return WithFeatures(signal, captured)

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
        if self._host is not None:
            self._host.put(feature, micro_batch, tensor)
            return
        if self.online.runs_in_step:
            self._captured[feature] = tensor
            return
        if feature not in self._captured:
            self._captured[feature] = tensor.new_empty((self._micro_batches, *tensor.shape))
        self._captured[feature][micro_batch] = tensor

    def _shapes(self, batch: Batch, count: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of the features of so many micro-batches, by kind."""
        shape, layout = self.online.architecture, self.online.groups.layout
        batch = batch.teacher or batch
        size, length = batch.tokens_bs.shape
        whole = batch.document_ids_bS.shape[1]
        sizes = sizes_per_position(shape, layout.tensor)
        shared = length // layout.tensor if layout.sequence else length
        return {
            "output": (count, shared, size, *sizes["output"]),
            "query": (count, length, size, *sizes["query"]),
            "key": (count, whole, size, *sizes["key"]),
        }


def exchange(
    captured: Mapping[Feature, Tensor],
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
            found[feature] = captured[feature] if is_mine else empty()
        if way.source == way.destination or rank not in (way.source, way.destination):
            continue
        is_sender = way.source == rank
        messages.append(
            dist.P2POp(
                dist.isend if is_sender else dist.irecv,
                captured[feature] if is_sender else found[feature],
                group=group,
                tag=number,
                group_peer=way.destination if is_sender else way.source,
            )
        )
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
    return found


class HeadOwner(Protocol):
    """The output head of a teacher on a rank of the student, and the ranks that share it."""

    @property
    def head_weight(self) -> Tensor | None:
        """Rows of the student's vocabulary shard; None off the last stage."""
        ...

    @property
    def architecture(self) -> Architecture:
        """The teacher's shape."""
        ...

    @property
    def groups(self) -> Groups:
        """The student's groups."""
        ...


@dataclass(frozen=True)
class ModelHead:
    """The output head of a model on its own last stage, in its own layout; a `HeadOwner`."""

    head_weight: Tensor
    architecture: Architecture
    groups: Groups


@dataclass(frozen=True)
class ModelOutput:
    """A teacher's last hidden states as its model leaves them, and its head; a `Signal`.

    Under sequence parallelism each tensor rank has a part of the sequence. The whole is gathered by
    `logit_source`, and exists as long as its result.

    Attributes:
        tokens: number of tokens N on this rank.
        take: returns the hidden states [s, b, h] on the device.
        whole_context: whether the loss needs the tokens of all context ranks.
    """

    tokens: int
    take: Callable[[], Tensor]
    teacher: HeadOwner
    whole_context: bool = False

    @torch.no_grad()
    def logit_source(self) -> HiddenState:
        """Return the hidden states [N, H] of all tokens, and the head.

        Collective: that of `hidden_for_head` forward.
        """
        weight, shape = self.teacher.head_weight, self.teacher.architecture
        assert weight is not None, "the last stage has the head"
        return HiddenState(
            hidden=hidden_for_head(
                self.take(), groups=self.teacher.groups, whole_context=self.whole_context
            ),
            weight=weight,
            logit_softcap=shape.logit_softcap,
            logit_scale=shape.logit_scale,
        )

    def targets(self, terms: Sequence[TermView]) -> Sequence[IdTarget] | None:  # noqa: ARG002
        """None: terms are between logits, or on ids chosen from them."""
        return None

    def token_statistics(self) -> Mapping[str, Tensor]:
        """Empty: all follow from the logits."""
        return {}


@dataclass(frozen=True)
class OnlineTeacher:
    """A frozen model; the signal of a micro-batch is its final hidden state and its head shard.

    With one pipeline stage the model runs when a signal is taken, in the student's forward step:
    one micro-batch's hidden states exist at a time. With several, or where the signals are kept in
    a list, it runs before the student's schedule. The last stage then holds the hidden states of a
    whole step, on the device or in `host_states`. They are in the model's output layout (split
    along the sequence under sequence parallelism); no logits are stored. A batch with tokens of the
    teacher's own is read in these; `sequence_length` is theirs.
    """

    model: HiddenStateGPT
    architecture: Architecture
    head_weight: Tensor | None  # rows of the student's vocabulary shard; on the last stage only
    groups: Groups
    sequence_length: int
    host_states: HostStates | None = None

    @classmethod
    def of_source(
        cls,
        source: ModelSource,
        execution: Execution,
        *,
        seed: int,
        sequence_length: int,
        shard: VocabShard,
        groups: Groups,
        offload_hidden: bool = False,
    ) -> OnlineTeacher:
        """Build the frozen model; its head has the columns of `shard`.

        The model may have more or fewer rows than the one that `shard` belongs to, but all of its
        real ids. `offload_hidden`: hidden states wait for the student in host memory. Raises
        CheckpointError on all ranks.

        Collective: tensor group, one all-gather of the head where its shards differ from `shard`.
        """
        (model,) = source.build(execution, groups=groups, seed=seed, interleaved=False)
        model.freeze()
        head = None
        if groups.is_last_stage:
            own = vocab_shard(source.architecture, groups, tokens=shard.size)
            weight = model.head_weight().detach()
            head = align_head(weight, own=own, wanted=shard, group=groups.tensor)
        return cls(
            model=model,
            architecture=source.architecture,
            head_weight=head,
            groups=groups,
            sequence_length=sequence_length,
            host_states=HostStates.of_stage(groups, execution.device) if offload_hidden else None,
        )

    @property
    def runs_in_step(self) -> bool:
        """Whether the model runs when a signal is taken."""
        return self.groups.pipeline.size() == 1

    def signals(
        self, batches: Sequence[Batch]
    ) -> OnDemand[ModelOutput] | Sequence[ModelOutput] | Sequence[None]:
        """Return one signal per micro-batch on the last pipeline stage, None elsewhere.

        Collective: the forward half of `run_schedule`: for all micro-batches at once, or for one
        when its signal is taken.
        """
        if self.runs_in_step:
            return OnDemand(len(batches), lambda number: self._run([(number, batches[number])])[0])
        return self.ahead(batches)

    def ahead(self, batches: Sequence[Batch]) -> Sequence[ModelOutput] | Sequence[None]:
        """Return the same signals, all computed now.

        Collective: the forward half of `run_schedule` for all micro-batches.
        """
        outputs = self._run(list(enumerate(batches)))
        return outputs or [None] * len(batches)

    @torch.no_grad()
    def _run(self, batches: Sequence[tuple[int, Batch]]) -> list[ModelOutput]:
        """Run the model; an empty list on stages other than the last."""
        return run_schedule(
            self._forward,
            [self.model],
            batches,
            groups=self.groups,
            micro_batch_size=batches[0][1].tokens_bs.shape[0],
            sequence_length=self.sequence_length,
            forward_only=True,
            collect_outputs=True,
        )

    def _forward(
        self, iterator: Iterator[tuple[int, Batch]], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., ModelOutput]]:
        number, batch = next(iterator)
        has_own_tokens = batch.teacher is not None
        batch = batch.teacher or batch
        context_size = self.groups.context.size()
        output = run_model(model, batch, context_size=context_size, micro_batch=number)
        collected = partial(
            self._collected,
            number=number,
            tokens=batch.tokens_bs.numel(),
            whole_context=has_own_tokens,
        )
        return output, collected

    def _collected(
        self,
        hidden_sbh: Tensor,
        *,
        number: int,
        tokens: int,
        whole_context: bool,
        non_loss_data: bool,
    ) -> ModelOutput:
        assert non_loss_data
        states = self.host_states
        if states is None:
            return ModelOutput(tokens, lambda: hidden_sbh, self, whole_context)
        states.put(number, hidden_sbh)
        return ModelOutput(tokens, partial(states.take, number), self, whole_context)


def live_metrics(terms: Sequence[Term | ChunkTerm]) -> tuple[str, ...]:
    """Return the names of the reported metrics of a live teacher, besides the losses."""
    if any(isinstance(term, ChunkTerm) for term in terms):
        return () if ranked_term(terms) is None else ("topk_mass",)
    ranked = ("topk_mass",) if any(term.top_k is not None for term in terms) else ()
    return ("teacher_ce", "student_entropy", "teacher_entropy", "top1_agreement", *ranked)

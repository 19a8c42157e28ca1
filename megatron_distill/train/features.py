"""The feature losses of a student's step, computed on the pipeline stage of the student's layer.

Also the projectors of feature losses and their optimizer: small, and replicated on every rank.

Projectors are not part of the student. They have a separate optimizer and separate checkpoint
entries; exports and runs that start from such a checkpoint ignore them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_distill.data.aligned.rows import ChunkEnds, ChunkRows
from megatron_distill.losses import (
    AttentionInputs,
    AttentionLoss,
    FeatureLoss,
    FeaturePair,
    Projector,
    ScoreRule,
    add_gradients,
    token_weights,
)
from megatron_distill.models.gpt import HiddenStateGPT
from megatron_distill.models.layers import tap_layers
from megatron_distill.models.taps import VisibleKeys
from megatron_distill.ops.factors import Factor
from megatron_distill.runtime.batch import Batch, StepBatches
from megatron_distill.runtime.collectives import sum_over
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.segments import copied
from megatron_distill.signals import Signals, WithFeatures
from megatron_distill.train.optimizer import allocate_adam, clip_factor, step_unless

# Report entry of the weighted sum of all pairs.
FEATURES_LOSS = "features_loss"
Features = Mapping[tuple[str, int], Tensor]  # of one micro-batch, as `WithFeatures` has them


@dataclass(frozen=True)
class _FeatureStep:
    """Inputs of the taps during one step, and the losses that the taps have computed.

    The tap of a recomputed layer runs twice; `values` is keyed, so that the loss counts once.
    With `of_gradients` each value is the sum of squares of the weighted loss's gradient.
    """

    signals: Signals
    weights_sb: Sequence[Tensor]  # per micro-batch, of all tokens of this context rank
    pair_weights: Sequence[Sequence[Factor]]  # per micro-batch
    of_gradients: bool
    # Per micro-batch, of the same tokens: rows of the teacher's whole sequences. None: it has the
    # student's positions.
    teacher_rows_sb: Sequence[Tensor | None]
    values: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by pair and micro-batch

    def features(self, micro_batch: int) -> Features:
        """The teacher's features; recomputation in backward takes those of the same micro-batch."""
        given = self.signals[micro_batch]
        assert isinstance(given, WithFeatures)
        return given.features


@dataclass(frozen=True)
class ScoreRules:
    """The attention score rules of both models."""

    student: ScoreRule
    teacher: ScoreRule


class FeatureLosses:
    """The losses between chosen layers of student and teacher.

    Each pair's loss is a mean over the distilled tokens of the global batch. With a tokenizer of
    the teacher's own it is a mean over the chunks' ends, at which both models have read the same
    text. Taps on the layer's output, or on its queries and keys, add the gradient to the student's,
    on the layer's stage. The stock schedules see one gradient.
    """

    def __init__(
        self,
        pairs: Sequence[FeaturePair],
        *,
        projectors: Projectors | None,
        rules: ScoreRules,
        groups: Groups,
        device: torch.device,
    ) -> None:
        self.pairs = tuple(pairs)
        self.projectors = projectors
        self._rules = rules
        self._groups = groups
        self._device = device
        self._step: _FeatureStep | None = None

    @property
    def report_names(self) -> tuple[str, ...]:
        """The names that `finish` returns."""
        return (FEATURES_LOSS, *(pair.name for pair in self.pairs))

    def as_dict(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share, as plain values."""
        shape = None if self.projectors is None else self.projectors.shape.as_dict()
        return {"losses": [pair.name for pair in self.pairs], "projectors": shape}

    def attach(self, chunks: Sequence[HiddenStateGPT]) -> None:
        """Tap the paired student layers on this rank."""
        maps = {pair.student for pair in self.pairs if pair.is_of_attention}
        states = {pair.student for pair in self.pairs if not pair.is_of_attention}
        tap_layers(
            chunks,
            {layer: partial(self._tapped, layer) for layer in states},
            {layer: partial(self._attended, layer) for layer in maps},
        )

    def begin(
        self,
        signals: Signals,
        step: StepBatches,
        pair_weights: Sequence[Sequence[Factor]],
        *,
        of_gradients: bool = False,
    ) -> None:
        """Compute the losses of the schedule that runs next, until `finish` or `finish_each`.

        `signals` have the teacher's features. `pair_weights`, per micro-batch, are the pairs'
        weights in the gradient. Without gradients enabled, none is added. With
        `of_gradients` the values are the sums of squares of the weighted losses' gradients with
        respect to the layers' outputs, and no gradient is added.
        """
        ends = [_ends_of(batch) for batch in step.micro_batches]
        weights_sb = [
            token_weights(batch.kd_weights_bs.t(), step.kd_tokens)
            if own is None
            else token_weights(own.weights_sb, step.chunk_ends)
            for batch, own in zip(step.micro_batches, ends, strict=True)
        ]
        rows_sb = [None if own is None else own.teacher_rows_sb for own in ends]
        self._step = _FeatureStep(signals, weights_sb, pair_weights, of_gradients, rows_sb)

    def finish(self) -> dict[str, Tensor]:
        """Return the unweighted means over the global batch per pair, and their weighted sum.

        With `of_gradients` they are sums of squares and their total.

        Collective: one all-reduce of a float per pair and one more in the data x context, the
        pipeline and the tensor group.
        """
        step = self._finished()
        shares_MP = self._shares(step)
        weights_MP = as_rows(step.pair_weights, self._device)
        weighted_MP = shares_MP if step.of_gradients else weights_MP * shares_MP
        sums = torch.cat([weighted_MP.sum().reshape(1), shares_MP.sum(0)])
        groups = self._groups
        means = sum_over(sums, groups.data_context, groups.pipeline, groups.tensor)
        return dict(zip(self.report_names, means.unbind(), strict=True))

    def finish_each(self) -> Tensor:
        """Return each micro-batch's share of the pairs' means, on this data and context rank.

        fp32 `[micro-batches, pairs]`, the same on the ranks of all stages.

        Collective: one all-reduce of it in the pipeline and the tensor group.
        """
        shares_MP = self._shares(self._finished())
        return sum_over(shares_MP, self._groups.pipeline, self._groups.tensor)

    def _finished(self) -> _FeatureStep:
        step, self._step = self._step, None
        assert step is not None
        return step

    def _shares(self, step: _FeatureStep) -> Tensor:
        """This rank's share; the sum over tensor ranks is the whole."""
        shares_MP = torch.zeros(len(step.weights_sb), len(self.pairs), device=self._device)
        for (index, micro_batch), value in step.values.items():
            # Every tensor rank has the whole loss of a map, also under sequence parallelism.
            is_part = self._splits and not self.pairs[index].is_of_attention
            if is_part or self._share == 0:
                shares_MP[micro_batch, index] = value
        return shares_MP

    @property
    def _splits(self) -> bool:
        """Whether layer outputs are split along the sequence over the tensor ranks."""
        return self._groups.layout.sequence

    @property
    def _share(self) -> int:
        """The index of this rank's part within the tensor group."""
        return self._groups.tensor.rank()

    def _of(self, layer: int, *, is_of_attention: bool) -> Iterator[tuple[int, FeaturePair]]:
        for index, pair in enumerate(self.pairs):
            if pair.student == layer and pair.is_of_attention == is_of_attention:
                yield index, pair

    def _tapped(self, layer: int, hidden_sbH: Tensor, *, micro_batch: int) -> Tensor:
        step = self._step
        assert step is not None
        weights_N = self._own_part(step.weights_sb[micro_batch]).reshape(-1)
        rows_sb = step.teacher_rows_sb[micro_batch]
        rows_N = None if rows_sb is None else self._own_part(rows_sb).reshape(-1)
        features = step.features(micro_batch)
        for index, pair in self._of(layer, is_of_attention=False):
            # Read anew in backward: features in host memory are not kept on the device till then.
            loss = partial(self._loss_of_states, pair, features, weights_N, rows_N)
            weight = step.pair_weights[micro_batch][index]
            added = partial(_of_states, loss=loss, coefficient=weight)
            if (index, micro_batch) not in step.values:
                step.values[index, micro_batch] = (
                    torch.linalg.vector_norm(*added(hidden_sbH), dtype=torch.float32).square()
                    if step.of_gradients
                    else loss().value(hidden_sbH.detach().flatten(0, 1))
                )
            if torch.is_grad_enabled():
                (hidden_sbH,) = add_gradients((hidden_sbH,), added)
        return hidden_sbH

    def _attended(
        self, layer: int, query: Tensor, key: Tensor, visible: VisibleKeys, *, micro_batch: int
    ) -> tuple[Tensor, Tensor]:
        step = self._step
        assert step is not None
        assert not step.of_gradients, "the rules refuse that of attention maps"
        features = step.features(micro_batch)
        for index, pair in self._of(layer, is_of_attention=True):
            loss = partial(
                self._loss_of_maps, pair, features, step.weights_sb[micro_batch], visible
            )
            if (index, micro_batch) not in step.values:
                step.values[index, micro_batch] = loss(query).value(query.detach(), key.detach())
            if torch.is_grad_enabled():
                weight = step.pair_weights[micro_batch][index]
                added = partial(_of_maps, loss=loss, coefficient=weight)
                query, key = add_gradients((query, key), added)
        return query, key

    def _own_part(self, values_sb: Tensor) -> Tensor:
        """This tensor rank's part of the values of a context rank's tokens."""
        if not self._splits:
            return values_sb
        return values_sb.chunk(self._groups.tensor.size())[self._share]

    def _loss_of_states(
        self, pair: FeaturePair, features: Features, weights_N: Tensor, rows_N: Tensor | None
    ) -> FeatureLoss:
        """Return the loss of a pair.

        Collective: with rows of the teacher's whole sequences, one all-gather of its states in the
        tensor group under sequence parallelism, and one in the context group.
        """
        teacher_sbH = features["output", pair.teacher]
        if rows_N is not None:
            groups = (*((self._groups.tensor,) if self._splits else ()), self._groups.context)
            for group in groups:
                teacher_sbH = _gathered(teacher_sbH, group)
        teacher_NH = teacher_sbH.flatten(0, 1)
        return FeatureLoss(
            pair.loss,
            teacher=teacher_NH if rows_N is None else teacher_NH[rows_N],
            weights=weights_N,
            projector=self.projectors.of(pair) if self.projectors else None,
        )

    def _loss_of_maps(
        self,
        pair: FeaturePair,
        features: Features,
        weights_sb: Tensor,
        visible: VisibleKeys,
        query: Tensor,
    ) -> AttentionLoss:
        return AttentionLoss(
            AttentionInputs(
                features["query", pair.teacher],
                features["key", pair.teacher],
                self._rules.teacher,
            ),
            weights=weights_sb,
            visible=visible.on(query.device),
            rule=self._rules.student,
            group=self._groups.tensor,
        )


def as_rows(factors_MK: Sequence[Sequence[Factor]], device: torch.device) -> Tensor:
    """Return factors as an fp32 tensor ``[M, K]``; those of the device stay there."""
    if not any(isinstance(one, Tensor) for row in factors_MK for one in row):
        return copied(torch.tensor(factors_MK), device)
    every = [one for row in factors_MK for one in row]
    found = torch.stack(
        [
            one
            if isinstance(one, Tensor)
            else torch.full((), one, dtype=torch.float64, device=device)
            for one in every
        ]
    )
    return found.float().view(len(factors_MK), -1)


def _ends_of(batch: Batch) -> ChunkEnds | None:
    """Return the ends of a micro-batch's chunks; None if the teacher has the student's tokens."""
    rows = batch.planned
    if not isinstance(rows, ChunkRows):
        return None
    assert rows.ends is not None, "with losses between layers the loader finds the ends"
    return rows.ends


def _gathered(states_sbH: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the states of all ranks of a group, one rank's after another's."""
    if group.size() == 1:
        return states_sbH
    found = states_sbH.new_empty((group.size() * states_sbH.shape[0], *states_sbH.shape[1:]))
    dist.all_gather_into_tensor(found, states_sbH.contiguous(), group=group)
    return found


def _of_maps(
    query: Tensor, key: Tensor, *, loss: Callable[[Tensor], AttentionLoss], coefficient: Factor
) -> tuple[Tensor, Tensor]:
    return loss(query).gradients(query, key, coefficient=coefficient)


def _of_states(
    hidden_sbH: Tensor, *, loss: Callable[[], FeatureLoss], coefficient: Factor
) -> tuple[Tensor]:
    gradient_NH = loss().gradient(hidden_sbH.flatten(0, 1), coefficient=coefficient)
    return (gradient_NH.view_as(hidden_sbH),)


_SHARED = "shared"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ProjectorShape:
    """The names and sizes of the projectors; a resumed run must have the same."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # student, within (an MLP's), teacher

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint's description."""
        return {key: list(value) for key, value in asdict(self).items()}


@dataclass(frozen=True)
class ProjectorOptimization:
    """Optimizer settings of the projectors; the learning rate follows the student's schedule."""

    learning_rate: float
    weight_decay: float  # of matrices
    betas: tuple[float, float]
    epsilon: float
    is_decoupled: bool  # AdamW, else Adam
    clip_grad_norm: float  # of all projectors together; 0: no clipping


def projector_name(pair: FeaturePair, *, shared: bool) -> str:
    """Return the name of a pair's projector; losses between the same two layers share one."""
    return _SHARED if shared else f"{pair.student}_{pair.teacher}"


class Projectors:
    """The projectors, their gradients and their Adam, with the same bits on every rank."""

    def __init__(
        self,
        shape: ProjectorShape,
        optimization: ProjectorOptimization,
        *,
        seed: int,
        groups: Groups,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self._optimization = optimization
        self._groups = groups
        self._modules = {name: Projector(shape.sizes, device=device) for name in shape.names}
        for name, module in self._modules.items():
            module.initialise(name, seed=seed)
        parameters = [parameter for _, parameter in self.named_parameters()]
        self._gradient = torch.zeros(sum(p.numel() for p in parameters), device=device)
        parts = self._gradient.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self._adam = _adam(parameters, optimization)
        allocate_adam(self._adam, device)

    def of(self, pair: FeaturePair) -> Projector:
        """Return a pair's projector."""
        shared = self.shape.names == (_SHARED,)
        return self._modules[projector_name(pair, shared=shared)]

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield every parameter under its name in a checkpoint."""
        for name, module in self._modules.items():
            for part, parameter in module.named_parameters():
                yield f"{name}.{part}", parameter

    def zero_gradients(self) -> None:
        """Set the gradients to zero."""
        self._gradient.zero_()

    def reduce_gradients(self) -> Tensor:
        """Sum the gradients of a step over all ranks; return their norm, an fp32 scalar.

        Without sequence parallelism the ranks of a tensor group have computed the same gradient.
        Only one of them contributes it, so that the ranks cannot differ in the last bits.

        Collective: one all-reduce of 4 bytes per parameter in the tensor, the data x context and
        the pipeline group. A stage without a pair adds zero.
        """
        groups = self._groups
        if not groups.layout.sequence and groups.tensor.rank() > 0:
            self._gradient.zero_()
        for group in (groups.tensor, groups.data_context, groups.pipeline):
            if group.size() > 1:
                dist.all_reduce(self._gradient, group=group)
        return self._gradient.norm()

    def apply_gradients(
        self, schedule: OptimizerParamScheduler, *, norm: Tensor, skipped: Tensor
    ) -> None:
        """Clip and apply the gradients of this norm, unless the bool scalar `skipped` is true."""
        optimization = self._optimization
        if optimization.clip_grad_norm > 0.0:
            self._gradient *= clip_factor(norm, optimization.clip_grad_norm)
        rate = schedule.get_lr({}) * (optimization.learning_rate / schedule.max_lr)
        for group in self._adam.param_groups:
            group["lr"] = rate
        step_unless(skipped, [self._adam], self._adam.step)

    def sharded_state(self) -> dict[str, ShardedTensor]:
        """Describe parameters and moments to a checkpoint, by the tensors themselves."""
        return {
            key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in self._tensors()
        }

    def set_steps(self, applied_steps: int) -> None:
        """Set the number of updates that Adam has applied."""
        for moments in self._adam.state.values():
            moments["step"].fill_(applied_steps)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.named_parameters():
            yield f"projector.{name}", parameter.data
            for moment in _MOMENTS:
                yield f"projector.{moment}.{name}", self._adam.state[parameter][moment]


def _adam(
    parameters: list[torch.nn.Parameter], optimization: ProjectorOptimization
) -> torch.optim.Adam:
    kind = torch.optim.AdamW if optimization.is_decoupled else torch.optim.Adam
    # Always two groups, even where both have the same decay.
    groups = (
        (optimization.weight_decay, [p for p in parameters if p.dim() > 1]),
        (0.0, [p for p in parameters if p.dim() == 1]),
    )
    return kind(
        [{"params": some, "weight_decay": decay} for decay, some in groups],
        lr=optimization.learning_rate,
        betas=optimization.betas,
        eps=optimization.epsilon,
    )

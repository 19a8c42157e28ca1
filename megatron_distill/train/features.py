"""The feature losses of a student's step: taken where its layers are, on every pipeline stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_distill.losses import (
    AttentionInputs,
    AttentionLoss,
    FeatureLoss,
    FeaturePair,
    ScoreRule,
    add_gradients,
    token_weights,
)
from megatron_distill.models.gpt import HiddenStateGPT
from megatron_distill.models.tapped_layer import tap_layers
from megatron_distill.runtime.batch import StepBatches
from megatron_distill.runtime.collectives import sum_over
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.projectors import Projectors

# What reports call the weighted sum of all pairs.
FEATURES_LOSS = "features_loss"
Features = Mapping[tuple[str, int], Tensor]  # of one micro-batch, as `WithFeatures` has them


@dataclass(frozen=True)
class _Step:
    """What the taps need to know during one step, and the losses that they have found.

    A layer that is recomputed comes twice, so each loss has a place of its own.
    """

    features: Sequence[Features]  # per micro-batch
    weights_sb: Sequence[Tensor]  # per micro-batch, of all tokens of this context rank
    pair_weights: Sequence[float]
    values: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by pair and micro-batch


@dataclass(frozen=True)
class ScoreRules:
    """How both models make scores of queries and keys."""

    student: ScoreRule
    teacher: ScoreRule


class FeatureLosses:
    """The losses between chosen layers of student and teacher.

    Each pair's loss is a mean over the distilled tokens of the global batch. Its gradient joins the
    student's where the layer's output, or its queries and keys, pass a tap, on whatever stage that
    is; the schedules are the stock ones and see one gradient.
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
        self._step: _Step | None = None

    @property
    def report_names(self) -> tuple[str, ...]:
        """What `finish` reports."""
        return (FEATURES_LOSS, *(pair.name for pair in self.pairs))

    def as_dict(self) -> dict[str, Any]:
        """Return what a run that continues another must have in common with it, as plain values."""
        shape = None if self.projectors is None else self.projectors.shape.as_dict()
        return {"losses": [pair.name for pair in self.pairs], "projectors": shape}

    def attach(self, chunks: Sequence[HiddenStateGPT]) -> None:
        """Tap those layers of the student that this rank holds."""
        maps = {pair.student for pair in self.pairs if pair.is_of_attention}
        states = {pair.student for pair in self.pairs if not pair.is_of_attention}
        tap_layers(
            chunks,
            {layer: partial(self._tapped, layer) for layer in states},
            {layer: partial(self._attended, layer) for layer in maps},
        )

    def begin(
        self,
        features: Sequence[Features],
        step: StepBatches,
        pair_weights: Sequence[float],
    ) -> None:
        """Take the losses of the schedule that runs now, until `finish`.

        `features` are the teacher's of each micro-batch, `pair_weights` what the mean of each pair
        is multiplied by in the gradient. Where no gradients are computed, none is added.
        """
        weights_sb = [
            token_weights(batch.kd_mask_bs.t(), step.kd_tokens) for batch in step.micro_batches
        ]
        self._step = _Step(features, weights_sb, pair_weights)

    def finish(self) -> dict[str, Tensor]:
        """Return the means over the global batch, each pair's without its weight, and their sum.

        Collective: one all-reduce of a float per pair in the data x context and the pipeline group,
        and in the tensor group under sequence parallelism.
        """
        step, self._step = self._step, None
        assert step is not None
        sums_P = torch.zeros(len(self.pairs), device=self._device)
        for (index, _), value in step.values.items():
            # All ranks of a tensor group have a map's loss whole, whoever holds the sequence.
            if not (self.pairs[index].is_of_attention and self._splits and self._share):
                sums_P[index] += value
        groups = [self._groups.data_context, self._groups.pipeline]
        if self._splits:
            groups.append(self._groups.tensor)
        means_P = sum_over(sums_P, *groups)
        weights_P = torch.tensor(step.pair_weights, device=self._device)
        values = ((weights_P * means_P).sum(), *means_P.unbind())
        return dict(zip(self.report_names, values, strict=True))

    @property
    def _splits(self) -> bool:
        """Whether layers leave each tensor rank a part of the sequence."""
        return self._groups.layout.sequence

    @property
    def _share(self) -> int:
        """Which part that is."""
        return self._groups.tensor.rank()

    def _of(self, layer: int, *, is_of_attention: bool) -> Iterator[tuple[int, FeaturePair]]:
        for index, pair in enumerate(self.pairs):
            if pair.student == layer and pair.is_of_attention == is_of_attention:
                yield index, pair

    def _tapped(self, layer: int, hidden_sbH: Tensor, *, micro_batch: int) -> Tensor:
        step = self._step
        assert step is not None
        weights_sb = step.weights_sb[micro_batch]
        if self._splits:
            weights_sb = weights_sb.chunk(self._groups.tensor.size())[self._share]
        for index, pair in self._of(layer, is_of_attention=False):
            loss = FeatureLoss(
                pair.loss,
                teacher=step.features[micro_batch]["output", pair.teacher].flatten(0, 1),
                weights=weights_sb.reshape(-1),
                projector=self.projectors.of(pair) if self.projectors else None,
            )
            if (index, micro_batch) not in step.values:
                step.values[index, micro_batch] = loss.value(hidden_sbH.detach().flatten(0, 1))
            if torch.is_grad_enabled():
                added = partial(_of_states, loss=loss, coefficient=step.pair_weights[index])
                (hidden_sbH,) = add_gradients((hidden_sbH,), added)
        return hidden_sbH

    def _attended(
        self, layer: int, query: Tensor, key: Tensor, mask: Tensor | None, *, micro_batch: int
    ) -> tuple[Tensor, Tensor]:
        step = self._step
        assert step is not None
        features = step.features[micro_batch]
        for index, pair in self._of(layer, is_of_attention=True):
            loss = AttentionLoss(
                AttentionInputs(
                    features["query", pair.teacher],
                    features["key", pair.teacher],
                    self._rules.teacher,
                ),
                weights=step.weights_sb[micro_batch],
                mask=mask,
                rule=self._rules.student,
                group=self._groups.tensor,
            )
            if (index, micro_batch) not in step.values:
                step.values[index, micro_batch] = loss.value(query.detach(), key.detach())
            if torch.is_grad_enabled():
                added = partial(loss.gradients, coefficient=step.pair_weights[index])
                query, key = add_gradients((query, key), added)
        return query, key


def _of_states(hidden_sbH: Tensor, *, loss: FeatureLoss, coefficient: float) -> tuple[Tensor]:
    gradient_NH = loss.gradient(hidden_sbH.flatten(0, 1), coefficient=coefficient)
    return (gradient_NH.view_as(hidden_sbH),)

"""The feature losses of a student's step: taken where its layers are, on every pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_distill.losses import FeatureLoss, FeaturePair, add_gradient, token_weights
from megatron_distill.models.gpt import HiddenStateGPT
from megatron_distill.models.tapped_layer import tap_layers
from megatron_distill.runtime.batch import StepBatches
from megatron_distill.runtime.collectives import sum_over
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.projectors import Projectors

# What reports call the weighted sum of all pairs.
FEATURES_LOSS = "features_loss"


@dataclass(frozen=True)
class _Step:
    """What the taps need to know during one step, and the losses that they have found.

    A layer that is recomputed comes twice, so each loss has a place of its own.
    """

    features: Sequence[Mapping[int, Tensor]]  # per micro-batch, by the teacher's layer
    token_weights_N: Sequence[Tensor]  # per micro-batch
    weights: Sequence[float]  # per pair
    values: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by pair and micro-batch


class FeatureLosses:
    """The losses between chosen layers of student and teacher.

    Each pair's loss is a mean over the distilled tokens of the global batch. Its gradient joins the
    student's where the layer's output passes its tap, on whatever stage that is; the schedules are
    the stock ones and see one gradient.
    """

    def __init__(
        self,
        pairs: Sequence[FeaturePair],
        *,
        projectors: Projectors | None,
        groups: Groups,
        device: torch.device,
    ) -> None:
        self.pairs = tuple(pairs)
        self.projectors = projectors
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
        layers = {pair.student for pair in self.pairs}
        tap_layers(chunks, {layer: partial(self._tapped, layer) for layer in layers})

    def begin(
        self,
        features: Sequence[Mapping[int, Tensor]],
        step: StepBatches,
        weights: Sequence[float],
    ) -> None:
        """Take the losses of the schedule that runs now, until `finish`.

        `features` are the teacher's of each micro-batch, `weights` what the mean of each pair is
        multiplied by in the gradient. Where no gradients are computed, none is added.
        """
        token_weights_N = [
            token_weights(self._local(batch.kd_mask_bs.t()).reshape(-1), step.kd_tokens)
            for batch in step.micro_batches
        ]
        self._step = _Step(features, token_weights_N, weights)

    def finish(self) -> dict[str, Tensor]:
        """Return the means over the global batch, each pair's without its weight, and their sum.

        Collective: one all-reduce of a float per pair in the data x context and the pipeline group,
        and in the tensor group under sequence parallelism.
        """
        step, self._step = self._step, None
        assert step is not None
        sums_P = torch.zeros(len(self.pairs), device=self._device)
        for (index, _), value in step.values.items():
            sums_P[index] += value
        groups = [self._groups.data_context, self._groups.pipeline]
        if self._groups.layout.sequence:
            groups.append(self._groups.tensor)
        means_P = sum_over(sums_P, *groups)
        weights_P = torch.tensor(step.weights, device=self._device)
        values = ((weights_P * means_P).sum(), *means_P.unbind())
        return dict(zip(self.report_names, values, strict=True))

    def _local(self, mask_sb: Tensor) -> Tensor:
        """Return the part of the sequence that the layers of this rank hold."""
        if not self._groups.layout.sequence:
            return mask_sb
        return mask_sb.chunk(self._groups.tensor.size())[self._groups.tensor.rank()]

    def _tapped(self, layer: int, hidden_sbH: Tensor, *, micro_batch: int) -> Tensor:
        step = self._step
        assert step is not None
        for index, pair in enumerate(self.pairs):
            if pair.student != layer:
                continue
            loss = FeatureLoss(
                pair.loss,
                teacher=step.features[micro_batch][pair.teacher].flatten(0, 1),
                weights=step.token_weights_N[micro_batch],
                projector=self.projectors.of(pair) if self.projectors else None,
            )
            if (index, micro_batch) not in step.values:
                step.values[index, micro_batch] = loss.value(hidden_sbH.detach().flatten(0, 1))
            if torch.is_grad_enabled():
                gradient = partial(_gradient, loss=loss, coefficient=step.weights[index])
                hidden_sbH = add_gradient(hidden_sbH, gradient)
        return hidden_sbH


def _gradient(hidden_sbH: Tensor, *, loss: FeatureLoss, coefficient: float) -> Tensor:
    gradient_NH = loss.gradient(hidden_sbH.flatten(0, 1), coefficient=coefficient)
    return gradient_NH.view_as(hidden_sbH)

"""The raw losses of a step, or their gradient norms, measured in a separate pass before it.

The numbers stay on the device; the host does not wait for the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses import ChunkTerm, RawLosses, Term
from megatron_distill.ops.factors import Factor
from megatron_distill.runtime.batch import Batch, StepBatches
from megatron_distill.runtime.groups import Groups, repeated_dropout
from megatron_distill.signals import Signal, Signals
from megatron_distill.train.aligned_loss import chunk_share, end_share
from megatron_distill.train.features import FEATURES_LOSS, FeatureLosses
from megatron_distill.train.objective import Head, TokenObjective
from megatron_distill.train.step import Student, run_student, student_reports


def loss_values(
    student: Student, signals: Signals, objective: TokenObjective, step: StepBatches
) -> RawLosses:
    """Return the mean of each raw loss over the trained tokens of the global batch, fp64 scalars.

    The student runs forward only, in training mode, with the dropout masks of the coming step.

    Collective: those of `run_student` without a backward pass, and of `agreed`.
    """
    objective = replace(objective, source_names=())
    with torch.no_grad(), repeated_dropout():
        objectives = [objective] * len(signals)
        means = run_student(student, signals, objectives, step, forward_only=True)
    names = raw_names(objective)
    values = agreed(torch.stack([means[name] for name in names]), groups=student.groups)
    return raw_losses(objective, values.unbind())


def local_loss_values(
    student: Student, signals: Signals, objective: TokenObjective, step: StepBatches
) -> list[RawLosses]:
    """Return the mean of each raw loss over this rank's trained tokens, for each micro-batch.

    The mean of a term between two tokenizers is over this rank's chunks, that of a pair of layers
    then over their ends.

    All stages of a pipeline get the values; other data and context ranks do not. A loss of no
    token is zero.

    Collective: those of `student_reports` without a backward pass, and one all-reduce in the
    pipeline group, 4 bytes per micro-batch and loss.
    """
    objective = replace(objective, source_names=())
    with torch.no_grad(), repeated_dropout():
        objectives = [objective] * len(signals)
        reports = student_reports(student, signals, objectives, step, forward_only=True)
    names, batches = token_names(objective), step.micro_batches
    shares = torch.zeros(len(signals), len(names), device=batches[0].tokens_bs.device)
    for row, report in enumerate(reports):
        shares[row] = torch.stack([report[name] for name in names])
    if student.groups.pipeline.size() > 1:
        dist.all_reduce(shares, group=student.groups.pipeline)
    if objective.features is not None:
        shares = torch.cat([shares, objective.features.finish_each()], dim=1)
    means = torch.stack(
        [
            share * batches_in(batch, step, objective.terms, losses=len(share))
            for batch, share in zip(batches, shares.unbind(), strict=True)
        ]
    )
    return [raw_losses(objective, row.unbind()) for row in means.double()]


def batches_in(
    batch: Batch, step: StepBatches, terms: Sequence[Term | ChunkTerm], *, losses: int
) -> Tensor:
    """Return the factors from a micro-batch's shares of global means to its local means.

    In the order of `raw_names`, so many `losses`.
    """
    counts = (batch.ce_weights_bs.sum(), batch.kd_weights_bs.sum())
    ce, kd = (
        total / torch.where(count == 0, 1.0, count)
        for total, count in zip((step.ce_tokens, step.kd_tokens), counts, strict=True)
    )
    of_terms = [
        kd if isinstance(term, Term) else _chunk_batches(batch, step, term) for term in terms
    ]
    pairs = losses - 1 - len(of_terms)
    of_pair = kd
    if pairs and any(isinstance(term, ChunkTerm) for term in terms):
        of_pair = _inverse(end_share(batch, step))
    return torch.stack([ce, *of_terms, *[of_pair] * pairs])


def _chunk_batches(batch: Batch, step: StepBatches, term: ChunkTerm) -> Tensor:
    return _inverse(chunk_share(batch, step, of_pairs=term.is_of_pairs))


def _inverse(share: Tensor) -> Tensor:
    return 1 / torch.where(share == 0, 1.0, share)


def gradient_norms(
    student: Student, signals: Signals, objective: TokenObjective, step: StepBatches
) -> RawLosses:
    """Return the norms of the gradients of cross-entropy and of the weighted divergences.

    The gradient is that of the loss alone, a mean over the global batch, with respect to the
    student's last hidden states. The norm is over all of them. The gradient of the weighted
    features is with respect to the layers' outputs, separately for each pair. The pass is that of
    `loss_values`, with gradients instead of values.

    Collective: as `loss_values`, and per micro-batch and gradient those of the objective's backward
    pass in the tensor group.
    """
    with torch.no_grad(), repeated_dropout():
        objectives = [_GradientSquares(replace(objective, source_names=()))] * len(signals)
        squares = run_student(
            student, signals, objectives, step, forward_only=True, feature_gradients=True
        )
    names = ["ce", "kd"] + ([] if objective.features is None else [FEATURES_LOSS])
    norms = torch.stack([squares[name] for name in names]).sqrt()
    ce, kd, *features = agreed(norms, groups=student.groups).unbind()
    return RawLosses(ce, (kd,), tuple(features))


def token_names(objective: TokenObjective) -> tuple[str, ...]:
    """The entries of a micro-batch's report that are raw losses."""
    return ("ce", *(term.name for term in objective.terms))


def raw_names(objective: TokenObjective) -> tuple[str, ...]:
    """The entries of a step's report that are raw losses, in the order of `RawLosses`."""
    pairs = () if objective.features is None else objective.features.pairs
    return (*token_names(objective), *(pair.name for pair in pairs))


def raw_losses(objective: TokenObjective, values: Sequence[Factor]) -> RawLosses:
    """The values of `raw_names` as `RawLosses`."""
    assert len(values) == len(raw_names(objective))
    features = 1 + len(objective.terms)
    return RawLosses(values[0], tuple(values[1:features]), tuple(values[features:]))


def agreed(values: Tensor, *, groups: Groups) -> Tensor:
    """Return the values of the first rank in fp64.

    Sums over data ranks may be rounded in a different order on each tensor rank. Factors in the
    gradient of a replicated parameter must be the same on all of them.

    Collective: world, one broadcast of 4 bytes per value.
    """
    dist.broadcast(values, group=groups.world, group_src=0)
    return values.double()


@dataclass(frozen=True)
class _DetachedHead:
    head: Head

    def head_weight(self) -> Tensor:
        """The head without its gradient, which this pass does not need."""
        return self.head.head_weight().detach()

    def weight_gradient_sum(self) -> None:
        """No buffer: this pass needs no gradient of the head."""


@dataclass(frozen=True)
class _GradientSquares:
    """Reports the sum of squares of each loss's gradient on the hidden states of a micro-batch."""

    objective: TokenObjective

    @property
    def report_names(self) -> tuple[str, ...]:
        """Cross-entropy, and all divergences together."""
        return ("total", "ce", "kd")

    @property
    def features(self) -> FeatureLosses | None:
        """The feature losses of the objective."""
        return self.objective.features

    @property
    def feature_weights(self) -> tuple[Factor, ...]:
        """The feature weights of the objective."""
        return self.objective.feature_weights

    @property
    def source_report_names(self) -> tuple[str, ...]:
        """Empty: this report has no entries per source."""
        return ()

    def __call__(
        self,
        hidden_sbh: Tensor,
        head: Head,
        batch: Batch,
        signal: Signal | None,
        step: StepBatches,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a zero, and the two sums of squares, fp32 scalars.

        Collective: those of the objective, and of its backward pass, for each of the two. Under
        sequence parallelism one all-reduce of 8 bytes in the tensor group.
        """
        frozen = _DetachedHead(head)
        labels = replace(self.objective.of_labels(), ce_weight=1.0)
        kd = replace(self.objective, ce_weight=0.0)
        squares = torch.stack(
            [
                _square(labels, hidden_sbh, frozen, batch, None, step),
                _square(kd, hidden_sbh, frozen, batch, signal, step),
            ]
        )
        groups = self.objective.groups
        if groups.layout.sequence and groups.tensor.size() > 1:
            dist.all_reduce(squares, group=groups.tensor)  # each holds a part of the sequence
        return squares.new_zeros(()), {"ce": squares[0], "kd": squares[1]}


def _square(
    objective: TokenObjective,
    hidden_sbh: Tensor,
    head: Head,
    batch: Batch,
    signal: Signal | None,
    step: StepBatches,
) -> Tensor:
    with torch.enable_grad():
        leaf_sbh = hidden_sbh.detach().requires_grad_()
        total, _ = objective(leaf_sbh, head, batch, signal, step)
        (gradient_sbh,) = torch.autograd.grad(total, leaf_sbh)
    return torch.linalg.vector_norm(gradient_sbh, dtype=torch.float32).square()

"""The chunked executor: head products, softmax statistics, losses and gradients, chunk by chunk.

The student's and the teacher's logits exist for ``chunk_tokens`` tokens at a time, in two buffers
that every chunk reuses. The forward pass writes the gradient over the student's logits. It goes at
once into the hidden gradient and the accumulated weight gradient. Nothing is recomputed: backward
only multiplies by the upstream scalar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.chunk import Chunk
from megatron_distill.ops.divergences import Model, WeightedDivergence
from megatron_distill.ops.softmax_gradient import SoftmaxWeights, softmax_weights
from megatron_distill.ops.statistics import GlobalStatistics, LocalStatistics, StatisticsSpec
from megatron_distill.ops.topk_divergence import IdTerm, SolvedIdTerm, solve_id_terms
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.weight_gradient import HeadGradients, differentiable_pass
from megatron_distill.ops.workspace import (
    Rows,
    Scratch,
    accumulation_dtype,
    allocate_logits,
    equal_chunks,
)
from megatron_distill.signals import HiddenState, LogitSource

__all__ = [
    "FusedLinear",
    "Partition",
    "fused_linear",
    "sum_tokens",
    "weighted_rows",
]


def fused_linear(student: HiddenState, work: FusedLinear) -> tuple[Tensor, Tensor]:
    """Total objective and weighted sums over all tokens.

    Shapes: total is a scalar, differentiable in the student's hidden ``[N, H]``, weight ``[V, H]``
    and bias ``[V]``. Sums ``[K]`` follow ``work.sum_names``, detached and without coefficients;
    with a partition they are ``[K, 1 + parts]``, all tokens first. Both are fp32 (fp64 for fp64
    inputs). The hidden gradient is this shard's PARTIAL sum: the caller reduces it over ``group``
    (the backward of copy-to or gather-to tensor-parallel regions does).

    With ``work.weight_gradient_sum`` the forward pass adds the gradient on the weight to that
    tensor, and backward returns None for it. The upstream gradient must be one then.

    Tokens of zero weight are left out before the products. Memory above the inputs, in elements:
    ``chunk_tokens V`` logits of each model that has a head, in its dtype. V is rounded up to a
    multiple of 64 on a GPU. Gradients take ``N H`` in the student's dtype and, unless a sum is
    given, ``V H``. The latter is in fp32 if the dtype is narrower and there are several chunks
    (then also ``V H`` in that dtype in backward). A product accumulated in a wider dtype takes up
    to 2^21 on a CPU, nothing on a GPU. Per row block (`row_blocks`) ``1 + 2 T`` fp32 buffers for T
    temperatures. One more for each model whose logits are narrower, capped or scaled; at most seven
    for each term with slopes. A top-k term with a tail copies up to 256 MiB of logits on a GPU.

    Collective: over ``group`` per chunk one all-gather of 8 bytes per name of the spec and token
    (10 names with a teacher and forward KL at temperature one). Also the further ones of
    `Chunk.solve`, and those of `solve_id_terms`. None in backward. The number of chunks
    follows from the weights and ``chunk_tokens``, the same on all ranks.

    Raises:
        RuntimeError: in backward, if a sum was given and the upstream gradient is not one (on a GPU
            a device-side assertion).
    """
    rows = work.counted_rows
    chunks = equal_chunks(rows.count, work.chunk_tokens)
    return differentiable_pass(
        student,
        lambda gradients: _ChunkPass(student, work, rows, chunks, gradients).run(),
        rows=rows,
        columns=work.shard.real_width,
        chunks=len(chunks),
        weight_sum=work.weight_gradient_sum,
    )


class _ChunkPass:
    """One pass over all chunks, with the buffers that they share."""

    def __init__(
        self,
        student: HiddenState,
        work: FusedLinear,
        rows: Rows,
        chunks: Sequence[slice],
        gradients: HeadGradients,
    ) -> None:
        self._student = student
        self._work = work
        self._gradients = gradients
        self._rows, self._chunks = rows, chunks
        self._dtype = accumulation_dtype(student.dtype)
        self._columns = work.shard.real_width
        columns = 1 + (0 if work.partition is None else work.partition.parts)
        self._sums = torch.zeros(
            len(work.sum_names), columns, dtype=torch.float64, device=student.weight.device
        )

    def run(self) -> tuple[Tensor, Tensor]:
        """Total and sums; the wanted gradients are filled."""
        work = self._work
        size = self._chunks[0].stop if self._chunks else 1
        scratch = Scratch(size, self._columns, self._dtype, self._student.weight.device)
        sources: dict[Model, LogitSource] = {"student": self._student}
        if work.teacher is not None:
            sources["teacher"] = work.teacher
        buffers = {
            model: allocate_logits(size, self._columns, source.dtype, self._student.weight.device)
            for model, source in sources.items()
            if source.formed is None
        }
        for rows in self._chunks:
            self._run_chunk(rows, sources, buffers, scratch)
        sums = self._sums.to(self._dtype)
        return self._total(), sums.squeeze(1) if work.partition is None else sums

    def _total(self) -> Tensor:
        by_name = dict(zip(self._work.sum_names, self._sums[:, 0], strict=True))
        total: Tensor = self._work.ce_coefficient * by_name["ce"]
        for term in self._work.terms:
            total = total + term.coefficient * by_name[term.key]
        for id_term in self._work.id_terms:
            total = total + id_term.term.coefficient * by_name[id_term.key]
        return total.to(self._dtype)

    def _run_chunk(
        self,
        rows: slice,
        sources: Mapping[Model, LogitSource],
        buffers: Mapping[Model, Tensor],
        scratch: Scratch,
    ) -> None:
        """Logits, statistics and gradients of the tokens of one chunk."""
        work = self._work
        raw = self._outputs(rows, sources, buffers)
        rules = {model: source.rule for model, source in sources.items()}
        labels = self._rows.take(work.labels, rows)
        ce_weights = self._rows.take(work.ce_weights, rows).to(self._dtype)
        kd_weights = self._rows.take(work.kd_weights, rows).to(self._dtype)
        spec = work.spec
        local = LocalStatistics.empty(spec, labels.shape[0], self._dtype, labels.device)
        chunk = Chunk(spec, raw, rules, work.shard, scratch, labels)
        id_terms = [term.of_rows(self._rows, rows) for term in work.id_terms]
        solved = solve_id_terms(id_terms, raw, rules, work.shard, work.group)
        weights: tuple[SoftmaxWeights, ...] | None = None
        if self._gradients.are_wanted:
            label = ce_weights * work.ce_coefficient if work.ce_coefficient else None
            weights = softmax_weights(spec, kd_weights, label, labels, work.shard, solved)
        merged, values = chunk.process(local, weights, work.group, raw["student"])
        found = _weighted_rows(work, merged, values, solved, ce_weights, kd_weights)
        self._sums += sum_tokens(found, self._partition(rows))
        self._gradients.add(rows, raw["student"])

    def _partition(self, rows: slice) -> Partition | None:
        whole = self._work.partition
        return None if whole is None else Partition(self._rows.take(whole.ids, rows), whole.parts)

    def _outputs(
        self, rows: slice, sources: Mapping[Model, LogitSource], buffers: Mapping[Model, Tensor]
    ) -> dict[Model, Tensor]:
        """Raw outputs of both models over the shard's real columns."""

        def take(values: Tensor) -> Tensor:
            return self._rows.take(values, rows)

        size = rows.stop - rows.start
        return {
            model: source.outputs(
                take, self._columns, buffers[model][:size] if model in buffers else None
            )
            for model, source in sources.items()
        }


def _weighted_rows(
    work: FusedLinear,
    merged: GlobalStatistics,
    values: Mapping[str, Tensor],
    solved: Sequence[SolvedIdTerm],
    ce_weights: Tensor,
    kd_weights: Tensor,
) -> list[Tensor]:
    """Each token's share of the sums, in the order of ``work.sum_names``."""
    rows = {"ce": weighted_rows(ce_weights, merged.cross_entropy("student"))}
    counted: dict[str, Tensor] = {}
    if work.teacher is not None:
        rows["teacher_ce"] = weighted_rows(ce_weights, merged.cross_entropy("teacher"))
        counted["teacher_entropy"] = merged.entropy("teacher")
        counted["top1_agreement"] = merged.agreement()
    elif work.ranked is not None:
        counted["top1_agreement"] = merged.agreement_at(solved[work.ranked].gradient.first_logit)
    if work.teacher is not None or solved:
        counted["student_entropy"] = merged.entropy("student")
    counted.update((term.key, values[term.key]) for term in work.terms)
    for term, found in zip(work.id_terms, solved, strict=True):
        counted[term.key] = found.gradient.value
        if term.has_mass:
            counted[term.mass_key] = found.mass
    rows.update((name, weighted_rows(kd_weights, value)) for name, value in counted.items())
    return [rows[name] for name in work.sum_names]


@dataclass(frozen=True)
class FusedLinear:
    """Arguments of the fused linear loss, except the student's tensors.

    Attributes:
        teacher: logits over the same columns, or a head that makes them; None without a teacher.
        labels: ``[N]`` global ids.
        ce_weights: ``[N]``, mask and normalisation of the label loss.
        kd_weights: ``[N]``, mask and normalisation of the divergences.
        ce_coefficient: constant factor of the label loss.
        terms: the divergences between logits with their coefficients.
        id_terms: the divergences on few ids.
        chunk_tokens: most tokens whose logits exist at once.
        shard: this rank's columns.
        group: the ranks that share the vocabulary; None if this rank holds all of it.
        rows: ``[n]`` int64, ascending numbers of the tokens with a weight; None to find them, which
            synchronises with the device.
        partition: split of the tokens, for separate sums per part.
        weight_gradient_sum: ``[V, H]`` fp32 (fp64), to which the gradient on the weight is added.
    """

    teacher: LogitSource | None
    labels: Tensor
    ce_weights: Tensor
    kd_weights: Tensor
    ce_coefficient: float
    terms: tuple[WeightedDivergence, ...]
    id_terms: tuple[IdTerm, ...]
    chunk_tokens: int
    shard: VocabShard
    group: dist.ProcessGroup | None
    rows: Tensor | None = None
    partition: Partition | None = None
    weight_gradient_sum: Tensor | None = None

    @property
    def counted_rows(self) -> Rows:
        """The tokens with a weight."""
        if self.rows is not None:
            return Rows.of_indices(self.labels.shape[0], self.rows)
        if self.teacher is None and not self.id_terms:
            return Rows.of_weights(self.ce_weights)
        return Rows.of_weights(self.ce_weights, self.kd_weights)

    @property
    def models(self) -> tuple[Model, ...]:
        """The models that have logits."""
        return ("student",) if self.teacher is None else ("student", "teacher")

    @property
    def spec(self) -> StatisticsSpec:
        """The statistics to measure on each chunk."""
        may_be_infinite = self.teacher is not None and self.teacher.formed is not None
        temperatures = tuple(one.term.temperature for one in self.id_terms if one.needs_rest)
        return StatisticsSpec(self.models, self.terms, True, may_be_infinite, temperatures)

    @property
    def ranked(self) -> int | None:
        """Number of the first term on few ids whose first id is the teacher's most probable one."""
        return next((i for i, term in enumerate(self.id_terms) if term.has_mass), None)

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Names of the weighted sums that `fused_linear` returns, in order."""
        names = ["ce"]
        if self.teacher is not None:
            names += ["teacher_ce", "teacher_entropy"]
        if self.teacher is not None or self.id_terms:
            names.append("student_entropy")
        if self.teacher is not None or self.ranked is not None:
            names.append("top1_agreement")
        names += [term.key for term in self.terms]
        for id_term in self.id_terms:
            names += [id_term.key, *([id_term.mass_key] if id_term.has_mass else [])]
        return tuple(names)


@dataclass(frozen=True)
class Partition:
    """A split of the tokens into parts, each with separate sums.

    Attributes:
        ids: int64 ``[N]``, the part of each token, from 0.
        parts: number of parts, empty ones included.
    """

    ids: Tensor
    parts: int


def weighted_rows(weights: Tensor, values: Tensor) -> Tensor:
    """``weights * values`` of each token in fp64 ``[N]``.

    A token of weight zero counts as zero even if its value is not finite.
    """
    return torch.where(weights == 0, 0.0, weights.double() * values)


def sum_tokens(rows: Sequence[Tensor], partition: Partition | None) -> Tensor:
    """Sum of each of K vectors ``[N]``: ``[K, 1 + parts]``, over all tokens first, then per part.

    A value that is not finite affects the sums of its part only. No device synchronisation.
    """
    sums = torch.stack([row.sum() for row in rows]).unsqueeze(1)
    if partition is None:
        return sums
    numbers_P = torch.arange(partition.parts, device=partition.ids.device)
    is_mine_PN = partition.ids == numbers_P.unsqueeze(1)
    by_part_KP = torch.where(is_mine_PN, torch.stack(list(rows)).unsqueeze(1), 0.0).sum(2)
    return torch.cat([sums, by_part_KP], 1)

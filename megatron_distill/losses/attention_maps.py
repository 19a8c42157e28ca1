"""Divergence between attention maps, recomputed block by block, since kernels do not store maps.

A map is the mean of a layer's attention probabilities over its heads: for each query a distribution
over the keys it attends to. The mean allows models of different numbers of heads.

Shapes: s queries of this rank, S keys, b sequences, n heads and g key-value heads of this rank, d
head size; q queries of a block, K keys visible to a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.runtime.segments import KeyRanges

__all__ = ["AttentionInputs", "AttentionLoss", "ScoreRule"]

# fp32 scores of one block of one model; a few tensors of this size exist together.
_BLOCK_BYTES = 64 * 2**20
# Lower bound of the student's probabilities: the loss stays finite.
_SMALLEST = 1e-30


@dataclass(frozen=True)
class ScoreRule:
    """Attention scores from queries and keys: ``cap(scale q.k)``."""

    scale: float
    softcap: float | None
    heads: int  # of all tensor ranks


@dataclass(frozen=True)
class AttentionInputs:
    """Queries ``[s, b, n, d]``, keys ``[S, b, g, d]`` of this rank's heads, with a score rule."""

    query: Tensor
    key: Tensor
    rule: ScoreRule


@dataclass(frozen=True)
class AttentionLoss:
    """``sum over queries of weight * KL(teacher's map || student's)`` on one micro-batch.

    Attributes:
        teacher: the teacher's queries and keys, in the order of the student's tokens.
        weights: ``[s, b]`` fp32, mask and normalisation. A query of weight zero is left out.
        visible: the keys that each query sees, in both models.
        rule: of the student.
        group: tensor-parallel ranks that share the heads of both models.

    Collective: ``group``, one all-reduce for each block of queries, 8 bytes per query and key that
    it may see, in `value` and again in `gradients`.
    """

    teacher: AttentionInputs
    weights: Tensor
    visible: KeyRanges
    rule: ScoreRule
    group: dist.ProcessGroup | None

    @torch.no_grad()
    def value(self, query: Tensor, key: Tensor) -> Tensor:
        """The loss, an fp32 scalar, the same on every rank of the group."""
        blocks = self._blocks(query, key)
        return torch.stack(
            [
                self._of_block(self._counted(query, rows), key, rows, hidden)
                for rows, hidden in blocks
            ]
        ).sum()

    def gradients(self, query: Tensor, key: Tensor, *, coefficient: float) -> tuple[Tensor, Tensor]:
        """The gradients of ``coefficient`` times the loss for this rank's queries and keys."""
        of_query, of_key = torch.empty_like(query), torch.zeros_like(key, dtype=torch.float32)
        leaf = key.detach().float().requires_grad_()
        for rows, hidden in self._blocks(query, key):
            block = self._counted(query, rows).detach().requires_grad_()
            with torch.enable_grad():
                value = coefficient * self._of_block(block, leaf, rows, hidden)
            of_query[rows], added = torch.autograd.grad(value, [block, leaf])
            of_key += added
        return of_query, of_key.to(key.dtype)

    def _counted(self, query: Tensor, rows: slice) -> Tensor:
        """The queries, with zeros where the weight is zero: those may hold NaN."""
        return torch.where(self.weights[rows, :, None, None] != 0, query[rows], 0)

    def _of_block(self, query_qbnd: Tensor, key: Tensor, rows: slice, hidden: Tensor) -> Tensor:
        student_map = _mean_map(query_qbnd, key, self.rule, hidden)
        with torch.no_grad():
            queries = self._counted(self.teacher.query, rows)
            teacher_map = _mean_map(queries, self.teacher.key, self.teacher.rule, hidden)
            both = torch.stack([teacher_map, student_map])
            if self.group is not None and self.group.size() > 1:
                dist.all_reduce(both, group=self.group)
        p, q = both
        # Value of the mean over all heads, with the gradient of this rank's heads only.
        q = student_map + (q - student_map).detach()
        # Both maps sum to one up to rounding; p log(p/q) - p + q is of second order.
        p, q = p.double(), q.double()
        loss_bq = (torch.xlogy(p, p) - p * q.clamp_min(_SMALLEST).log() + (q - p)).sum(2)
        loss: Tensor = (self.weights[rows].t() * loss_bq).sum().float()
        return loss

    def _blocks(self, query: Tensor, key: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of queries, with the mask [b, q, K] of keys hidden from each."""
        heads = max(query.shape[2], self.teacher.query.shape[2])
        length = max(1, _BLOCK_BYTES // (4 * heads * query.shape[1] * key.shape[0]))
        for start in range(0, query.shape[0], length):
            rows = slice(start, min(start + length, query.shape[0]))
            yield rows, self.visible.hidden(rows)


def _mean_map(query_qbnd: Tensor, key: Tensor, rule: ScoreRule, hidden: Tensor) -> Tensor:
    """This rank's share of the map ``[b, q, K]`` of a block of queries, fp32.

    ``hidden`` ``[b, q, K]`` is true where a query must not see a key, the first K of all.
    """
    length, batch, heads, size = query_qbnd.shape
    groups = key.shape[2]
    keys = key[: hidden.shape[2]].permute(1, 2, 3, 0).unsqueeze(2).float()  # [b, g, 1, d, K]
    queries = query_qbnd.reshape(length, batch, groups, heads // groups, size)
    scores = (queries.permute(1, 2, 3, 0, 4).float() @ keys) * rule.scale  # [b, g, n / g, q, K]
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    chances = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
    mean: Tensor = chances.sum((1, 2)) / rule.heads
    return mean

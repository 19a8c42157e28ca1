"""Feature losses between hidden states or attention maps, and their gradients in the pipeline.

A layer's loss is not part of the last pipeline stage's output. Its gradient is added to the
gradient of the layer's output in backward, which gives the same sum. So every stage has its feature
losses, and pipeline schedules need no change.

Attention maps are recomputed block by block, since kernels do not store them. A map is the mean of
a layer's attention probabilities over its heads: for each query a distribution over the keys it
attends to. The mean allows models of different numbers of heads. Shapes: s queries of this rank, S
keys, b sequences, n heads and g key-value heads of this rank, d head size. A block has q queries
and K visible keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_distill.ops.factors import Factor, scaled
from megatron_distill.runtime.segments import KeyRanges

__all__ = [
    "ATTENTION",
    "AttentionInputs",
    "AttentionLoss",
    "FeatureLoss",
    "FeaturePair",
    "Projector",
    "ScoreRule",
    "add_gradients",
    "feature_loss",
]


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

    def gradients(
        self, query: Tensor, key: Tensor, *, coefficient: Factor
    ) -> tuple[Tensor, Tensor]:
        """The gradients of ``coefficient`` times the loss for this rank's queries and keys."""
        of_query, of_key = torch.empty_like(query), torch.zeros_like(key, dtype=torch.float32)
        leaf = key.detach().float().requires_grad_()
        for rows, hidden in self._blocks(query, key):
            block = self._counted(query, rows).detach().requires_grad_()
            with torch.enable_grad():
                value = scaled(self._of_block(block, leaf, rows, hidden), coefficient)
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


# The loss between attention maps; the remaining ones compare hidden states.
ATTENTION = "attention"

# Elements of one hidden state in a block: 64 MiB of fp64.
_BLOCK_NUMBERS = 2**23


@dataclass(frozen=True)
class FeaturePair:
    """A student layer and the teacher layer to match, both numbered from 1."""

    student: int
    teacher: int
    loss: str
    weight: float

    @property
    def is_of_attention(self) -> bool:
        """Whether attention maps are compared instead of hidden states."""
        return self.loss == ATTENTION

    @property
    def name(self) -> str:
        """Name in reports."""
        return f"feature_{self.loss}_{self.student}_{self.teacher}"


def feature_loss(student_NH: Tensor, teacher_NH: Tensor, weights_N: Tensor, *, loss: str) -> Tensor:
    """``sum over tokens of weight * D(student, teacher)`` as an fp32 scalar.

    ``mse`` is the mean over the hidden size of the squared difference, ``cosine`` one minus the
    cosine of the angle. Hidden states are ``[N, H]`` of any floating-point dtype; ``mse`` computes
    in fp32 (fp64 for fp64), cosines in fp64. Weights ``[N]``; a token of weight zero is left out,
    even if it holds NaN.
    """
    student_NH, teacher_NH = (
        _counted(x, weights_N).to(torch.promote_types(x.dtype, torch.float32))
        for x in (student_NH, teacher_NH)
    )
    distance_N = _DISTANCES[loss](student_NH, teacher_NH).to(student_NH.dtype)
    return (weights_N * distance_N).sum()


def _counted(state_NH: Tensor, weights_N: Tensor) -> Tensor:
    """The states, with zeros where the weight is zero: zero times NaN is NaN."""
    return torch.where((weights_N != 0).unsqueeze(1), state_NH, 0)


def _mse(student_NH: Tensor, teacher_NH: Tensor) -> Tensor:
    return (student_NH - teacher_NH).square().mean(1)


def _cosine(student_NH: Tensor, teacher_NH: Tensor) -> Tensor:
    # In fp64, a small cost beside a layer: fp32 cancels in 1 - cos of a small angle.
    student_NH, teacher_NH = student_NH.double(), teacher_NH.double()
    return 1.0 - (F.normalize(student_NH, dim=1) * F.normalize(teacher_NH, dim=1)).sum(1)


_DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mse": _mse, "cosine": _cosine}


@dataclass(frozen=True)
class FeatureLoss:
    """The loss of one pair of layers on one micro-batch.

    Attributes:
        loss: ``mse`` or ``cosine``.
        teacher: ``[N, H_t]``, in the order of the student's tokens.
        weights: ``[N]`` fp32, mask and normalisation.
        projector: maps the student's hidden states to the teacher's size; None where the sizes
            agree.
    """

    loss: str
    teacher: Tensor
    weights: Tensor
    projector: Projector | None

    @torch.no_grad()
    def value(self, student_NH: Tensor) -> Tensor:
        """The loss, an fp32 scalar."""
        blocks = self._blocks(student_NH)
        return torch.stack([self._of_block(student_NH[rows], rows) for rows in blocks]).sum()

    def gradient(self, student_NH: Tensor, *, coefficient: Factor) -> Tensor:
        """The gradient of ``coefficient`` times the loss ``[N, H]``, in the student's dtype.

        The projector's gradient is added to its parameters' ``grad``. Both gradients are computed
        from the hidden states block by block: `value` stores no tensor of their size.
        """
        parameters = [] if self.projector is None else list(self.projector.parameters())
        out_NH = torch.empty_like(student_NH)
        for rows in self._blocks(student_NH):
            block = student_NH[rows].detach().requires_grad_()
            with torch.enable_grad():
                value = scaled(self._of_block(block, rows), coefficient)
            out_NH[rows], *others = torch.autograd.grad(value, [block, *parameters])
            for parameter, gradient in zip(parameters, others, strict=True):
                assert parameter.grad is not None
                parameter.grad += gradient
        return out_NH

    def _of_block(self, student_nH: Tensor, rows: slice) -> Tensor:
        weights_n = self.weights[rows]
        if self.projector is not None:
            student_nH = self.projector(_counted(student_nH, weights_n))
        return feature_loss(student_nH, self.teacher[rows], weights_n, loss=self.loss)

    def _blocks(self, student_NH: Tensor) -> list[slice]:
        widest = max(student_NH.shape[1], self.teacher.shape[1])
        length = max(1, _BLOCK_NUMBERS // widest)
        return [slice(at, at + length) for at in range(0, student_NH.shape[0], length)]


def add_gradients(
    tensors: tuple[Tensor, ...], gradients: Callable[..., tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Return the tensors; backward adds ``gradients(*tensors)`` to their gradients.

    The tensors are saved, and the added gradients are computed in the backward pass.
    """
    return _AddGradients.apply(gradients, *tensors)  # type: ignore[no-untyped-call, no-any-return]


class _AddGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gradients: Callable[..., tuple[Tensor, ...]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.gradients = gradients
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *from_above: Tensor) -> tuple[Tensor | None, ...]:
        added = ctx.gradients(*ctx.saved_tensors)
        return None, *(above + own for above, own in zip(from_above, added, strict=True))


class Projector(torch.nn.Module):
    """Linear maps with biases through the given sizes, GELU between them.

    Two sizes are a linear projector, three an MLP. Parameters are fp32; products use the dtype of
    the input, as in the models.
    """

    def __init__(self, sizes: Sequence[int], *, device: torch.device) -> None:
        super().__init__()
        steps = list(zip(sizes, sizes[1:], strict=False))
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(fan_out, fan_in, device=device))
            for fan_in, fan_out in steps
        )
        self.biases = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(fan_out, device=device)) for _, fan_out in steps
        )

    @torch.no_grad()
    def initialise(self, name: str, *, seed: int) -> None:
        """Draw weights of standard deviation ``fan_in^-0.5``, a function of seed and name alone.

        This preserves unit variance. Biases are zero.
        """
        for index, weight in enumerate(self.weights):
            digest = hashlib.sha256(f"{seed}/projector/{name}/{index}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        pairs = list(zip(self.weights, self.biases, strict=True))
        for index, (weight, bias) in enumerate(pairs):
            hidden = F.linear(hidden, weight.to(hidden.dtype), bias.to(hidden.dtype))
            if index + 1 < len(pairs):
                hidden = F.gelu(hidden)
        return hidden

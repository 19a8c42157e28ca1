"""Where a chunk of logits comes from, and how raw head outputs become the logits of a softmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distill.ops.workspace import Scratch

__all__ = ["GivenLogits", "LinearHead", "LogitRule", "Rows"]


@dataclass(frozen=True)
class Rows:
    """Rows of ``[N, ...]`` tensors that count, in order; ``kept=None`` means all of them."""

    total: int
    kept: Tensor | None

    @classmethod
    def of_weights(cls, *weights: Tensor) -> Rows:
        """Rows on which any weight ``[N]`` is not zero; waits for the device to count them."""
        used = torch.stack([weight != 0 for weight in weights]).any(0)
        kept = used.nonzero().squeeze(1)
        return cls(used.numel(), None if kept.numel() == used.numel() else kept)

    @classmethod
    def of_indices(cls, total: int, indices: Tensor) -> Rows:
        """Rows that the caller has counted, ``[n]`` int64 in order; waits for nothing."""
        return cls(total, None if indices.numel() == total else indices)

    @property
    def count(self) -> int:
        """How many there are."""
        return self.total if self.kept is None else self.kept.numel()

    def take(self, tensor: Tensor, chunk: slice) -> Tensor:
        """Those rows of ``tensor`` that form the chunk: a view if all rows count, else a copy."""
        if self.kept is None:
            return tensor[chunk]
        return tensor.index_select(0, self.kept[chunk])

    def scatter(self, values: Tensor) -> Tensor:
        """The inverse of `take` over all chunks: ``[N, ...]`` with zeros in the rows left out."""
        if self.kept is None:
            return values
        whole = values.new_zeros(self.total, *values.shape[1:])
        return whole.index_copy_(0, self.kept, values)


@dataclass(frozen=True)
class LogitRule:
    """Raw outputs to logits: times ``scale``, then ``softcap * tanh(. / softcap)`` if given."""

    softcap: float | None = None
    scale: float = 1.0

    @property
    def is_identity(self) -> bool:
        """Whether logits are the raw outputs as they stand."""
        return self.softcap is None and self.scale == 1.0

    def load(self, raw: Tensor, scratch: Scratch, name: str) -> Tensor:
        """Logits of a row block in the dtype of statistics; ``raw`` itself where nothing changes.

        ``raw`` is not modified; what is not ``raw`` lies in the scratch buffer ``name``.
        """
        if self.is_identity and raw.dtype == scratch.dtype:
            return raw
        return self.apply_(scratch.take(name, raw.shape[0]).copy_(raw))

    def apply_(self, logits: Tensor) -> Tensor:
        """Turn raw outputs in the dtype of statistics into logits, in place."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def chain_(self, gradient: Tensor, logits: Tensor, spare: Tensor) -> Tensor:
        """Turn the gradient on logits into that on raw outputs, in place; overwrites ``spare``."""
        if self.softcap is not None:
            # d tanh = 1 - tanh^2
            torch.div(logits, self.softcap, out=spare).square_().mul_(gradient)
            gradient.sub_(spare)
        if self.scale != 1.0:
            gradient.mul_(self.scale)
        return gradient


@dataclass(frozen=True)
class LinearHead:
    """Logits as a product: hidden ``[N, H]`` times a weight shard ``[V, H]``, plus ``bias [V]``.

    All are of one dtype; the rule comes after the sum.
    """

    hidden: Tensor
    weight: Tensor
    rule: LogitRule = LogitRule()
    bias: Tensor | None = None

    def outputs(self, hidden: Tensor, columns: int, out: Tensor) -> Tensor:
        """Raw outputs ``[n, columns]`` of some rows over the leading columns, into ``out``."""
        weight = self.weight[:columns].t()
        if self.bias is None:
            return torch.mm(hidden, weight, out=out)
        return torch.addmm(self.bias[:columns], hidden, weight, out=out)

    @property
    def width(self) -> int:
        """Columns of the shard, padding included."""
        return self.weight.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the product."""
        return self.weight.dtype


@dataclass(frozen=True)
class GivenLogits:
    """Logits ``[N, V]`` that exist already and may hold -inf."""

    logits: Tensor
    rule: LogitRule = LogitRule()

    @property
    def width(self) -> int:
        """Columns of the shard, padding included."""
        return self.logits.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the logits."""
        return self.logits.dtype

"""The gradients on a head's weight and bias, summed over chunks of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_distill.ops.workspace import accumulation_dtype, allocate

__all__ = ["BiasGradient", "WeightGradient"]

# Elements of a product that is added to a sum in a wider dtype: enough for a fast product, few
# enough to stay in a CPU's cache.
_PRODUCT_ELEMENTS = 2**21


class WeightGradient:
    """``[V, H]``, the sum of ``gradient^T hidden`` over chunks; zero in the padded columns.

    With one chunk it is the product, in the product's dtype; with more, accumulated in fp32 (fp64).
    If ``into`` is given, products are added to it, and its padded columns do not change.

    On a GPU a product of 16-bit tensors is accumulated in fp32 by the matrix product itself: no
    partial sum is rounded to 16 bits. On a CPU each product is rounded before it is added.
    """

    def __init__(
        self,
        width: int,
        columns: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        chunks: int,
        into: Tensor | None = None,
    ) -> None:
        self._columns = columns
        self._dtype = dtype
        self._is_empty = into is None
        self._is_own = into is None
        if into is None:
            total_dtype = dtype if chunks <= 1 else accumulation_dtype(dtype)
            into = allocate(width, hidden_size, total_dtype, device)
            into[columns:].zero_()
        self._total = into
        self._product: Tensor | None = None

    def add(self, gradient: Tensor, hidden: Tensor) -> None:
        """Add the product of ``gradient [n, columns]`` on raw outputs and ``hidden [n, H]``."""
        if self._columns == 0:
            return
        total = self._total[: self._columns]
        if total.dtype != self._dtype:
            if total.device.type == "cpu":
                self._add_wider(total, gradient, hidden)
            else:
                _multiply_wider(total, gradient.t(), hidden, adds=not self._is_empty)
        elif self._is_empty:
            torch.mm(gradient.t(), hidden, out=total)
        else:
            total.addmm_(gradient.t(), hidden)
        self._is_empty = False

    def finished(self) -> Tensor | None:
        """The sum, zero if no chunk was added; None if it is in the caller's ``into``."""
        if not self._is_own:
            return None
        if self._is_empty:
            self._total.zero_()
        return self._total

    def _add_wider(self, total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
        rows = self._product_rows(hidden)
        if self._product is None:
            self._product = hidden.new_empty(rows, hidden.shape[1])
        for first in range(0, self._columns, rows):
            part = slice(first, min(first + rows, self._columns))
            product = self._product[: part.stop - first]
            torch.mm(gradient[:, part].t(), hidden, out=product)
            if self._is_empty:
                total[part].copy_(product)
            else:
                total[part].add_(product)

    def _product_rows(self, hidden: Tensor) -> int:
        return min(self._columns, max(1, _PRODUCT_ELEMENTS // max(hidden.shape[1], 1)))


def _multiply_wider(total: Tensor, left: Tensor, right: Tensor, *, adds: bool) -> None:
    """``total = left right``, or ``total +=`` it where it ``adds``; total is wider than both.

    CUDA only: torch has no such product on a CPU.
    """
    if adds:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        torch.mm(left, right, out_dtype=total.dtype, out=total)


class BiasGradient:
    """``[V]`` fp32 (fp64), the sum of the gradient on raw outputs over tokens."""

    def __init__(self, width: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.total = torch.zeros(width, dtype=accumulation_dtype(dtype), device=device)
        self._columns = columns

    def add(self, gradient: Tensor) -> None:
        """Add the token sum of the gradient ``[n, columns]``."""
        self.total[: self._columns] += gradient.sum(0, dtype=self.total.dtype)

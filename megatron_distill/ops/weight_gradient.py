"""The gradients on hidden states and on the head's weight and bias, formed in the forward pass.

A pass over the logits, chunk by chunk, adds each chunk's gradient to them at once. Backward only
multiplies them by the upstream scalar.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_distill.ops.workspace import Rows, accumulation_dtype, allocate
from megatron_distill.signals import HiddenState

__all__ = ["BiasGradient", "HeadGradients", "WeightGradient", "differentiable_pass"]

# Largest distance from one of a factor times its inverse, both rounded to fp32.
_UPSTREAM_TOLERANCE = 1e-5

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


class HeadGradients:
    """The gradients on the student's hidden states, head and bias, as far as they are wanted.

    ``rows`` are the counted ones of the hidden states, ``columns`` the shard's real ones. The
    weight's gradient is the sum over ``chunks`` calls of `add`; with ``weight_sum`` it is added to
    that tensor.
    """

    def __init__(
        self,
        student: HiddenState,
        rows: Rows,
        columns: int,
        *,
        chunks: int,
        weight_sum: Tensor | None,
        wanted: tuple[bool, bool, bool],
    ) -> None:
        """``wanted``: on hidden states, weight and bias."""
        needs_hidden, needs_weight, needs_bias = wanted
        self._student, self._rows, self._columns = student, rows, columns
        self._hidden_rows: Tensor | None = None
        self._weight: WeightGradient | None = None
        self._bias: BiasGradient | None = None
        size, dtype, device = student.hidden.shape[1], student.dtype, student.weight.device
        if needs_hidden:
            self._hidden_rows = student.hidden.new_zeros(rows.count, size)
        if needs_weight:
            self._weight = WeightGradient(
                student.width, columns, size, dtype, device, chunks=chunks, into=weight_sum
            )
        if needs_bias:
            self._bias = BiasGradient(student.width, columns, dtype, device)

    @property
    def are_wanted(self) -> bool:
        """Whether there is one to form."""
        return any(one is not None for one in (self._hidden_rows, self._weight, self._bias))

    def add(self, rows: slice, gradient: Tensor) -> None:
        """Add the gradient ``[n, columns]`` on the raw outputs of a slice of the counted rows."""
        if self._columns == 0:
            return
        if self._hidden_rows is not None:
            weight = self._student.weight[: self._columns]
            torch.mm(gradient, weight, out=self._hidden_rows[rows])
        if self._weight is not None:
            self._weight.add(gradient, self._rows.take(self._student.hidden, rows))
        if self._bias is not None:
            self._bias.add(gradient)

    def finished(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """On hidden states ``[N, H]``, weight ``[V, H]`` and bias ``[V]``.

        None if not wanted or added to a given sum; zero for rows left out and in padded columns.
        """
        return (
            None if self._hidden_rows is None else self._rows.scatter(self._hidden_rows),
            None if self._weight is None else self._weight.finished(),
            None if self._bias is None else self._bias.total,
        )


Pass = Callable[[HeadGradients], tuple[Tensor, Tensor]]
"""Fills the gradients of the total; returns the total and sums that are not differentiated."""


def differentiable_pass(
    student: HiddenState,
    run: Pass,
    *,
    rows: Rows,
    columns: int,
    chunks: int,
    weight_sum: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Total and sums of ``run``; the total is differentiable in hidden states, weight and bias.

    Arguments as in `HeadGradients`. The gradients are formed only if autograd wants them.

    Raises:
        RuntimeError: in backward, if ``weight_sum`` was given and the upstream gradient is not one
            (on a GPU a device-side assertion).
    """

    def gradients(wanted: tuple[bool, bool, bool]) -> HeadGradients:
        return HeadGradients(
            student, rows, columns, chunks=chunks, weight_sum=weight_sum, wanted=wanted
        )

    leaves = (student.hidden, student.weight, student.bias)
    if torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves):
        return cast(
            tuple[Tensor, Tensor],
            _StoredGradients.apply(*leaves, run, gradients, weight_sum is not None),  # type: ignore[no-untyped-call]
        )
    with torch.no_grad():
        return run(gradients((False, False, False)))


class _StoredGradients(torch.autograd.Function):
    """Stores the gradients of the forward pass and scales them in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        _weight: Tensor,
        _bias: Tensor | None,
        run: Pass,
        gradients: Callable[[tuple[bool, bool, bool]], HeadGradients],
        has_sum: bool,
    ) -> tuple[Tensor, Tensor]:
        found = gradients(ctx.needs_input_grad[:3])
        total, sums = run(found)
        ctx.save_for_backward(*found.finished())
        ctx.dtype = hidden.dtype
        ctx.weight_is_summed = has_sum and ctx.needs_input_grad[1]
        ctx.mark_non_differentiable(sums)
        return total, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.weight_is_summed:
            _expect_one(upstream)
        scaled = (
            None if gradient is None else _scaled(gradient, upstream, ctx.dtype)
            for gradient in ctx.saved_tensors
        )
        return (*scaled, None, None, None)


def _expect_one(upstream: Tensor) -> None:
    """Refuse an upstream gradient of a total whose gradient on the weight was added to a sum.

    Raises:
        RuntimeError: it is not one (on a GPU a device-side assertion).
    """
    is_one = (upstream - 1).abs() <= _UPSTREAM_TOLERANCE
    message = (
        "weight_gradient_sum already has the gradient of the total itself; call backward on the "
        "total, and put factors into the weights"
    )
    if is_one.device.type != "cpu":
        # A device-side assertion avoids a host synchronisation.
        torch._assert_async(is_one, message)  # noqa: SLF001
    elif not bool(is_one):
        raise RuntimeError(f"{message} (the total's own gradient is {float(upstream):g}, not 1)")


def _scaled(gradient: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient * upstream`` in ``dtype``, without a copy in the wider one."""
    # CPU only: on a GPU the test would synchronise the host.
    if gradient.dtype == dtype and upstream.device.type == "cpu" and bool(upstream == 1):
        return gradient
    if gradient.dim() == 1:
        return (gradient * upstream).to(dtype)
    out = allocate(gradient.shape[0], gradient.shape[1], dtype, gradient.device)
    return torch.mul(gradient, upstream, out=out)

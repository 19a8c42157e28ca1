"""Products of rows with the weights of a model, which stay the same during a request.

torch leaves products in fp32 to MKL. On other processors than Intel's it takes 2 to 3 times as long
as oneDNN, whose calls cost some microseconds more. So a CPU gives oneDNN the large products. Those
of few rows are faster still from a weight in the order of its kernels: a CPU makes such a copy when
the weight has met so many of them that the copy would have paid. On Intel's oneDNN pays where a
product reads a weight that no cache of a core holds. MKL has the others, from a copy by columns.

Shapes: N rows, I columns in, O columns out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Limits", "Linear", "WeightCopies", "limits"]

COPIED_BYTES = 2**29  # at most, in a request
_LEAST_NUMBERS = 2**16  # of a weight that is copied
_LEAST_ROWS = 4
_FEW_ROWS = 64  # with more a copy saves no more than a tenth
_ROWS_MET = 128  # save about as much time as the copy takes


class Limits(NamedTuple):
    """Where a processor multiplies with what.

    Attributes:
        least_copied, least_plain: multiplications of a product for which oneDNN pays, from a copy
            and from the weight itself.
        orders_columns: whether MKL pays from a copy by columns elsewhere.
    """

    least_copied: int
    least_plain: int
    orders_columns: bool


_OF_INTEL = Limits(least_copied=2**23, least_plain=2**62, orders_columns=True)
_OF_OTHERS = Limits(least_copied=700_000, least_plain=2**20, orders_columns=False)


@cache
def limits() -> Limits:
    """Return the limits of this processor."""
    found: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return _OF_INTEL if str(found.get("cpu_name", "")).startswith("Intel") else _OF_OTHERS


@dataclass
class WeightCopies:
    """The copies of a request's weights; `left` bytes may still be used for them."""

    left: int = COPIED_BYTES

    def of(self, weight_OI: Tensor) -> Tensor | None:
        """Return a weight in oneDNN's order; None where there is no such copy."""
        if weight_OI.numel() < _LEAST_NUMBERS or not self.reserve([weight_OI]):
            return None
        # These operations are torch.compile's for frozen weights, and have no public name. 16 rows
        # are a hint.
        found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), 16)  # noqa: SLF001
        return found

    def by_columns(self, weight_OI: Tensor) -> Tensor | None:
        """Return a weight as a matrix [I, O] with rows side by side; None where there is none."""
        return weight_OI.t().contiguous() if self.reserve([weight_OI]) else None

    def reserve(self, weights: Sequence[Tensor], *, share: float = 1.0) -> bool:
        """Take the bytes of copies of weights in fp32 on a CPU, of this share of those left."""
        size = sum(weight.nbytes for weight in weights)
        if size > share * self.left or not all(map(_has_kernels, weights)):
            return False
        self.left -= size
        return True


def _has_kernels(weight_OI: Tensor) -> bool:
    """Whether oneDNN multiplies with a weight in fp32 on this CPU."""
    is_plain = weight_OI.device.type == "cpu" and weight_OI.dtype is torch.float32
    return is_plain and torch.backends.mkldnn.is_available()


@dataclass
class Linear:
    """A matrix [I, O], a view of the module's, and a bias [O] or None."""

    matrix: Tensor
    bias: Tensor | None
    copies: WeightCopies
    _rows_met: int = field(default=0, init=False)
    _copied: Tensor | None = field(default=None, init=False)
    _weight: Tensor | None = field(init=False)  # of oneDNN's products
    _limits: Limits = field(init=False)

    def __post_init__(self) -> None:
        weight_OI = self.matrix.t()
        is_taken = weight_OI.is_contiguous() and _has_kernels(weight_OI)
        self._weight = weight_OI if is_taken else None
        self._limits = limits()

    @classmethod
    def of(cls, module: Any, copies: WeightCopies) -> Linear:
        """Take the parameters of a linear module; an empty bias is none."""
        bias = getattr(module, "bias", None)
        return cls(module.weight.t(), bias if bias is not None and bias.numel() else None, copies)

    def __call__(self, x_NI: Tensor) -> Tensor:
        """Return the product [N, O], with the bias."""
        weight = self._weight_for(x_NI)
        if weight is not None:
            return _by_kernels(x_NI, weight, self.bias)
        if self.bias is None:
            return torch.mm(x_NI, self.matrix)
        return torch.addmm(self.bias, x_NI, self.matrix)

    def product(self, x_NI: Tensor) -> Tensor:
        """Return the product [N, O], without the bias."""
        weight = self._weight_for(x_NI)
        if weight is not None:
            return _by_kernels(x_NI, weight, None)
        return torch.mm(x_NI, self.matrix)

    def add_(self, sums_NO: Tensor, x_NI: Tensor) -> None:
        """Add the product, with the bias."""
        weight = self._weight_for(x_NI)
        if weight is not None:
            sums_NO.add_(_by_kernels(x_NI, weight, self.bias))
            return
        sums_NO.addmm_(x_NI, self.matrix)
        if self.bias is not None:
            sums_NO.add_(self.bias)

    def _weight_for(self, x_NI: Tensor) -> Tensor | None:
        """Return the weight, copied or not, with which oneDNN multiplies these rows; None: MKL."""
        if self._weight is None:
            return None
        rows = x_NI.shape[0]
        count = rows * self.matrix.numel()
        is_large = rows >= _LEAST_ROWS and count >= self._limits.least_copied
        if rows < _FEW_ROWS and self._rows_met < _ROWS_MET:
            self._meet(self._weight, rows, is_large=is_large)
        if not is_large:
            return None
        if self._copied is not None:
            return self._copied
        return self._weight if count >= self._limits.least_plain else None

    def _meet(self, weight_OI: Tensor, rows: int, *, is_large: bool) -> None:
        """Count rows for which a copy would pay, and make it once they are enough."""
        if not is_large and not self._limits.orders_columns:
            return
        self._rows_met += rows
        if self._rows_met < _ROWS_MET:
            return
        if is_large:
            self._copied = self.copies.of(weight_OI)
            return
        ordered = self.copies.by_columns(weight_OI)
        if ordered is not None:
            self.matrix = ordered


def _by_kernels(x_NI: Tensor, weight_OI: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = _product_of_kernels()(x_NI, weight_OI, bias, "none", [], "")
    return found


@cache
def _product_of_kernels() -> Any:
    """Return the operation itself: to look it up for each call takes a microsecond."""
    return torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001

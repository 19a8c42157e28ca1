"""Products of rows with the weights of a model, which stay the same during a request.

torch leaves products in fp32 to MKL. On other processors than Intel's it takes 2 to 3 times as long
as oneDNN, whose calls cost some microseconds more. So a CPU gives oneDNN the large products. Those
of few rows are faster still from a weight in the order of its kernels: a CPU makes such a copy when
the weight has met so many of them that the copy would have paid.

Shapes: N rows, I columns in, O columns out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Linear", "WeightCopies"]

COPIED_BYTES = 2**29  # at most, in a request
_LEAST_NUMBERS = 2**16  # of a weight that is copied
_LEAST_ROWS = 4
# Multiplications of a product for which oneDNN pays, from a copy and from the weight itself.
_LEAST_COPIED, _LEAST_PLAIN = 700_000, 2**20
_FEW_ROWS = 64  # with more a copy saves no more than a tenth
_ROWS_MET = 128  # save about as much time as the copy takes


@dataclass
class WeightCopies:
    """The copies of a request's weights; `left` bytes may still be used for them."""

    left: int = COPIED_BYTES

    def of(self, weight_OI: Tensor) -> Tensor | None:
        """Return a weight in oneDNN's order; None where there is no such copy."""
        if not _has_kernels(weight_OI):
            return None
        if weight_OI.numel() < _LEAST_NUMBERS or weight_OI.nbytes > self.left:
            return None
        self.left -= weight_OI.nbytes
        # These operations are torch.compile's for frozen weights, and have no public name. 16 rows
        # are a hint.
        found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), 16)  # noqa: SLF001
        return found


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

    def __post_init__(self) -> None:
        weight_OI = self.matrix.t()
        is_taken = weight_OI.is_contiguous() and _has_kernels(weight_OI)
        self._weight = weight_OI if is_taken else None

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
        rows = x_NI.shape[0]
        count = rows * self.matrix.numel()
        if self._weight is None or rows < _LEAST_ROWS or count < _LEAST_COPIED:
            return None
        if rows < _FEW_ROWS and self._rows_met < _ROWS_MET:
            self._rows_met += rows
            if self._rows_met >= _ROWS_MET:
                self._copied = self.copies.of(self._weight)
        if self._copied is not None:
            return self._copied
        return self._weight if count >= _LEAST_PLAIN else None


def _by_kernels(x_NI: Tensor, weight_OI: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = _product_of_kernels()(x_NI, weight_OI, bias, "none", [], "")
    return found


@cache
def _product_of_kernels() -> Any:
    """Return the operation itself: to look it up for each call takes a microsecond."""
    return torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001

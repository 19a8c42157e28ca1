"""Products of rows with the weights of a model, which stay the same during a request.

torch leaves products in fp32 to MKL. On other processors than Intel's it takes 2 to 3 times as long
as oneDNN with a weight in the order of its kernels. So a CPU makes a copy in this order when a
large weight has met so many rows that the copy would have paid.

Shapes: N rows, I columns in, O columns out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Linear", "WeightCopies"]

COPIED_BYTES = 2**29  # at most, in a request
_LEAST_ROWS, _LEAST_NUMBERS = 4, 2**16  # a call of oneDNN takes some microseconds more
_ROWS_MET = 128  # save about as much time as the copy takes


@dataclass
class WeightCopies:
    """The copies of a request's weights; `left` bytes may still be used for them."""

    left: int = COPIED_BYTES

    def of(self, weight_OI: Tensor) -> Tensor | None:
        """Return a weight in oneDNN's order; None where there is no such copy."""
        is_plain = weight_OI.device.type == "cpu" and weight_OI.dtype is torch.float32
        if not is_plain or not torch.backends.mkldnn.is_available():
            return None
        if weight_OI.numel() < _LEAST_NUMBERS or weight_OI.nbytes > self.left:
            return None
        self.left -= weight_OI.nbytes
        # These operations are torch.compile's for frozen weights, and have no public name. 16 rows
        # are a hint.
        found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), 16)  # noqa: SLF001
        return found


@dataclass
class Linear:
    """A matrix [I, O], a view of the module's, and a bias [O] or None."""

    matrix: Tensor
    bias: Tensor | None
    copies: WeightCopies
    _rows_met: int = field(default=0, init=False)
    _copied: Tensor | None = field(default=None, init=False)

    @classmethod
    def of(cls, module: Any, copies: WeightCopies) -> Linear:
        """Take the parameters of a linear module; an empty bias is none."""
        bias = getattr(module, "bias", None)
        return cls(module.weight.t(), bias if bias is not None and bias.numel() else None, copies)

    def __call__(self, x_NI: Tensor) -> Tensor:
        """Return the product [N, O], with the bias."""
        copied = self._copy_for(x_NI)
        if copied is not None:
            return _by_copy(x_NI, copied, self.bias)
        if self.bias is None:
            return torch.mm(x_NI, self.matrix)
        return torch.addmm(self.bias, x_NI, self.matrix)

    def product(self, x_NI: Tensor) -> Tensor:
        """Return the product [N, O], without the bias."""
        copied = self._copy_for(x_NI)
        if copied is not None:
            return _by_copy(x_NI, copied, None)
        return torch.mm(x_NI, self.matrix)

    def add_(self, sums_NO: Tensor, x_NI: Tensor) -> None:
        """Add the product, with the bias."""
        copied = self._copy_for(x_NI)
        if copied is not None:
            sums_NO.add_(_by_copy(x_NI, copied, self.bias))
            return
        sums_NO.addmm_(x_NI, self.matrix)
        if self.bias is not None:
            sums_NO.add_(self.bias)

    def _copy_for(self, x_NI: Tensor) -> Tensor | None:
        if x_NI.shape[0] < _LEAST_ROWS:
            return None
        if self._rows_met < _ROWS_MET:
            self._rows_met += x_NI.shape[0]
            if self._rows_met >= _ROWS_MET:
                self._copied = self.copies.of(self.matrix.t())
        return self._copied


def _by_copy(x_NI: Tensor, copied: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, copied, bias, "none", [], "")  # noqa: SLF001
    return found

"""The functions of ``rows.c`` on tensors."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megatron_distill.ops.native.compilation import compiled

__all__ = ["LOG2_E", "UNDERFLOW", "RowFunctions", "native_rows"]

# To base two exponentials take a fifth of the time on a CPU, and any temperature costs the same.
LOG2_E = math.log2(math.e)
# Two to the power of less is nothing in fp32.
UNDERFLOW = 150
# Elements below which starting a second thread takes longer than the work: torch's own bound.
_GRAIN = 2**15

_MATRIX = (ctypes.c_void_p, ctypes.c_int64)
_SIZES = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
_SIGNATURES = {
    "tops": (*_MATRIX, ctypes.c_void_p, ctypes.c_void_p, *_SIZES),
    "largest": (
        *_MATRIX,
        ctypes.c_int,
        *(ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_void_p, ctypes.c_void_p),
        *_SIZES,
    ),
    "bounded_products": (*_MATRIX, ctypes.c_void_p, ctypes.c_float, *_MATRIX, *_SIZES),
    "exponentials": (
        *_MATRIX,
        ctypes.c_void_p,
        *(ctypes.c_float, ctypes.c_float, ctypes.c_float),
        *_MATRIX,
        ctypes.c_void_p,
        *_SIZES,
    ),
    "surprises": (
        *(*_MATRIX, *_MATRIX),
        *(ctypes.c_float, ctypes.c_float),
        ctypes.c_void_p,
        *_MATRIX,
        *_SIZES,
    ),
    "weighted_gaps": (
        *(*_MATRIX, *_MATRIX, *_MATRIX),
        ctypes.c_float,
        ctypes.c_void_p,
        *_SIZES,
    ),
    "pulls": (
        *_MATRIX,
        *(ctypes.c_float, ctypes.c_void_p),
        *(*_MATRIX, *_MATRIX),
        ctypes.c_void_p,
        *_SIZES,
    ),
    "differences": (
        *(*_MATRIX, ctypes.c_void_p),
        *(*_MATRIX, ctypes.c_void_p),
        *_MATRIX,
        *_SIZES,
    ),
}


@dataclass(frozen=True)
class RowFunctions:
    """What takes fp32 matrices ``[N, V]`` on a CPU whose columns lie side by side."""

    compiled: ctypes.CDLL

    def tops(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of each row ``[N]``, NaN if there is one, and its lowest column; V > 0."""
        top = values.new_empty(values.shape[0])
        columns = torch.empty(values.shape[0], dtype=torch.int64)
        self.compiled.tops(*_matrix(values), top.data_ptr(), columns.data_ptr(), *_sizes(values))
        return top, columns

    def largest(self, values: Tensor, k: int, *, most: int) -> tuple[Tensor, Tensor]:
        """Columns ``[N, k]`` of the largest of each row, fp32 or bf16, by (value, column), and bool
        ``[N]`` where they were found.

        That is not so in rows with a NaN, and in such where more than ``most`` reach the ``k``-th
        of the largest of 64 columns each, of which there must be as many.
        """
        columns = torch.empty(values.shape[0], k, dtype=torch.int64)
        found = torch.empty(values.shape[0], dtype=torch.bool)
        self.compiled.largest(
            *_matrix(values),
            values.dtype == torch.bfloat16,
            *(k, most),
            *(columns.data_ptr(), found.data_ptr()),
            *_sizes(values),
        )
        return columns, found

    def bounded_products(self, values: Tensor, factors: Tensor, least: float, out: Tensor) -> None:
        """``values`` times fp32 ``factors [N, 1]`` and no less than ``least`` into ``out``, which
        may be the values."""
        factors = factors.contiguous()
        self.compiled.bounded_products(
            *_matrix(values),
            factors.data_ptr(),
            least,
            *_matrix(out),
            *_sizes(out),
        )

    def exponentials(
        self, logits: Tensor, points: Tensor, temperature: float, out: Tensor, sums: Tensor | None
    ) -> None:
        """``e^((logits - points) / temperature)`` into ``out``, and its sums ``[N]`` in fp64.

        ``points`` are fp32 ``[N]``; ``out`` may be the logits.
        """
        slope = LOG2_E / temperature
        rounded, points = _in_fp32(slope), points.contiguous()
        self.compiled.exponentials(
            *_matrix(logits),
            points.data_ptr(),
            *(rounded, slope - rounded, -UNDERFLOW / slope),
            *_matrix(out),
            None if sums is None else sums.data_ptr(),
            *_sizes(out),
        )

    def surprises(
        self, of: Tensor, other: Tensor, share: float, out: Tensor, *, anchored: Tensor | bool
    ) -> None:
        """``log(m/of)`` in ``m = share other + (1 - share) of``, exact near ``of == other``.

        In rows where ``anchored`` (bool ``[N, 1]``, or one for all) is false, ``log(m/of)`` less
        ``log(1 - share)``, exact near ``other == 0``. All are normal numbers above zero; ``out``
        may be one of the operands.
        """
        if isinstance(anchored, bool):
            anchored = torch.full((of.shape[0], 1), anchored)
        anchored = anchored.contiguous()
        # The weight that fp32 rounds is the lesser of the two.
        own = 1 - _in_fp32(share) if share <= 0.5 else _in_fp32(1 - share)
        self.compiled.surprises(
            *(*_matrix(of), *_matrix(other)),
            *(own, 1 - own),
            anchored.data_ptr(),
            *_matrix(out),
            *_sizes(out),
        )

    def weighted_gaps(
        self, weights: Tensor, left: Tensor, right: Tensor, out: Tensor, *, most: float
    ) -> None:
        """``[N]`` fp64 sums of ``weights (left - right)`` into ``out``.

        A difference is no larger than ``most`` either way, and nothing where it is not a number.
        """
        self.compiled.weighted_gaps(
            *(*_matrix(weights), *_matrix(left), *_matrix(right)),
            most,
            out.data_ptr(),
            *_sizes(weights),
        )

    def differences(
        self,
        left: Tensor,
        left_factors: Tensor,
        right: Tensor,
        right_factors: Tensor,
        out: Tensor,
    ) -> None:
        """``left left_factors - right right_factors`` into ``out``, which may be one of the two.

        The factors are fp32 ``[N, 1]``; both products are rounded.
        """
        left_factors, right_factors = left_factors.contiguous(), right_factors.contiguous()
        self.compiled.differences(
            *_matrix(left),
            left_factors.data_ptr(),
            *_matrix(right),
            right_factors.data_ptr(),
            *_matrix(out),
            *_sizes(out),
        )

    def pulls(
        self, slopes: Tensor, scale: float, references: Tensor, weights: Tensor, out: Tensor
    ) -> Tensor:
        """``weights (scale slopes - references)`` into ``out``, and its sums ``[N]`` in fp64.

        The references are fp32 ``[N, 1]``; ``out`` may be one of the matrices.
        """
        references = references.contiguous()
        sums = torch.empty(out.shape[0], dtype=torch.float64)
        self.compiled.pulls(
            *_matrix(slopes),
            *(scale, references.data_ptr()),
            *(*_matrix(weights), *_matrix(out)),
            sums.data_ptr(),
            *_sizes(out),
        )
        return sums


def native_rows(
    *matrices: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> RowFunctions | None:
    """The functions, where these ``[N, V]`` are for them and they could be compiled."""
    for matrix in matrices:
        on_cpu = matrix.device.type == "cpu" and matrix.dtype in dtypes
        if not on_cpu or matrix.stride(1) != 1:
            return None
    return _functions()


@cache
def _functions() -> RowFunctions | None:
    library = compiled("rows.c")
    if library is None:
        return None
    for name, signature in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = signature, None
    return RowFunctions(library)


def _in_fp32(value: float) -> float:
    return ctypes.c_float(value).value


def _matrix(matrix: Tensor) -> tuple[int, int]:
    return matrix.data_ptr(), matrix.stride(0)


def _sizes(matrix: Tensor) -> tuple[int, int, int]:
    rows, columns = matrix.shape
    return rows, columns, torch.get_num_threads() if rows * columns > _GRAIN else 1

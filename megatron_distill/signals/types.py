"""What a teacher says about the tokens of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from megatron_distill.runtime.batch import Batch

__all__ = ["DenseLogits", "HiddenState", "Signal", "Teacher"]


@dataclass(frozen=True)
class DenseLogits:
    """Logits ``[N, V]`` over this rank's columns, final: scale and soft-cap applied. May hold -inf.

    Raises:
        ValueError: not a matrix of floating-point numbers.
    """

    logits: Tensor

    def __post_init__(self) -> None:
        _require_matrix("DenseLogits.logits", self.logits)


@dataclass(frozen=True)
class HiddenState:
    """Final hidden states ``[N, H]`` and this rank's head shard ``[V, H]``: logits to be.

    The logits are ``cap(logit_scale * hidden weight^T)`` with ``cap(z) = c tanh(z / c)`` for a
    ``logit_softcap`` of c and the identity without one.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together, or a factor is not positive.
    """

    hidden: Tensor
    weight: Tensor
    logit_softcap: float | None = None
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        _require_matrix("HiddenState.hidden", self.hidden)
        _require_matrix("HiddenState.weight", self.weight)
        if self.hidden.shape[1] != self.weight.shape[1]:
            raise ValueError(
                f"HiddenState.hidden has {self.hidden.shape[1]} features, "
                f"its weight {self.weight.shape[1]}"
            )
        if self.hidden.dtype != self.weight.dtype or self.hidden.device != self.weight.device:
            raise ValueError(
                f"HiddenState.hidden is {self.hidden.dtype} on {self.hidden.device}, "
                f"its weight {self.weight.dtype} on {self.weight.device}"
            )
        if self.logit_softcap is not None:
            _require_positive("HiddenState.logit_softcap", self.logit_softcap)
        _require_positive("HiddenState.logit_scale", self.logit_scale)


Signal: TypeAlias = DenseLogits | HiddenState


class Teacher(Protocol):
    """Anything that can speak about micro-batches before the student's schedule starts."""

    def signals(self, batches: Sequence[Batch]) -> Sequence[Signal] | Sequence[None]:
        """One signal per micro-batch; None on ranks whose pipeline stage needs none."""
        ...


def _require_matrix(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 2 or not tensor.is_floating_point():
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; "
            "it must be a floating-point matrix with one row per token or column"
        )


def _require_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} is {value}; it must be positive and finite")

"""Signals on the whole vocabulary: logits, and hidden states with an output head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron_distill.signals.checks import require_bias, require_matrix, require_positive
from megatron_distill.signals.targets import IdTarget, TermView

__all__ = ["DenseLogits", "HiddenState", "LogitRule", "LogitSource"]


@dataclass(frozen=True)
class LogitRule:
    """Raw outputs to logits: times ``scale``, then ``softcap * tanh(. / softcap)`` if given."""

    softcap: float | None = None
    scale: float = 1.0

    @property
    def is_identity(self) -> bool:
        """Whether logits equal the raw outputs."""
        return self.softcap is None and self.scale == 1.0

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


class LogitSource(Protocol):
    """Logits of N tokens over this rank's columns, formed already or formed chunk by chunk."""

    @property
    def tokens(self) -> int:
        """Number of tokens N."""
        ...

    @property
    def width(self) -> int:
        """Columns of the shard, padding included."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the raw outputs."""
        ...

    @property
    def rule(self) -> LogitRule:
        """Turns raw outputs into logits."""
        ...

    @property
    def formed(self) -> Tensor | None:
        """``[N, V]`` raw outputs where they exist; they may hold -inf. None for a head."""
        ...

    def outputs(
        self, take: Callable[[Tensor], Tensor], columns: int, out: Tensor | None = None
    ) -> Tensor:
        """Raw outputs ``[n, columns]`` of the tokens that ``take`` selects from ``[N, ...]``.

        ``out`` is memory ``[n, columns]`` for the product of a head.
        """
        ...


@dataclass(frozen=True)
class DenseLogits:
    """Logits ``[N, V]`` over this rank's columns, final: scale and soft-cap applied. May hold -inf.

    Raises:
        ValueError: not a matrix of floating-point numbers.
    """

    logits: Tensor

    def __post_init__(self) -> None:
        require_matrix("DenseLogits.logits", self.logits)

    @property
    def tokens(self) -> int:
        """Number of tokens N."""
        return self.logits.shape[0]

    @property
    def width(self) -> int:
        """Columns of the shard, padding included."""
        return self.logits.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the logits."""
        return self.logits.dtype

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self.logits.device

    @property
    def rule(self) -> LogitRule:
        """The identity."""
        return LogitRule()

    @property
    def formed(self) -> Tensor:
        """The logits ``[N, V]``."""
        return self.logits

    def outputs(
        self,
        take: Callable[[Tensor], Tensor],
        columns: int,
        out: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """See `LogitSource`."""
        return take(self.logits[:, :columns])

    def with_columns(self, rows: Callable[[Tensor], Tensor]) -> DenseLogits:
        """The columns that ``rows`` makes of the transposed logits ``[V, N]``, detached."""
        return DenseLogits(rows(self.logits.detach().t()).t().contiguous())

    def logit_source(self) -> DenseLogits:
        """See `Signal`."""
        return self

    def targets(self, terms: Sequence[TermView]) -> Sequence[IdTarget] | None:  # noqa: ARG002
        """None: terms are between logits, or on ids chosen from them."""
        return None

    def token_statistics(self) -> Mapping[str, Tensor]:
        """Empty: all follow from the logits."""
        return {}


@dataclass(frozen=True)
class HiddenState:
    """Final hidden states ``[N, H]`` and this rank's head shard ``[V, H]``.

    The logits are ``cap(logit_scale * (hidden weight^T + bias))`` with ``cap(z) = c tanh(z / c)``
    for a ``logit_softcap`` of c and the identity without one. ``bias [V]`` is of the same shard.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together, or a factor is not positive.
    """

    hidden: Tensor
    weight: Tensor
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        require_matrix("HiddenState.hidden", self.hidden)
        require_matrix("HiddenState.weight", self.weight)
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
        if self.bias is not None:
            require_bias(self.bias, self.weight)
        if self.logit_softcap is not None:
            require_positive("HiddenState.logit_softcap", self.logit_softcap)
        require_positive("HiddenState.logit_scale", self.logit_scale)

    @property
    def tokens(self) -> int:
        """Number of tokens N."""
        return self.hidden.shape[0]

    @property
    def width(self) -> int:
        """Columns of the shard, padding included."""
        return self.weight.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the product."""
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the hidden states and the head."""
        return self.weight.device

    @property
    def rule(self) -> LogitRule:
        """Soft-cap and scale."""
        return LogitRule(self.logit_softcap, self.logit_scale)

    @property
    def formed(self) -> None:
        """None: the logits exist for one chunk of tokens at a time."""
        return None

    def outputs(
        self, take: Callable[[Tensor], Tensor], columns: int, out: Tensor | None = None
    ) -> Tensor:
        """See `LogitSource`."""
        hidden, weight = take(self.hidden), self.weight[:columns].t()
        if self.bias is None:
            return torch.mm(hidden, weight, out=out)
        return torch.addmm(self.bias[:columns], hidden, weight, out=out)

    def with_columns(self, rows: Callable[[Tensor], Tensor]) -> HiddenState:
        """The columns that ``rows`` makes of the head ``[V, H]`` and of the bias ``[V]``."""
        bias = None if self.bias is None else rows(self.bias)
        return replace(self, weight=rows(self.weight), bias=bias)

    def logit_source(self) -> HiddenState:
        """See `Signal`."""
        return self

    def targets(self, terms: Sequence[TermView]) -> Sequence[IdTarget] | None:  # noqa: ARG002
        """None: terms are between logits, or on ids chosen from them."""
        return None

    def token_statistics(self) -> Mapping[str, Tensor]:
        """Empty: all follow from the logits."""
        return {}

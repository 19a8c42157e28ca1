"""What a teacher says about the tokens of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from megatron_distill.runtime.batch import Batch

__all__ = [
    "DenseLogits",
    "HiddenState",
    "Recorded",
    "Sampled",
    "Signal",
    "Teacher",
    "TopK",
    "WithFeatures",
]


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

    The logits are ``cap(logit_scale * (hidden weight^T + bias))`` with ``cap(z) = c tanh(z / c)``
    for a ``logit_softcap`` of c and the identity without one; ``bias [V]`` is of the same shard.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together, or a factor is not positive.
    """

    hidden: Tensor
    weight: Tensor
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    bias: Tensor | None = None

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
        if self.bias is not None:
            _require_bias(self.bias, self.weight)
        if self.logit_softcap is not None:
            _require_positive("HiddenState.logit_softcap", self.logit_softcap)
        _require_positive("HiddenState.logit_scale", self.logit_scale)


@dataclass(frozen=True)
class TopK:
    """The teacher's most probable ids of each token, and what it leaves to all others.

    Attributes:
        ids: ``[N, K]`` int64 global ids, each at most once per token.
        log_probs: ``[N, K]``, normalised over the whole vocabulary, not over the K ids. An entry of
            -inf is not kept: its id counts with all others.
        log_tail: ``[N]`` log of the mass of all others; -inf if nothing is left.
        temperature: of the teacher's softmax that these are from. None: whatever the term's is,
            which the caller vouches for.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together.
    """

    ids: Tensor
    log_probs: Tensor
    log_tail: Tensor
    temperature: float | None = None

    def __post_init__(self) -> None:
        _require_ids("TopK", self.ids, self.log_probs, "log_probs")
        if not self.log_probs.is_floating_point():
            raise ValueError(f"TopK.log_probs is {self.log_probs.dtype}; it must be floating-point")
        if self.log_tail.shape != self.ids.shape[:1] or not self.log_tail.is_floating_point():
            raise ValueError(
                f"TopK.log_tail is {self.log_tail.dtype} of shape {tuple(self.log_tail.shape)}; it "
                f"must be floating-point, one number for each of {self.ids.shape[0]} tokens"
            )
        if self.temperature is not None:
            _require_positive("TopK.temperature", self.temperature)


@dataclass(frozen=True)
class Sampled:
    """Ids drawn from the teacher with replacement, and how often each was drawn.

    Attributes:
        ids: ``[N, K]`` int64 global ids.
        counts: ``[N, K]``, integers or importance weights; an id of count 0 was not drawn. They are
            divided by their sum per token.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together.
    """

    ids: Tensor
    counts: Tensor

    def __post_init__(self) -> None:
        _require_ids("Sampled", self.ids, self.counts, "counts")


@dataclass(frozen=True)
class Recorded:
    """What was written down of a teacher: something for each term, and two numbers per token.

    Attributes:
        by_term: for each term of the objective, in its order, at the term's temperature.
        entropy: ``[N]`` fp32 of the teacher's whole distribution, in nats; None if unknown.
        label_log_prob: ``[N]`` fp32, the teacher's log-probability of the label; None if unknown.

    Raises:
        ValueError: there is nothing, or the numbers of tokens differ.
    """

    by_term: tuple[TopK | Sampled, ...]
    entropy: Tensor | None = None
    label_log_prob: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.by_term:
            raise ValueError("Recorded.by_term is empty; it must hold something for each term")
        tokens = self.by_term[0].ids.shape[0]
        for index, signal in enumerate(self.by_term):
            if signal.ids.shape[0] != tokens:
                raise ValueError(
                    f"Recorded.by_term.{index} has {signal.ids.shape[0]} tokens, the first {tokens}"
                )
        for name, values in (("entropy", self.entropy), ("label_log_prob", self.label_log_prob)):
            if values is not None and values.shape != (tokens,):
                raise ValueError(
                    f"Recorded.{name} is of shape {tuple(values.shape)}; it must be one number for "
                    f"each of {tokens} tokens"
                )


Signal: TypeAlias = DenseLogits | HiddenState | TopK | Sampled | Recorded


@dataclass(frozen=True)
class WithFeatures:
    """What a teacher says about a micro-batch, and what some of its layers put out.

    Attributes:
        signal: as without features: None on ranks whose pipeline stage needs none.
        features: what layers of this rank's pipeline stage are compared with: by what it is and the
            number of the teacher's layer, from 1. ``output`` is ``[s, b, H]``, ``query``
            ``[s, b, n, d]`` and ``key`` ``[S, b, g, d]`` of this rank's heads; tokens as the
            student's layers hold them.
    """

    signal: Signal | None
    features: Mapping[tuple[str, int], Tensor]


class Teacher(Protocol):
    """Anything that can speak about micro-batches before the student's schedule starts."""

    def signals(
        self, batches: Sequence[Batch]
    ) -> Sequence[Signal] | Sequence[None] | Sequence[WithFeatures]:
        """One signal per micro-batch; None on ranks whose pipeline stage needs none."""
        ...


def _require_matrix(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 2 or not tensor.is_floating_point():
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; "
            "it must be a floating-point matrix with one row per token or column"
        )


def _require_bias(bias: Tensor, weight: Tensor) -> None:
    if bias.shape != weight.shape[:1] or (bias.dtype, bias.device) != (weight.dtype, weight.device):
        raise ValueError(
            f"HiddenState.bias is {bias.dtype} of shape {tuple(bias.shape)} on {bias.device}; it "
            f"must be {weight.dtype} on {weight.device}, one number for each of "
            f"{weight.shape[0]} columns"
        )


def _require_ids(kind: str, ids: Tensor, values: Tensor, name: str) -> None:
    if ids.dim() != 2 or ids.shape[1] < 1 or ids.is_floating_point() or ids.is_complex():
        raise ValueError(
            f"{kind}.ids is {ids.dtype} of shape {tuple(ids.shape)}; "
            "it must be an integer matrix with one row per token and at least one column"
        )
    if values.shape != ids.shape or values.device != ids.device:
        raise ValueError(
            f"{kind}.{name} is of shape {tuple(values.shape)} on {values.device}, "
            f"its ids of {tuple(ids.shape)} on {ids.device}"
        )


def _require_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} is {value}; it must be positive and finite")

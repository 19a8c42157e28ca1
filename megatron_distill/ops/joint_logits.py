"""Logits of several teachers as those of one, formed chunk by chunk: their means, or a choice.

A mixture over teachers i with weights w of sum one and logits z, at the temperature T of its terms:

    arithmetic    m = sum_i w_i softmax(z_i / T)
    geometric     m ~ prod_i softmax(z_i / T)^w_i = softmax(sum_i w_i z_i / T)

Both are handed over as logits x with ``softmax(x / T) = m``. The geometric mean therefore needs no
normaliser and has the same x at every temperature. The arithmetic mean is taken at T. The gradient
of its forward KL is then that of the weighted sum of the single teachers' forward KLs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.log_softmax import log_normalizer
from megatron_distill.ops.workspace import accumulation_dtype, allocate_logits
from megatron_distill.signals import LogitRule, LogitSource

__all__ = ["ArithmeticMean", "ChosenLogits", "GeometricMean"]


@dataclass(frozen=True)
class _JointSource:
    """Members with the same tokens and real columns; see `LogitSource`.

    Raises:
        ValueError: no member, or members with different numbers of tokens.
    """

    members: tuple[LogitSource, ...]

    def __post_init__(self) -> None:
        tokens = [member.tokens for member in self.members]
        if len(set(tokens)) != 1:
            raise ValueError(
                f"the members have {tokens} tokens; give at least one, all with the same tokens"
            )

    @property
    def tokens(self) -> int:
        """Number of tokens N."""
        return self.members[0].tokens

    @property
    def width(self) -> int:
        """Columns of the shard, with the least padding of all members."""
        return min(member.width for member in self.members)

    @property
    def dtype(self) -> torch.dtype:
        """That of statistics: fp32, or fp64 where a member has it."""
        dtypes = [accumulation_dtype(member.dtype) for member in self.members]
        return torch.float64 if torch.float64 in dtypes else torch.float32

    @property
    def rule(self) -> LogitRule:
        """The identity: the members' soft-caps and scales are applied."""
        return LogitRule()

    @property
    def formed(self) -> None:
        """None: the logits exist for one chunk of tokens at a time."""
        return None

    def _logits(
        self,
        member: LogitSource,
        take: Callable[[Tensor], Tensor],
        columns: int,
        out: Tensor | None,
    ) -> Tensor:
        """Logits ``[n, columns]`` of a member, in memory of its own that may be overwritten.

        ``out``, if given, is memory for the result of all members.
        """
        memory = None
        if out is not None and member.formed is None:
            memory = allocate_logits(len(out), columns, member.dtype, out.device)
        raw = member.outputs(take, columns, memory)
        return member.rule.apply_(raw.to(self.dtype, copy=member.formed is not None))


def _check_weights(weights: Sequence[float] | Tensor, members: Sequence[LogitSource]) -> None:
    if isinstance(weights, Tensor):
        if weights.shape != (members[0].tokens, len(members)):
            raise ValueError(
                f"weights are {tuple(weights.shape)} for {members[0].tokens} tokens and "
                f"{len(members)} members"
            )
        return  # their values are on the device
    if len(weights) != len(members):
        raise ValueError(f"{len(weights)} weights for {len(members)} members")
    if not all(weight > 0 for weight in weights) or not math.isclose(sum(weights), 1.0):
        raise ValueError(f"weights are {tuple(weights)}; they must be positive and of sum one")


def _taken(
    weights: Sequence[float] | Tensor, take: Callable[[Tensor], Tensor]
) -> Sequence[float | Tensor]:
    """The weight of each member, or those ``[n]`` of the selected tokens."""
    return take(weights).unbind(1) if isinstance(weights, Tensor) else weights


@dataclass(frozen=True)
class ArithmeticMean(_JointSource):
    """Weighted mean of the members' probabilities at ``temperature``, as a `LogitSource`.

    Attributes:
        weights: of the members, positive and of sum one; or ``[N, M]``, those of each token.
        temperature: T of the terms that use it.
        group: the ranks that share the vocabulary; None if this rank holds all of it.

    Finite logits only. Memory: one chunk of logits in the dtype of statistics for the result, one
    more for a member.

    Collective: over ``group`` per chunk and member one all-gather of 8 bytes per token.

    Raises:
        ValueError: members of different tokens, or weights that are not positive and of sum one.
    """

    weights: tuple[float, ...] | Tensor
    temperature: float
    group: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_weights(self.weights, self.members)

    def outputs(
        self, take: Callable[[Tensor], Tensor], columns: int, out: Tensor | None = None
    ) -> Tensor:
        """``T log m`` ``[n, columns]``; see `LogitSource`."""
        mean = out
        weights = _taken(self.weights, take)
        for number, (member, weight) in enumerate(zip(self.members, weights, strict=True)):
            logits = self._logits(member, take, columns, out).div_(self.temperature)
            shift = log_normalizer(logits, self.group)
            shift.sub_(weight.log() if isinstance(weight, Tensor) else math.log(weight))
            logits.sub_(shift.unsqueeze(1))
            if number == 0:
                mean = logits if mean is None else mean.copy_(logits)
            else:
                assert mean is not None
                torch.logaddexp(mean, logits, out=mean)
        assert mean is not None
        return mean.mul_(self.temperature)


@dataclass(frozen=True)
class GeometricMean(_JointSource):
    """Normalised geometric mean of the members' probabilities, as a `LogitSource`.

    Its logits are the weighted mean of the members' logits, at every temperature.

    Attributes:
        weights: of the members, positive and of sum one; or ``[N, M]``, those of each token.

    Raises:
        ValueError: members of different tokens, or weights that are not positive and of sum one.
    """

    weights: tuple[float, ...] | Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_weights(self.weights, self.members)

    def outputs(
        self, take: Callable[[Tensor], Tensor], columns: int, out: Tensor | None = None
    ) -> Tensor:
        """Weighted means ``[n, columns]``; see `LogitSource`."""
        mean = out
        weights = _taken(self.weights, take)
        for number, (member, weight) in enumerate(zip(self.members, weights, strict=True)):
            logits = self._logits(member, take, columns, out)
            logits.mul_(weight.unsqueeze(1) if isinstance(weight, Tensor) else weight)
            if number == 0:
                mean = logits if mean is None else mean.copy_(logits)
            else:
                assert mean is not None
                mean.add_(logits)
        assert mean is not None
        return mean


@dataclass(frozen=True)
class ChosenLogits(_JointSource):
    """For each token the logits of one member, as a `LogitSource`.

    Attributes:
        choice: ``[N]`` int64, number of the token's member.

    Raises:
        ValueError: members of different tokens.
    """

    choice: Tensor

    def outputs(
        self, take: Callable[[Tensor], Tensor], columns: int, out: Tensor | None = None
    ) -> Tensor:
        """The chosen logits ``[n, columns]``; see `LogitSource`."""
        chosen_n1 = take(self.choice).unsqueeze(1)
        found = self._logits(self.members[0], take, columns, out)
        found = found if out is None else out.copy_(found)
        for number, member in enumerate(self.members[1:], start=1):
            torch.where(
                chosen_n1 == number, self._logits(member, take, columns, out), found, out=found
            )
        return found

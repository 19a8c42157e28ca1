"""Requests to a model that writes and scores text, and its answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_distill.errors import ConfigError

__all__ = [
    "AnswerScore",
    "Ending",
    "OnTokens",
    "Sampling",
    "ScoreRow",
    "Stops",
    "WriteRow",
    "Written",
    "check_answers",
    "check_rows",
]

Ending = Literal["id", "string", "length"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution of the next token.

    `temperature` 0 takes the largest logit, the lowest id among equals. Otherwise the token is
    drawn from softmax(logits / temperature), after these cuts in turn. `top_k`: that many likeliest
    tokens. `top_p`: the smallest set of likeliest tokens with this probability (nucleus sampling,
    arXiv 1904.09751, section 3.1). `min_p`: tokens with this share of the largest probability
    (arXiv 2407.01082, section 3). Among equally likely tokens the lowest ids stay.

    A draw depends on `seed`, the row's sample number, the position and the logits alone.

    Raises ConfigError on a value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature}: must be 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k}: must be 1 or more, or null for all tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p}: must be above 0 and at most 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise ConfigError(f"min_p={self.min_p}: must be from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Stops:
    """The ends of a text: token ids, and strings that may begin inside of one token.

    Strings need the model's `decode`. Raises ConfigError on an empty string.
    """

    ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if "" in self.strings:
            raise ConfigError("a stop string is empty; leave it out")


@dataclass(frozen=True)
class WriteRow:
    """A text to continue: its ids, its number in the key of draws, and the most ids to write."""

    ids: tuple[int, ...]
    sample: int
    limit: int


@dataclass(frozen=True)
class Written:
    """A continuation.

    Attributes:
        ids: the written ids; a stop id is the last of them, and so is the id that completes a stop
            string.
        log_probs: of each id under the model: softmax of the logits at temperature one, uncut.
        ended: by a stop id, by a stop string, or at the row's limit or the model's last position.
        text: of the ids, up to the stop id or the stop string; None without `decode`.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    ended: Ending
    text: str | None = None


@dataclass(frozen=True)
class ScoreRow:
    """A context of one id at least, and answers that each continue it, of one id at least."""

    context: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class AnswerScore:
    """The log-probability of each id of an answer, and whether each was the likeliest one."""

    log_probs: tuple[float, ...]
    is_greedy: bool

    @property
    def log_prob(self) -> float:
        """The answer's log-probability, in nats."""
        return math.fsum(self.log_probs)


OnTokens = Callable[[int, Sequence[int]], None]
"""Called with a row's index and its next written ids, without a stop id; on every rank."""


def check_answers(rows: Iterable[ScoreRow], *, tokens: int) -> None:
    """Raise ConfigError for answers that are missing, or that the model never writes.

    tokens: ids that it writes.
    """
    for row in rows:
        if not row.answers or not all(row.answers):
            raise ConfigError("a row to score has no answer, or an empty one; leave it out")
        for answer in row.answers:
            if not 0 <= min(answer) <= max(answer) < tokens:
                raise ConfigError(
                    f"an answer has token id {min(answer) if min(answer) < 0 else max(answer)}"
                    f", and there are {tokens:,} ids; use the model's tokenizer"
                )


def check_rows(
    rows: Iterable[tuple[Sequence[int], int]], *, prefix: int, positions: int, ids: int
) -> None:
    """Raise ConfigError for rows that a model with so many positions and ids cannot read.

    rows: ids, and how many positions more are read. prefix: the tokens before each row.
    """
    for row, more in rows:
        length = prefix + len(row) + more
        if not row:
            raise ConfigError("a row has no token after the shared prefix; give it one")
        if length > positions:
            raise ConfigError(
                f"a row has {length:,} tokens, and the model has {positions:,} positions "
                "(max_position_embeddings); shorten the row"
            )
        if not 0 <= min(row) <= max(row) < ids:
            raise ConfigError(
                f"a row has token id {min(row) if min(row) < 0 else max(row)}, and the model "
                f"has {ids:,} ids; use the model's tokenizer"
            )

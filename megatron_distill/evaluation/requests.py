"""Requests to a model: score an answer after a context. All that tasks know about models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_distill.models.generation import Sampling
from megatron_distill.runtime.termination import Interrupted

__all__ = [
    "GREEDY",
    "Interrupted",
    "Request",
    "Score",
    "Scorer",
    "Writer",
    "WrittenText",
    "model_input",
]

GREEDY: Final = Sampling()


@dataclass(frozen=True)
class Request:
    """An answer to score after a context; token ids, int32.

    The context has at least one token, the answer may have none: its log-probability is zero.
    """

    context: NDArray[np.int32]
    answer: NDArray[np.int32]


class Score(NamedTuple):
    """The answer's log-probability in nats, and whether greedy decoding writes this answer."""

    log_prob: float
    is_greedy: bool


class Scorer(Protocol):
    """A model behind any layout; every rank calls it with the same requests."""

    @property
    def positions(self) -> int:
        """The longest input in tokens; a longer request loses the beginning of its context."""
        ...

    def score(
        self, requests: Sequence[Request], *, advanced: Callable[[int], None] | None = None
    ) -> list[Score]:
        """Return the scores in the order of the requests, the same on every rank.

        `advanced` is told the number of requests that are done so far. Raises Interrupted on all
        ranks together.
        """
        ...


class WrittenText(NamedTuple):
    """A continuation up to its stop, and whether it was cut at the most tokens instead."""

    text: str
    is_cut: bool


class Writer(Protocol):
    """A model that continues prompts; every rank calls it with the same prompts."""

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        stop_ids: tuple[int, ...],
        stops: tuple[str, ...],
        limit: int,
        sampling: Sampling = GREEDY,
        samples: Sequence[int] | None = None,
        advanced: Callable[[int], None] | None = None,
    ) -> list[WrittenText]:
        """Return texts of at most `limit` tokens, the same on every rank.

        They end before the first of `stops`. `samples`: the number of each text in the key of its
        draws; None: its place. Raises Interrupted on all ranks together.
        """
        ...


def model_input(request: Request, positions: int) -> tuple[NDArray[np.int32], int]:
    """Return the model's input of a request, and how many of its last positions predict the answer.

    The input is (context + answer)[-(positions + 1):] without the last token, as in
    lm-evaluation-harness: tokens are cut on the left. Of an answer longer than the positions only
    the last ones are predicted.
    """
    whole = np.concatenate([request.context, request.answer])[-(positions + 1) :]
    inputs = whole[:-1] if len(request.answer) else whole[-positions:]
    return inputs, min(len(request.answer), len(inputs))

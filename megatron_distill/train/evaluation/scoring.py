"""Scores and texts of evaluated models, from a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix

import torch

from megatron_distill.evaluation.requests import (
    GREEDY,
    Interrupted,
    Request,
    Score,
    WrittenText,
    model_input,
)
from megatron_distill.models.generation.batches import PREFILL_POSITIONS
from megatron_distill.models.generation.families import saves_enough
from megatron_distill.models.generation.model import CachedGPT
from megatron_distill.models.generation.request import Sampling, ScoreRow, Stops, WriteRow
from megatron_distill.runtime.collectives import any_rank

__all__ = ["ModelScorer", "ModelWriter"]

Ids = tuple[int, ...]


@dataclass(frozen=True)
class ModelScorer:
    """Scores answers with a model in any layout; see `Scorer`.

    A context is read once for all of its answers. A common beginning of many contexts, such as the
    examples of a subject, is read once too.

    Attributes:
        positions: longest input in tokens.
        batch_tokens: new positions of one pass.
        stop_requested: whether this rank has been asked to stop.
    """

    model: CachedGPT
    positions: int
    batch_tokens: int
    stop_requested: Callable[[], bool] = lambda: False

    def score(
        self, requests: Sequence[Request], *, advanced: Callable[[int], None] | None = None
    ) -> list[Score]:
        """Return the scores; see `Scorer`.

        Collective: those of `CachedGPT.score`, and now and then one all-reduce of 8 bytes in the
        world.
        """
        rows = _rows(requests, self.positions)

        def look(share: float) -> None:
            groups = self.model.groups
            if any_rank(self.stop_requested(), device=self.model.device, group=groups.world):
                raise Interrupted
            if advanced is not None:
                advanced(int(share * len(requests)))

        asked = [
            ScoreRow(context, tuple(answer for answer, _ in answers)) for context, answers in rows
        ]
        found = [Score(0.0, True)] * len(requests)  # of empty answers
        scored = self.model.score(asked, batch_positions=self.batch_tokens, between=look)
        for (_, answers), scores in zip(rows, scored, strict=True):
            for (_, numbers), score in zip(answers, scores, strict=True):
                for number in numbers:
                    found[number] = Score(score.log_prob, score.is_greedy)
        if advanced is not None:
            advanced(len(requests))
        return found


def _rows(
    requests: Sequence[Request], positions: int
) -> list[tuple[Ids, list[tuple[Ids, list[int]]]]]:
    """Return the contexts, the answers of each, and the requests that ask for each of them.

    In an order that does not depend on that of the requests. An empty answer needs no row.
    """
    rows: dict[Ids, dict[Ids, list[int]]] = {}
    for number, request in enumerate(requests):
        if not len(request.answer):
            continue
        tokens, count = model_input(request, positions)
        context = tuple(tokens[: len(tokens) - count + 1].tolist())
        answer = tuple(request.answer[-count:].tolist())
        rows.setdefault(context, {}).setdefault(answer, []).append(number)
    return [(context, sorted(answers.items())) for context, answers in sorted(rows.items())]


def _shared_beginning(prompts: Sequence[tuple[int, ...]], limit: int) -> tuple[int, ...]:
    """Return the ids with which all prompts begin if it pays to compute them once.

    Each row has a token of its own. limit: of the ids that are written.
    """
    shared = commonprefix([prompt[:-1] for prompt in prompts])
    saved = (len(prompts) - 1) * len(shared)
    whole = sum(map(len, prompts)) + len(prompts) * limit
    return tuple(shared) if saved and saves_enough(saved, whole) else ()


@dataclass(frozen=True)
class ModelWriter:
    """Continues prompts with a model in any layout; see `Writer`.

    Attributes:
        model: with the text of ids, which stop strings need.
        rows: prompts of one call of the model.
        batch_tokens: new positions of one pass.
        stop_requested: whether this rank has been asked to stop; once true, it stays so.
    """

    model: CachedGPT
    rows: int = 256
    batch_tokens: int = PREFILL_POSITIONS
    stop_requested: Callable[[], bool] = lambda: False

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
        """Return the texts; see `Writer`. A long beginning that all prompts share is computed once.

        Collective: those of `CachedGPT.write`, and per `rows` one all-reduce of 8 bytes.
        """
        found: list[WrittenText] = []
        ends = Stops(ids=stop_ids, strings=stops)
        numbers = range(len(prompts)) if samples is None else samples
        self._raise_if_stopped()
        for first in range(0, len(prompts), self.rows):
            part = [tuple(prompt) for prompt in prompts[first : first + self.rows]]
            shared = _shared_beginning(part, limit)
            rows = [
                WriteRow(prompt[len(shared) :], numbers[first + place], limit)
                for place, prompt in enumerate(part)
            ]
            written = self.model.write(
                rows,
                sampling=sampling,
                stops=ends,
                prefix=shared,
                stop_requested=self.stop_requested,
                batch_positions=self.batch_tokens,
            )
            self._raise_if_stopped()  # the texts of some ranks may have ended early
            found += [WrittenText(one.text or "", one.ended == "length") for one in written]
            if advanced is not None:
                advanced(len(found))
        return found

    def _raise_if_stopped(self) -> None:
        device: torch.device = self.model.device
        if any_rank(self.stop_requested(), device=device, group=self.model.groups.world):
            raise Interrupted

"""Log-probabilities of answers: contexts once, answers as continuations, logits in chunks.

Shapes: N positions, A pairs of a position and a token, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.models.generation.attend import step_for
from megatron_distill.models.generation.batches import RankBatches, RowSize
from megatron_distill.models.generation.cache import Cache, integers
from megatron_distill.models.generation.request import AnswerScore
from megatron_distill.models.generation.stage import Stage
from megatron_distill.ops.target_scores import target_scores
from megatron_distill.runtime.collectives import highest
from megatron_distill.runtime.groups import Groups

__all__ = ["Found", "Looks", "Scoring", "TokensToScore", "score_batch", "shared_scores"]


@dataclass
class TokensToScore:
    """Tokens to score, each after a position of a step; owner: (row of the request, answer)."""

    positions: list[int]
    tokens: list[int]
    owners: list[tuple[int, int]]

    @classmethod
    def empty(cls) -> TokensToScore:
        """No tokens."""
        return cls([], [], [])

    def add(self, position: int, token: int, owner: tuple[int, int]) -> None:
        """Add a token."""
        self.positions.append(position)
        self.tokens.append(token)
        self.owners.append(owner)


Found = tuple[Tensor | None, TokensToScore]
"""fp64 [2, A] on the last stage, log-probabilities and whether each token was the likeliest."""


@dataclass(frozen=True)
class Scoring:
    """Contexts, after their prefix, and the answers of each.

    A row whose only longer answer is one is read in one piece with it. Otherwise the context is
    read once, and each longer answer continues a copy of its keys and values.

    Attributes:
        numbers: of the rows in the request.
    """

    numbers: Sequence[int]
    contexts: Sequence[tuple[int, ...]]
    answers: Sequence[tuple[tuple[int, ...], ...]]

    @cached_property
    def joined(self) -> list[int | None]:
        """Of each row the answer that is read with the context; None: none."""
        found = []
        for answers in self.answers:
            longer = [index for index, answer in enumerate(answers) if len(answer) > 1]
            found.append(longer[0] if len(longer) == 1 else None)
        return found

    def given(self, row: int) -> tuple[int, ...]:
        """Return the ids of a row's first step."""
        joined = self.joined[row]
        if joined is None:
            return self.contexts[row]
        return (*self.contexts[row], *self.answers[row][joined][:-1])

    def continued(self, row: int) -> list[int]:
        """Return the answers that are read after the context."""
        if self.joined[row] is not None:
            return []
        return [index for index, answer in enumerate(self.answers[row]) if len(answer) > 1]

    @cached_property
    def sizes(self) -> list[RowSize]:
        """The positions of each row."""
        found = []
        for row in range(len(self.contexts)):
            later = [len(self.answers[row][index]) - 1 for index in self.continued(row)]
            found.append(RowSize(len(self.given(row)), max(later, default=0), sum(later)))
        return found

    @property
    def most_copies(self) -> int:
        """The most caches that a row needs at the same time: none if nothing is continued."""
        most = max((len(self.continued(row)) for row in range(len(self.contexts))), default=0)
        return most + 1 if most else 0


@dataclass
class Looks:
    """Calls of a function between batches, in the same number on every rank.

    A call makes pipeline stages wait for each other, so there are several batches from one to the
    next.

    Attributes:
        most: calls of the rank with the most batches.
    """

    call: Callable[[float], None] | None
    most: int
    pace: int
    batches: int = 0
    calls: int = 0

    @classmethod
    def of(
        cls,
        call: Callable[[float], None] | None,
        batches: int,
        groups: Groups,
        device: torch.device,
    ) -> Looks:
        """Plan the calls of `batches` on this rank.

        Collective: with a function, one all-reduce of 8 bytes in the world.
        """
        stages = groups.pipeline.size()
        pace = 1 if stages == 1 else 4 * stages
        most = 0
        if call is not None:
            (most,) = highest(-(-batches // pace), device=device, group=groups.world)
        return cls(call, most, pace)

    def before_batch(self) -> None:
        """Count a batch, and call the function where it is time."""
        if self.batches % self.pace == 0:
            self._next()
        self.batches += 1

    def finish(self) -> None:
        """Make the calls of ranks that have more batches."""
        while self.calls < self.most:
            self._next()

    def _next(self) -> None:
        if self.call is not None:
            self.call(self.calls / self.most)
            self.calls += 1


def shared_scores(
    found: Sequence[Found],
    answers: Sequence[Sequence[object]],
    groups: Groups,
    device: torch.device,
) -> tuple[dict[int, tuple[AnswerScore, ...]], bool]:
    """Return this data rank's scores by row on all its stages, and whether one is not finite.

    `answers`: of each row of the request.

    Collective: pipeline group, one broadcast of 16 bytes per token.
    """
    count = sum(len(pairs.tokens) for _, pairs in found)
    values = torch.zeros(2, count, dtype=torch.float64, device=device)
    if groups.is_last_stage and count:
        values = torch.cat([part for part, _ in found if part is not None], 1)
    if groups.pipeline.size() > 1:
        dist.broadcast(values, group=groups.pipeline, group_src=groups.pipeline.size() - 1)
    owners = [owner for _, pairs in found for owner in pairs.owners]
    numbers: list[list[float]] = values.tolist()  # the one look at the device
    log_probs: dict[tuple[int, int], list[float]] = {}
    greedy: dict[tuple[int, int], bool] = {}
    for owner, log_prob, is_top in zip(owners, *numbers, strict=True):
        log_probs.setdefault(owner, []).append(log_prob)
        greedy[owner] = greedy.get(owner, True) and is_top > 0
    is_broken = not all(math.isfinite(value) for row in numbers for value in row)
    scores = {
        row: tuple(
            AnswerScore(tuple(log_probs[row, index]), greedy[row, index])
            for index in range(len(answers[row]))
        )
        for row in dict.fromkeys(row for row, _ in owners)
    }
    return scores, is_broken


def score_batch(
    scoring: Scoring,
    stage: Stage,
    plan: RankBatches,
    number: int,
    empty_cache: Callable[[int, int], Cache],
) -> list[Found]:
    """Score the rows of this rank's batch `number`, one group after the other, in its steps."""
    found = []
    in_step = len(plan.everyone) > 1
    for place, rows in enumerate(plan.mine[number]):
        given = [scoring.given(row) for row in rows]
        copies = [(row, index) for row in rows for index in scoring.continued(row)]
        slots = 0  # keys and values are stored for continuations alone
        if copies:
            slots = max(map(len, given)) + max(
                len(scoring.answers[row][index]) - 1 for row, index in copies
            )
        cache = empty_cache(max(1, len(rows)), slots)
        least = 0
        if in_step:
            least = plan.largest(
                number,
                place,
                lambda others: max(1, sum(len(scoring.given(row)) for row in others)),
            )
        found.append(_run(stage, cache, given, _first_pairs(scoring, rows), least))
        if in_step:
            least = plan.largest(number, place, lambda others: _continued(scoring, others))
        if copies or (in_step and least):
            if copies:
                cache = cache.select([rows.index(row) for row, _ in copies])
            ids = [scoring.answers[row][index][:-1] for row, index in copies]
            found.append(_run(stage, cache, ids, _later_pairs(scoring, copies), least))
        del cache  # before the next one is allocated
    return found


def _continued(scoring: Scoring, rows: Sequence[int]) -> int:
    return sum(
        len(scoring.answers[row][index]) - 1 for row in rows for index in scoring.continued(row)
    )


def _first_pairs(scoring: Scoring, rows: Sequence[int]) -> TokensToScore:
    """Return the first token of each answer, and all of an answer that is read with its context."""
    pairs, start = TokensToScore.empty(), 0
    for row in rows:
        last = start + len(scoring.contexts[row]) - 1
        for index, answer in enumerate(scoring.answers[row]):
            tokens = answer if index == scoring.joined[row] else answer[:1]
            for offset, token in enumerate(tokens):
                pairs.add(last + offset, token, (scoring.numbers[row], index))
        start += len(scoring.given(row))
    return pairs


def _later_pairs(scoring: Scoring, copies: Sequence[tuple[int, int]]) -> TokensToScore:
    """Return all but the first token of the answers that continue a copy of their context."""
    pairs, start = TokensToScore.empty(), 0
    for row, index in copies:
        answer = scoring.answers[row][index]
        for offset, token in enumerate(answer[1:]):
            pairs.add(start + offset, token, (scoring.numbers[row], index))
        start += len(answer) - 1
    return pairs


def _run(
    stage: Stage, cache: Cache, ids: Sequence[Sequence[int]], pairs: TokensToScore, least: int
) -> Found:
    """Run rows through the model; `least`: positions of the step, padding included."""
    if not ids:  # a row that only keeps the ranks in step
        ids = [(0,)] + [()] * (cache.rows - 1)
    flat = [token for row in ids for token in row]
    padding = max(0, least - len(flat))
    ids_N = integers(flat + [0] * padding, stage.device)
    step = step_for(cache, [len(row) for row in ids], padding)
    hidden_NH = None
    for number in range(len(stage.chunks)):
        hidden_NH = stage.run(number, ids_N, step)
    step.finish()
    return None if hidden_NH is None else _scored(stage, hidden_NH, pairs), pairs


def _scored(stage: Stage, hidden_NH: Tensor, pairs: TokensToScore) -> Tensor:
    """Return fp64 [2, A]: log-probabilities, and whether each token is the likeliest.

    Collective: that of `target_scores`, 12 bytes per position with a token and 8 per token.
    """
    if not pairs.tokens:
        return torch.zeros(2, 0, dtype=torch.float64, device=stage.device)
    index_P, row_A = np.unique(pairs.positions, return_inverse=True)
    order = row_A.argsort(kind="stable").tolist()
    order_A = integers(order, stage.device)
    scores = target_scores(
        stage.states(hidden_NH[integers(index_P.tolist(), stage.device)]),
        stage.shard,
        stage.groups.tensor,
        rows=row_A[order].tolist(),
        ids=integers([pairs.tokens[place] for place in order], stage.device),
    )
    found = torch.empty(2, len(pairs.tokens), dtype=torch.float64, device=stage.device)
    found[:, order_A] = torch.stack([scores.log_prob, scores.is_greedy.double()])
    return found

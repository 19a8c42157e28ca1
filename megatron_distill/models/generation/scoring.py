"""Log-probabilities of answers: contexts once, answers as continuations, logits in blocks.

Shapes: N positions, P positions with a logit, A pairs of such a position and a token, H hidden
size, V real columns of the head on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.models.generation.attend import step_for
from megatron_distill.models.generation.batches import Plan, RowSize
from megatron_distill.models.generation.cache import Cache
from megatron_distill.models.generation.request import Score
from megatron_distill.models.generation.stage import Stage
from megatron_distill.runtime.groups import Groups

__all__ = ["Pairs", "Scoring", "score_batches"]

_LOGIT_BYTES = 2**26  # of one block of logits in fp32


@dataclass
class Pairs:
    """Tokens to score, each after a position of a step; `owner` (row, answer) of each token."""

    positions: list[int]
    tokens: list[int]
    owners: list[tuple[int, int]]

    @classmethod
    def empty(cls) -> Pairs:
        """No tokens."""
        return cls([], [], [])

    def add(self, position: int, token: int, owner: tuple[int, int]) -> None:
        """Add a token."""
        self.positions.append(position)
        self.tokens.append(token)
        self.owners.append(owner)


@dataclass(frozen=True)
class Scoring:
    """Contexts and the answers of each.

    A row whose only longer answer is one is read in one piece with it. Otherwise the context is
    read once, and each longer answer continues a copy of its keys and values.
    """

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
        return [
            RowSize(
                len(self.given(row)),
                max(
                    (len(self.answers[row][index]) - 1 for index in self.continued(row)), default=0
                ),
            )
            for row in range(len(self.contexts))
        ]

    @property
    def most_copies(self) -> int:
        """The most caches that a row needs at the same time."""
        return 1 + max((len(self.continued(row)) for row in range(len(self.contexts))), default=0)

    def shared(
        self, found: list[tuple[Tensor | None, Pairs]], groups: Groups, device: torch.device
    ) -> tuple[dict[int, tuple[Score, ...]], bool]:
        """Return this data rank's scores on all its stages, and whether one is no number.

        Collective: pipeline group, one broadcast of 16 bytes per token.
        """
        count = sum(len(pairs.tokens) for _, pairs in found)
        values = torch.zeros(2, count, dtype=torch.float64, device=device)
        if groups.is_last_stage and count:
            values = torch.cat([part for part, _ in found if part is not None], 1)
        if groups.pipeline.size() > 1:
            dist.broadcast(values, group=groups.pipeline, group_src=groups.pipeline.size() - 1)
        owners = [owner for _, pairs in found for owner in pairs.owners]
        log_probs: dict[tuple[int, int], list[float]] = {}
        greedy: dict[tuple[int, int], bool] = {}
        for owner, log_prob, is_top in zip(owners, *values.tolist(), strict=True):
            log_probs.setdefault(owner, []).append(log_prob)
            greedy[owner] = greedy.get(owner, True) and is_top > 0
        is_broken = not bool(torch.isfinite(values).all())
        scores = {
            row: tuple(
                Score(tuple(log_probs[row, index]), greedy[row, index])
                for index in range(len(self.answers[row]))
            )
            for row in dict.fromkeys(row for row, _ in owners)
        }
        return scores, is_broken


def score_batches(
    scoring: Scoring, stage: Stage, plan: Plan, empty_cache: Callable[[int, int], Cache]
) -> list[tuple[Tensor | None, Pairs]]:
    """Score the rows of this rank's batches, one group after the other.

    Returns for each step fp64 [2, A], log-probabilities and whether a token was the likeliest, on
    the last stage, None elsewhere; and its pairs.
    """
    found = []
    in_step = len(plan.everyone) > 1
    for number, batch in enumerate(plan.mine):
        for place, rows in enumerate(batch):
            given = [scoring.given(row) for row in rows]
            copies = [(row, index) for row in rows for index in scoring.continued(row)]
            most = max((len(scoring.answers[row][index]) - 1 for row, index in copies), default=1)
            cache = empty_cache(max(1, len(rows)), max(map(len, given), default=1) + most)
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


def _first_pairs(scoring: Scoring, rows: Sequence[int]) -> Pairs:
    """Return the first token of each answer, and all of an answer that is read with its context."""
    pairs, start = Pairs.empty(), 0
    for row in rows:
        last = start + len(scoring.contexts[row]) - 1
        for index, answer in enumerate(scoring.answers[row]):
            tokens = answer if index == scoring.joined[row] else answer[:1]
            for offset, token in enumerate(tokens):
                pairs.add(last + offset, token, (row, index))
        start += len(scoring.given(row))
    return pairs


def _later_pairs(scoring: Scoring, copies: Sequence[tuple[int, int]]) -> Pairs:
    """Return all but the first token of the answers that continue a copy of their context."""
    pairs, start = Pairs.empty(), 0
    for row, index in copies:
        answer = scoring.answers[row][index]
        for offset, token in enumerate(answer[1:]):
            pairs.add(start + offset, token, (row, index))
        start += len(answer) - 1
    return pairs


def _run(
    stage: Stage, cache: Cache, ids: Sequence[Sequence[int]], pairs: Pairs, least: int
) -> tuple[Tensor | None, Pairs]:
    """Run rows through the model; `least`: positions of the step, padding included."""
    if not ids:  # a row that only keeps the ranks in step
        ids = [(0,)] + [()] * (cache.rows - 1)
    flat = [token for row in ids for token in row]
    padding = max(0, least - len(flat))
    ids_N = torch.tensor(flat + [0] * padding, dtype=torch.int64, device=stage.device)
    step = step_for(cache, [len(row) for row in ids], padding)
    hidden_NH = None
    for number in range(len(stage.chunks)):
        hidden_NH = stage.run(number, ids_N, step)
    step.finish()
    return None if hidden_NH is None else _scored(stage, hidden_NH, pairs), pairs


def _scored(stage: Stage, hidden_NH: Tensor, pairs: Pairs) -> Tensor:
    """Return fp64 [2, A]: log-probabilities, and whether each token is the likeliest.

    The likeliest is the one with the largest logit, the lowest id among equals.

    Collective: tensor group, per block of positions an all-gather of 24 bytes per position and an
    all-reduce of 8 bytes per pair.
    """
    places: dict[int, int] = {}
    for position in pairs.positions:
        places.setdefault(position, len(places))
    if not places:
        return torch.zeros(2, 0, dtype=torch.float64, device=stage.device)
    index_P = torch.tensor(list(places), device=stage.device)
    row_A = torch.tensor([places[position] for position in pairs.positions], device=stage.device)
    token_A = torch.tensor(pairs.tokens, device=stage.device)
    block = max(1, _LOGIT_BYTES // (4 * max(1, stage.shard.width)))
    found = torch.empty(2, len(pairs.tokens), dtype=torch.float64, device=stage.device)
    for start in range(0, len(places), block):
        logits_PV = stage.logits(hidden_NH[index_P[start : start + block]])
        chosen = ((row_A >= start) & (row_A < start + block)).nonzero().squeeze(1)
        found[:, chosen] = _of_block(stage, logits_PV, row_A[chosen] - start, token_A[chosen])
    return found


def _of_block(stage: Stage, logits_PV: Tensor, row_A: Tensor, token_A: Tensor) -> Tensor:
    shard, group = stage.shard, stage.groups.tensor
    rows = logits_PV.shape[0]
    mine_P3 = torch.full((rows, 3), -float("inf"), dtype=torch.float64, device=logits_PV.device)
    if logits_PV.shape[1]:
        top_P, column_P = logits_PV.max(1)
        parts = (logits_PV.logsumexp(1), top_P, column_P + shard.start)
        mine_P3 = torch.stack([part.to(torch.float64) for part in parts], 1)
    local_A = token_A - shard.start
    is_mine_A = (local_A >= 0) & (local_A < logits_PV.shape[1])
    flat = logits_PV.flatten()
    if flat.numel():
        own_A = flat[row_A * logits_PV.shape[1] + local_A.masked_fill(~is_mine_A, 0)]
    else:
        own_A = torch.zeros_like(token_A, dtype=torch.float32)
    own_A = own_A.to(torch.float64).masked_fill(~is_mine_A, 0.0)
    if group.size() == 1:
        total_P, top_id_P = mine_P3[:, 0], mine_P3[:, 2]
    else:
        ranks = [torch.empty_like(mine_P3) for _ in range(group.size())]
        dist.all_gather(ranks, mine_P3, group=group)
        ranks_tP3 = torch.stack(ranks)
        total_P = ranks_tP3[..., 0].logsumexp(0)
        best_P = ranks_tP3[..., 1].argmax(0)  # the first of equal ones has the lowest ids
        top_id_P = ranks_tP3[..., 2].gather(0, best_P[None])[0]
        dist.all_reduce(own_A, group=group)
    is_top_A = top_id_P[row_A].to(torch.int64) == token_A
    return torch.stack([own_A - total_P[row_A], is_top_A.to(torch.float64)])

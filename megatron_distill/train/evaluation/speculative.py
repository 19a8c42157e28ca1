"""Speculative decoding with a student that drafts and a teacher that verifies.

It measures the tokens per verification. In one block the student drafts g tokens, and one pass of
the teacher reads them. A drafted token y is accepted with probability min(1, p(y) / q(y)); the
first rejected one is replaced by a draw from max(p - q, 0). After g accepted ones the teacher draws
one more (Leviathan et al., arXiv 2211.17192, algorithm 1). So the text follows the teacher's
distribution p. Greedily a token is accepted if it is the teacher's likeliest.

With r_i = min(1, p(y_i) / q(y_i)) and a_i = sum min(p, q) at each drafted position, the mean of

    1 + a_1 + r_1 a_2 + ... + r_1 ... r_(g-1) a_g

over drafts is the expected number of tokens, exactly: r_1 ... r_(i-1) is the probability that the
block reaches position i, and a_i that it goes on.

Shapes: b rows, g drafted tokens, H hidden size, V real columns of the head on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import fsum, sqrt
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses.comparison import compare_with_logits
from megatron_distill.models.generation.attend import reading
from megatron_distill.models.generation.batches import RowSize, batches_of
from megatron_distill.models.generation.cache import integers
from megatron_distill.models.generation.draw import draw, draw_keys, gumbel_noise, row_key
from megatron_distill.models.generation.model import CachedGPT
from megatron_distill.models.generation.request import Sampling
from megatron_distill.models.gpt import vocab_shard
from megatron_distill.ops.log_softmax import log_normalizer
from megatron_distill.ops.target_scores import target_scores
from megatron_distill.runtime.collectives import highest
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.evaluation.reader import Reader
from megatron_distill.train.evaluation.text_sums import ratio_of_sums

__all__ = ["RULES", "AcceptanceRule", "DraftedBlock", "Speculated", "block_figures", "speculate"]

AcceptanceRule = Literal["sampled", "greedy"]
RULES: tuple[AcceptanceRule, ...] = ("sampled", "greedy")
Purpose = Literal["draft", "accept", "replace"]

_PURPOSES: tuple[Purpose, ...] = ("draft", "accept", "replace")
_GREEDY, _SAMPLED = Sampling(), Sampling(temperature=1.0)
_GIB = 2**30


@dataclass(frozen=True)
class DraftedBlock:
    """Tokens of one verification, and their expected number; the same in greedy decoding."""

    tokens: int
    expected: float


@dataclass(frozen=True)
class Speculated:
    """The written ids of a row, and its blocks; the last block may have gone past the end."""

    ids: tuple[int, ...]
    blocks: tuple[DraftedBlock, ...]


def block_figures(texts: Sequence[Speculated], rule: AcceptanceRule) -> dict[str, float]:
    """Return the mean tokens per verification over all blocks, measured and expected.

    Their standard errors are over the texts, see `ratio_of_sums`; one text has none. `stderr` is
    that of the difference over the blocks, whose differences are uncorrelated with mean zero. In
    greedy decoding it is that of the measured mean.
    """
    blocks = [block for text in texts for block in text.blocks]
    if not blocks:
        return {"blocks": 0}
    own = [text.blocks for text in texts if text.blocks]
    found: dict[str, float] = {"blocks": len(blocks), "texts": len(own)}
    found |= _mean(own, "tokens_per_verification", lambda block: block.tokens)
    if rule == "greedy":
        error = found.get("tokens_per_verification_stderr")
        return found if error is None else found | {"stderr": error}
    found |= _mean(own, "expected", lambda block: block.expected)
    gaps = [block.tokens - block.expected for block in blocks]
    mean = fsum(gaps) / len(gaps)
    variance = fsum((gap - mean) ** 2 for gap in gaps) / max(1, len(gaps) - 1)
    return found | {"stderr": sqrt(variance / len(gaps))}


def _mean(
    texts: Sequence[Sequence[DraftedBlock]], name: str, of: Callable[[DraftedBlock], float]
) -> dict[str, float]:
    """Return a mean over the blocks, and its standard error over the texts if there are two."""
    sums = np.array([fsum(map(of, blocks)) for blocks in texts])
    mean, error = ratio_of_sums(sums, np.array([float(len(blocks)) for blocks in texts]))
    return {name: mean} if error is None else {name: mean, f"{name}_stderr": error}


@reading
def speculate(
    teacher: CachedGPT,
    student: CachedGPT,
    prompts: Sequence[Sequence[int]],
    *,
    draft: int,
    tokens: int,
    rule: AcceptanceRule,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
) -> list[Speculated]:
    """Continue prompts of one id at least by at most `tokens` ids, in blocks of `draft`.

    Both models have the same tokens and layout. All ranks call it together, and get the same texts.
    The data and context ranks share the prompts; where experts are spread over them, all read every
    prompt together. A prompt without room for a block in the positions of both models has none.

    Collective: those of `Stage.run` for each draft and verification. Tensor group, per drafted
    token 32 bytes of `draw`, those of `compare_with_logits` and 20 of `target_scores`, per block 64
    bytes per row. Pipeline group, 8 bytes per drafted token and 24 per row and block; at the end
    the texts over the data x context group.
    """
    groups, device = student.groups, student.device
    in_step = groups.layout.expert > 1
    ranks = groups.data_context
    numbers = list(range(len(prompts))) if in_step else _dealt(len(prompts), ranks)
    run = _Speculation.of(teacher, student, draft=draft, rule=rule, seed=seed, in_step=in_step)
    most = min(teacher.positions, student.positions) - draft - 1
    rows = [
        _DraftedText(
            number, list(prompts[number]), min(tokens, most - len(prompts[number])), stop_ids
        )
        for number in numbers
    ]
    able = sorted((row for row in rows if row.limit > 0), key=lambda row: -len(row.ids))
    slots = max((len(row.ids) + row.limit for row in able), default=0) + draft + 1
    models = (run.teacher, run.student)
    caches, copy = sum(x.position_bytes for x in models), max(x.layer_bytes for x in models)
    (row_bytes,) = highest(slots * (caches + copy), device=device, group=groups.pipeline)
    batches = batches_of(
        [RowSize(len(row.ids), row.limit) for row in able],
        range(len(able)),
        row_bytes=lambda *_: row_bytes,
        cache_bytes=student.cache_gib * _GIB,
    )
    for batch in batches:
        run.write([able[place] for place in batch], slots)
    run.finish()
    own = {row.number: row.speculated() for row in rows}
    shared: list[dict[int, Speculated] | None] = [None] * ranks.size()
    dist.all_gather_object(shared, own, group=ranks)
    merged = {number: text for part in shared if part for number, text in part.items()}
    return [merged[number] for number in range(len(prompts))]


def _dealt(count: int, ranks: dist.ProcessGroup) -> list[int]:
    return list(range(ranks.rank(), count, ranks.size()))


@dataclass
class _DraftedText:
    """A text so far, and its blocks."""

    number: int
    ids: list[int]
    limit: int
    stop_ids: Sequence[int]
    blocks: list[DraftedBlock] = field(default_factory=list)
    is_over: bool = False

    def __post_init__(self) -> None:
        self._given = len(self.ids)

    def push(self, ids: Sequence[int], expected: float) -> None:
        """Add the tokens of a block, up to a stop id or the limit."""
        self.blocks.append(DraftedBlock(len(ids), expected))
        for token in ids:
            self.ids.append(token)
            if token in self.stop_ids or len(self.ids) - self._given >= self.limit:
                self.is_over = True
                return

    def speculated(self) -> Speculated:
        """Return the text."""
        return Speculated(tuple(self.ids[self._given :]), tuple(self.blocks))


@dataclass(frozen=True)
class _Speculation:
    teacher: Reader
    student: Reader
    groups: Groups
    device: torch.device
    draft: int
    rule: AcceptanceRule
    seed: int
    in_step: bool

    @classmethod
    def of(
        cls,
        teacher: CachedGPT,
        student: CachedGPT,
        *,
        draft: int,
        rule: AcceptanceRule,
        seed: int,
        in_step: bool,
    ) -> _Speculation:
        groups = student.groups
        shard = vocab_shard(student.architecture, groups, tokens=student.vocab_size)
        return cls(
            Reader.of(teacher, shard),
            Reader.of(student, shard),
            groups,
            student.device,
            draft,
            rule,
            seed,
            in_step,
        )

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        for reader in (self.teacher, self.student):
            reader.stage.finish()

    def write(self, rows: list[_DraftedText], slots: int) -> None:
        """Write a batch of rows to their ends."""
        for reader in (self.teacher, self.student):
            reader.begin([row.ids[:-1] for row in rows], slots)
        while rows:
            drafted_bg, hidden = self._drafted(rows)
            given = [
                [row.ids[-1], *ids] for row, ids in zip(rows, drafted_bg.tolist(), strict=True)
            ]
            verified = self.teacher.read(given)
            verdict_b3 = torch.empty(len(rows), 3, dtype=torch.float64, device=self.device)
            if verified is not None:
                hidden_bgH = torch.stack(hidden, 1)
                verified_bgH = verified.view(len(rows), self.draft + 1, -1)
                verdict_b3 = self._verdict(rows, drafted_bg, hidden_bgH, verified_bgH)
            lost = []
            for row, ids, (count, token, expected) in zip(
                rows, drafted_bg.tolist(), self._agreed(verdict_b3).tolist(), strict=True
            ):
                lost.append(self.draft - int(count))
                row.push([*ids[: int(count)], int(token)], expected)
            alive = [place for place, row in enumerate(rows) if not row.is_over]
            if alive:
                for reader in (self.teacher, self.student):
                    reader.reduce_to(alive)
                    reader.drop_last([lost[place] for place in alive])
            rows = [rows[place] for place in alive]

    def _drafted(self, rows: Sequence[_DraftedText]) -> tuple[Tensor, list[Tensor]]:
        """Return the student's drafts [b, g], and its state [b, H] before each on the last stage.

        The student reads the last draft too, so that both caches have the same positions.
        """
        ids_b = integers([row.ids[-1] for row in rows], self.device)
        drafted: list[Tensor] = []
        hidden: list[Tensor] = []
        for place in range(self.draft + 1):
            hidden_bH = self.student.read_next(ids_b)
            if place == self.draft:
                break
            if hidden_bH is not None:
                hidden.append(hidden_bH)
                ids_b = self._drawn(
                    self.student.stage.logits(hidden_bH), self._keys(rows, "draft", place)
                )
            ids_b = self._agreed(ids_b.clone())
            drafted.append(ids_b)
        return torch.stack(drafted, 1), hidden

    def _keys(self, rows: Sequence[_DraftedText], purpose: Purpose, ahead: int | Tensor) -> Tensor:
        """Return the keys of a purpose's draws, `ahead` of the next position of each row.

        The draws of different purposes are independent.
        """
        stream, count = _PURPOSES.index(purpose), len(_PURPOSES)
        keys = [row_key(self.seed, row.number * count + stream) for row in rows]
        positions_b = integers([len(row.ids) for row in rows], self.device)
        return draw_keys(integers(keys, self.device), positions_b + ahead)

    def _drawn(self, logits_bV: Tensor, keys_b: Tensor) -> Tensor:
        sampling = _GREEDY if self.rule == "greedy" else _SAMPLED
        shard, group = self.student.stage.shard, self.groups.tensor
        return draw(logits_bV, shard=shard, group=group, sampling=sampling, keys_b=keys_b).ids_b

    def _agreed(self, values: Tensor) -> Tensor:
        """Return the last stage's values on all stages.

        Collective: pipeline group, one broadcast of the tensor; where experts are spread over data
        ranks, those of the first one go to all.
        """
        if self.in_step and self.groups.is_last_stage:
            dist.broadcast(values, group=self.groups.data_context, group_src=0)
        group = self.groups.pipeline
        if group.size() > 1:
            dist.broadcast(values, group=group, group_src=group.size() - 1)
        return values

    def _verdict(
        self,
        rows: Sequence[_DraftedText],
        drafted_bg: Tensor,
        hidden_bgH: Tensor,
        verified_bgH: Tensor,
    ) -> Tensor:
        """Return the accepted drafts, the token after them, and the expected tokens, fp64 [b, 3].

        verified: of the teacher, with one position more than hidden, of the student.
        """
        count, length = drafted_bg.shape
        labels_n, places = drafted_bg.flatten(), range(count * length)
        index_n = torch.arange(len(places), device=self.device)
        shard, group = self.student.stage.shard, self.groups.tensor
        teacher = self.teacher.stage.states(verified_bgH[:, :-1].flatten(0, 1))
        found = compare_with_logits(
            self.student.stage.states(hidden_bgH.flatten(0, 1)),
            teacher,
            labels_n,
            index_n,
            shard=shard,
            group=group,
        )
        assert found.overlap is not None
        assert found.teacher_top is not None
        own = target_scores(teacher, shard, group, rows=places, ids=labels_n).log_prob
        ratio_bg = (own + found.label_nll).view(count, length)  # log p - log q
        if self.rule == "greedy":
            accepts_bg = found.teacher_top.view(count, length) == drafted_bg
            share_bg = next_bg = accepts_bg.double()
        else:
            draws = [
                gumbel_noise(self._keys(rows, "accept", place), start=0, count=1)
                for place in range(length)
            ]
            uniform_bg = torch.cat(draws, 1).neg_().exp_().neg_().exp_()
            accepts_bg = uniform_bg.log() <= ratio_bg
            share_bg, next_bg = ratio_bg.clamp(max=0.0).exp(), found.overlap.view(count, length)
        reached_bg = torch.cat([torch.ones_like(share_bg[:, :1]), share_bg[:, :-1]], 1).cumprod(1)
        expected_b = 1.0 + (reached_bg * next_bg).sum(1)
        accepted_b = accepts_bg.long().cumprod(1).sum(1)
        token_b = self._next(rows, accepted_b, hidden_bgH, verified_bgH)
        return torch.stack([accepted_b.double(), token_b.double(), expected_b], 1)

    def _next(
        self,
        rows: Sequence[_DraftedText],
        accepted_b: Tensor,
        hidden_bgH: Tensor,
        verified_bgH: Tensor,
    ) -> Tensor:
        """Draw the token after the accepted drafts, int64 [b]."""
        index_b = torch.arange(len(rows), device=self.device)
        teacher_bV = self.teacher.stage.logits(verified_bgH[index_b, accepted_b])
        if self.rule == "greedy":
            return self._drawn(teacher_bV, torch.zeros_like(accepted_b))
        last_b = accepted_b.clamp(max=self.draft - 1)
        student_bV = self.student.stage.logits(hidden_bgH[index_b, last_b])
        group = self.groups.tensor
        p_bV, q_bV = (_probabilities(logits, group) for logits in (teacher_bV, student_bV))
        rest_bV = (p_bV - q_bV).clamp_(min=0.0)
        total_b = rest_bV.sum(1)
        dist.all_reduce(total_b, group=group)
        # After g accepted drafts, and where rounding alone rejected one, the teacher's own draw.
        is_whole_b = (accepted_b == self.draft) | (total_b <= 0.0)
        rest_bV = torch.where(is_whole_b[:, None], p_bV, rest_bV)
        return self._drawn(rest_bV.log().float(), self._keys(rows, "replace", accepted_b))


def _probabilities(logits_bV: Tensor, group: dist.ProcessGroup) -> Tensor:
    logits_bV = logits_bV.double()
    return logits_bV.sub_(log_normalizer(logits_bV, group)[:, None]).exp_()

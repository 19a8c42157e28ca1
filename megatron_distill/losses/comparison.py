"""How two models differ on the same tokens: agreement, divergences, calibration, draft acceptance.

Both models' logits are formed chunk by chunk over the vocabulary shards, in fp64. For teacher
probabilities p and student probabilities q of a token:

    forward KL  sum p log(p / q)      reverse KL  sum q log(q / p)
    overlap     sum min(p, q)         Brier       sum (q - onehot(label))^2
    JS          sum (p log(p / m) + q log(q / m)) / 2,  m = (p + q) / 2
    top-k       share of the k most probable ids of one model that are those of the other, too

The overlap is one less the total variation. It is the probability that speculative sampling accepts
a token that the student drafts (Leviathan et al. 2023, Theorem 3.5).

The most probable ids are chosen among the raw outputs, which the scale and the soft-cap leave in
their order. Ties go to the lowest id.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses.checks import check_columns, check_per_token, resolve_shard
from megatron_distill.ops.log_softmax import log_normalizer
from megatron_distill.ops.row_math import descending
from megatron_distill.ops.topk import select
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import chunk_tokens_for
from megatron_distill.signals import LogitRule, LogitSource, TopK

__all__ = ["TokenComparison", "compare_student", "compare_with_ids", "compare_with_logits"]

# fp64 log-probabilities and probabilities of both models, and two products: as so many matrices of
# a chunk in fp32.
_MATRICES = 12
# Sizes of the sets of most probable ids, and the figures of what the models share of them.
_SHARED = {5: "top5_overlap", 20: "top20_overlap"}


@dataclass(frozen=True)
class TokenComparison:
    """Figures ``[N]`` of each compared token, fp64 and int64 ids, the same on every rank.

    Attributes:
        label_nll: of the student, in nats.
        brier: of the student and the label.
        student_entropy: in nats.
        student_top: the student's most probable id; ties go to the lowest.
        confidence: the student's probability of it.
        is_label: bool, whether it is the label.
        teacher_top: the teacher's most probable id, where there is a teacher.
        overlap: ``sum min(p, q)``, the least it can be where few ids of the teacher are known.
        overlap_most: the most it can be; equal to ``overlap`` where both are known.
        js_divergence: in nats, the least it can be where few ids of the teacher are known.
        js_divergence_most: the most it can be; equal to it where both are known.
        top5_overlap, top20_overlap: share of so many most probable ids, or of the vocabulary if
            that has fewer, that both models have; NaN where fewer ids of the teacher are known.
        forward_kl, reverse_kl: in nats, where both are known.
        teacher_entropy: in nats, where it is known.
    """

    label_nll: Tensor
    brier: Tensor
    student_entropy: Tensor
    student_top: Tensor
    confidence: Tensor
    is_label: Tensor
    teacher_top: Tensor | None = None
    overlap: Tensor | None = None
    overlap_most: Tensor | None = None
    js_divergence: Tensor | None = None
    js_divergence_most: Tensor | None = None
    top5_overlap: Tensor | None = None
    top20_overlap: Tensor | None = None
    forward_kl: Tensor | None = None
    reverse_kl: Tensor | None = None
    teacher_entropy: Tensor | None = None


@dataclass(frozen=True)
class _Read:
    """A model on n tokens: fp64 ``[n, V]`` of this rank's real columns, and top ids ``[n, k]``."""

    log_probs: Tensor
    probs: Tensor
    top_ids: Tensor


@dataclass(frozen=True)
class _Reader:
    """Reads chunks of log-probabilities over this rank's real columns."""

    shard: VocabShard
    group: dist.ProcessGroup | None

    def read(self, source: LogitSource, rows: Tensor, k: int) -> _Read:
        """The rows ``[n]`` of a model, with its k most probable ids."""
        raw = source.outputs(lambda values: values.index_select(0, rows), self.shard.real_width)
        (chosen,) = select(
            raw, LogitRule(), self.shard, self.group, k=k, temperatures=(1.0,), normalised=False
        )
        logits = source.rule.apply_(raw.to(torch.float64, copy=True))
        del raw
        log_probs = logits.sub_(log_normalizer(logits, self.group).unsqueeze(1))
        return _Read(log_probs, log_probs.exp(), chosen.ids)

    def summed(self, local: list[Tensor]) -> list[Tensor]:
        """Sums over the ranks."""
        sums = torch.stack(local)
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        return list(sums.unbind())

    def at(self, log_probs: Tensor, ids: Tensor) -> Tensor:
        """This rank's share of the log-probabilities ``[n, K]`` at ids; their sum is whole."""
        if not self.shard.real_width:
            return torch.zeros(ids.shape, dtype=log_probs.dtype, device=log_probs.device)
        found = log_probs.gather(1, self.shard.local(ids))
        return found.masked_fill(~self.shard.owns(ids), 0.0)

    def most(self, known: int) -> int:
        """The most ids that `_shared` compares where so many of the teacher are known."""
        sizes = [min(k, self.shard.size) for k in _SHARED]
        return max([k for k in sizes if k <= known], default=1)


def compare_with_logits(
    student: LogitSource,
    teacher: LogitSource,
    labels: Tensor,
    rows: Tensor,
    *,
    shard: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int | None = None,
) -> TokenComparison:
    """Compare two models with logits on the tokens ``rows``.

    Shapes: labels ``[N]`` int64 global ids, rows ``[n]`` int64 -> figures ``[n]``. No gradient.

    Collective: over ``group`` per token and model one all-gather of 16 bytes for the normaliser and
    one of 8 per top id and 8 more (twice that of fp64 logits). Also one all-reduce of 72 bytes.

    Raises:
        ValueError: shapes, shard or group do not fit together.
    """
    reader, chunk_tokens = _prepared(student, labels, shard, group, chunk_tokens)
    check_columns(teacher.width, reader.shard, group)

    def of(chunk: Tensor) -> dict[str, Tensor]:
        most = reader.most(reader.shard.size)
        own, given = reader.read(student, chunk, most), reader.read(teacher, chunk, most)
        alone = _sums_of_one(reader, own, labels[chunk])
        between = _sums_of_both(own, given)
        figures, sums = _of_student(reader, own, labels[chunk], [*alone, *between])
        forward, reverse, entropy, overlap, divergence = sums
        return figures | {
            "teacher_top": given.top_ids[:, 0],
            "overlap": overlap,
            "overlap_most": overlap,
            "js_divergence": divergence,
            "js_divergence_most": divergence,
            "forward_kl": forward,
            "reverse_kl": reverse,
            "teacher_entropy": entropy,
            **_shared(own.top_ids, given.top_ids, reader.shard.size),
        }

    return _in_chunks(of, rows, chunk_tokens)


def compare_with_ids(
    student: LogitSource,
    teacher: TopK,
    labels: Tensor,
    rows: Tensor,
    *,
    shard: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int | None = None,
) -> TokenComparison:
    """Compare the student with the teacher's probabilities of a few ids, at temperature one.

    As `compare_with_logits`. The overlap lies between its sum over the ids, and that sum with the
    smaller of both models' remaining masses. The Jensen-Shannon divergence is least if all further
    ids are like one, and at most what it is if no further id has a probability of both models.

    Collective: over ``group`` per token one all-gather of 16 bytes for the normaliser, and one of 8
    per top id and 8 more. Also one all-reduce of 32 bytes and 8 per id.

    Raises:
        ValueError: as `compare_with_logits`.
    """
    reader, chunk_tokens = _prepared(student, labels, shard, group, chunk_tokens)

    def of(chunk: Tensor) -> dict[str, Tensor]:
        part = teacher.map(lambda values: values.index_select(0, chunk))
        own = reader.read(student, chunk, reader.most(part.ids.shape[1]))
        alone = _sums_of_one(reader, own, labels[chunk])
        local = reader.at(own.log_probs, part.ids).unbind(1)
        figures, at_ids = _of_student(reader, own, labels[chunk], [*alone, *local])
        given = part.log_probs.double()  # -inf at ids that are not in the top-k
        log_shares = torch.stack(at_ids, 1).masked_fill(given == -math.inf, -math.inf)
        # Stored values of different ids may be equal, and are then in their order.
        kept, places = descending(given)
        ids = part.ids.gather(1, places)
        return figures | {
            "teacher_top": ids[:, 0],
            **_bounds(log_shares, given, part.log_tail.double()),
            **_shared(own.top_ids, ids, reader.shard.size, kept),
        }

    return _in_chunks(of, rows, chunk_tokens)


def compare_student(
    student: LogitSource,
    labels: Tensor,
    rows: Tensor,
    *,
    shard: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int | None = None,
) -> TokenComparison:
    """Figures of the student against the labels, without a teacher; as `compare_with_logits`.

    Collective: over ``group`` per token two all-gathers of 16 bytes and one all-reduce of 32.
    """
    reader, chunk_tokens = _prepared(student, labels, shard, group, chunk_tokens)

    def of(chunk: Tensor) -> dict[str, Tensor]:
        own = reader.read(student, chunk, 1)
        return _of_student(reader, own, labels[chunk], _sums_of_one(reader, own, labels[chunk]))[0]

    return _in_chunks(of, rows, chunk_tokens)


def _prepared(
    student: LogitSource,
    labels: Tensor,
    shard: VocabShard | None,
    group: dist.ProcessGroup | None,
    chunk_tokens: int | None,
) -> tuple[_Reader, int]:
    check_per_token(student.tokens, labels=labels)
    whole, group = resolve_shard(student.width, shard, group)
    if chunk_tokens is None:
        chunk_tokens = max(1, chunk_tokens_for(whole.width, labels.device) // _MATRICES)
    return _Reader(whole, group), chunk_tokens


def _sums_of_one(reader: _Reader, own: _Read, labels: Tensor) -> list[Tensor]:
    """This rank's shares of log-probabilities of label and top id, squares and entropy ``[n]``."""
    ids = torch.stack([labels, own.top_ids[:, 0]], 1)
    at_ids = reader.at(own.log_probs, ids).unbind(1)
    return [*at_ids, (own.probs * own.probs).sum(1), -_mean(own, own.log_probs)]


def _sums_of_both(own: _Read, given: _Read) -> list[Tensor]:
    """This rank's sums ``[n]`` of both KLs, entropy, overlap and JS; overwrites probabilities."""
    log_ratio = given.log_probs - own.log_probs
    forward, reverse = _mean(given, log_ratio), -_mean(own, log_ratio)
    entropy, overlap = -_mean(given, given.log_probs), torch.minimum(given.probs, own.probs).sum(1)
    divergence = _jensen_shannon_(given.probs, own.probs, log_ratio).sum(1)
    return [forward, reverse, entropy, overlap, divergence]


def _of_student(
    reader: _Reader, own: _Read, labels: Tensor, local: list[Tensor]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Figures without a teacher from `_sums_of_one`, and the sums of all that are after these."""
    label, top, squares, entropy, *sums = reader.summed(local)
    figures = {
        "label_nll": -label,
        "brier": squares - 2.0 * label.exp() + 1.0,
        "student_entropy": entropy,
        "student_top": own.top_ids[:, 0],
        "confidence": top.exp(),
        "is_label": own.top_ids[:, 0] == labels,
    }
    return figures, sums


def _in_chunks(
    of: Callable[[Tensor], dict[str, Tensor]], rows: Tensor, chunk_tokens: int
) -> TokenComparison:
    # An empty chunk gives empty figures, and takes part in the collectives of no other rank's.
    chunks = torch.split(rows, chunk_tokens) if rows.numel() else (rows,)
    with torch.no_grad():
        found = [of(chunk) for chunk in chunks]
    return TokenComparison(**{name: torch.cat([one[name] for one in found]) for name in found[0]})


def _mean(of: _Read, values: Tensor) -> Tensor:
    """``sum p values`` ``[n]`` of this rank's columns; zero where p is."""
    return (of.probs * values).masked_fill_(of.log_probs == -math.inf, 0.0).sum(1)


def _jensen_shannon_(p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
    """Summands of the divergence from ``log(p / q)``, at least zero; overwrites all three.

    With the larger one of both factored out, so that nothing overflows, and equal values give zero.
    """
    smaller, gap = torch.minimum(p, q), log_ratio.abs_()
    total = p.add_(q)
    far = torch.mul(smaller, gap, out=q).masked_fill_(smaller == 0, 0.0)
    near = gap.neg_().expm1_().div_(2.0).log1p_().neg_().mul_(total).masked_fill_(total == 0, 0.0)
    return near.sub_(far).div_(2.0)


def _bounds(log_q: Tensor, log_p: Tensor, log_tail: Tensor) -> dict[str, Tensor]:
    """Overlap and divergence, least and most, from log-probabilities ``[n, K]`` of some ids.

    log_tail: of the mass of all further ids in p.
    """
    p, q, tail = log_p.exp(), log_q.exp(), log_tail.exp()
    own_tail = (1.0 - q.sum(1)).clamp_(min=0.0)
    overlap = torch.minimum(p, q).sum(1)
    log_ratio = torch.cat([log_p - log_q, (log_tail - own_tail.log()).unsqueeze(1)], 1)
    p, q = torch.cat([p, tail.unsqueeze(1)], 1), torch.cat([q, own_tail.unsqueeze(1)], 1)
    summands = _jensen_shannon_(p, q, log_ratio)
    apart = (tail + own_tail) * (math.log(2.0) / 2.0)
    return {
        "overlap": overlap,
        "overlap_most": overlap + torch.minimum(tail, own_tail),
        "js_divergence": summands.sum(1),
        "js_divergence_most": summands[:, :-1].sum(1) + apart,
    }


def _shared(own: Tensor, given: Tensor, size: int, kept: Tensor | None = None) -> dict[str, Tensor]:
    """Of each size of `_SHARED` the share of most probable ids that both have; NaN if unknown.

    own, given: ids, most probable first. kept: log-probabilities of the given ones, -inf of those
    that are none. size: of the vocabulary.
    """
    figures: dict[str, Tensor] = {}
    for wanted, name in _SHARED.items():
        k = min(wanted, size)
        if k > given.shape[1]:
            figures[name] = torch.full_like(given[:, 0], math.nan, dtype=torch.float64)
            continue
        share = (own[:, :k, None] == given[:, None, :k]).any(2).sum(1).double() / k
        if kept is not None:
            share.masked_fill_(kept[:, k - 1] == -math.inf, math.nan)
        figures[name] = share
    return figures

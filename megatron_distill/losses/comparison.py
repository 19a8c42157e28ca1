"""How two models differ on the same tokens: agreement, divergences, calibration, draft acceptance.

Both models' logits are formed chunk by chunk over the vocabulary shards, in fp64. For teacher
probabilities p and student probabilities q of a token:

    forward KL  sum p log(p / q)      reverse KL  sum q log(q / p)
    overlap     sum min(p, q)         Brier       sum (q - onehot(label))^2

The overlap is one less the total variation. It is the probability that speculative sampling accepts
a token that the student drafts (Leviathan et al. 2023, Theorem 3.5).
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
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import chunk_tokens_for
from megatron_distill.signals import LogitSource, TopK

__all__ = ["TokenComparison", "compare_student", "compare_with_ids", "compare_with_logits"]

# fp64 logits of both models and their products: so many matrices of a chunk beside one of fp32.
_MATRICES = 8


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
    forward_kl: Tensor | None = None
    reverse_kl: Tensor | None = None
    teacher_entropy: Tensor | None = None


@dataclass(frozen=True)
class _Reader:
    """Reads chunks of log-probabilities over this rank's real columns."""

    shard: VocabShard
    group: dist.ProcessGroup | None

    def log_probs(self, source: LogitSource, rows: Tensor) -> Tensor:
        """``[n, V]`` fp64 of the rows ``[n]``; V are this rank's real columns."""
        raw = source.outputs(lambda values: values.index_select(0, rows), self.shard.real_width)
        logits = source.rule.apply_(raw.to(torch.float64, copy=True))
        return logits.sub_(log_normalizer(logits, self.group).unsqueeze(1))

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

    def top(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """The most probable id ``[n]`` of all ranks, the lowest of equal ones, and its value."""
        lowest = log_probs.new_full((log_probs.shape[0],), -math.inf)
        column = torch.zeros(lowest.shape, dtype=torch.int64, device=lowest.device)
        if self.shard.real_width:
            lowest, column = log_probs.max(1)
            # `max` promises no order among equal values.
            column = (log_probs == lowest.unsqueeze(1)).int().argmax(1)
        ids = column + self.shard.start
        if self.group is None:
            return ids, lowest
        local = torch.stack((lowest, ids.to(lowest.dtype)))
        world = dist.get_world_size(self.group)
        gathered = local.new_empty(world * 2, local.shape[1])
        dist.all_gather_into_tensor(gathered, local, group=self.group)
        values, owners = gathered.view(world, 2, -1).unbind(1)
        best = values.amax(0)
        # Ids are exact in fp64.
        winners = owners.masked_fill(values < best, math.inf).amin(0)
        return winners.long(), best


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

    Collective: over ``group`` per token four all-gathers of 16 bytes (normalisers, top ids) and one
    all-reduce of 56.

    Raises:
        ValueError: shapes, shard or group do not fit together.
    """
    reader, chunk_tokens = _prepared(student, labels, shard, group, chunk_tokens)
    check_columns(teacher.width, reader.shard, group)

    def of(chunk: Tensor) -> dict[str, Tensor]:
        own, given = reader.log_probs(student, chunk), reader.log_probs(teacher, chunk)
        figures, (forward, reverse, overlap, entropy) = _of_student(
            reader,
            own,
            labels[chunk],
            [_gap(given, own), _gap(own, given), _overlap(given, own), -_mean_log(given)],
        )
        return figures | {
            "teacher_top": reader.top(given)[0],
            "overlap": overlap,
            "overlap_most": overlap,
            "forward_kl": forward,
            "reverse_kl": reverse,
            "teacher_entropy": entropy,
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
    smaller of both models' remaining masses.

    Collective: over ``group`` per token one all-gather of 16 bytes for the normaliser, one of 16
    for the top id. Also one all-reduce of 24 bytes and 8 per id.

    Raises:
        ValueError: as `compare_with_logits`.
    """
    reader, chunk_tokens = _prepared(student, labels, shard, group, chunk_tokens)

    def of(chunk: Tensor) -> dict[str, Tensor]:
        part = teacher.map(lambda values: values.index_select(0, chunk))
        own = reader.log_probs(student, chunk)
        figures, at_ids = _of_student(
            reader, own, labels[chunk], list(reader.at(own, part.ids).unbind(1))
        )
        given = part.log_probs.double()  # -inf at ids that are not in the top-k
        shares = torch.stack(at_ids, 1).masked_fill(given == -math.inf, -math.inf).exp()
        least = torch.minimum(given.exp(), shares).sum(1)
        rest = torch.minimum(part.log_tail.double().exp(), (1.0 - shares.sum(1)).clamp_(min=0.0))
        teacher_top = part.ids.gather(1, given.argmax(1, keepdim=True)).squeeze(1)
        return figures | {
            "teacher_top": teacher_top,
            "overlap": least,
            "overlap_most": least + rest,
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

    Collective: over ``group`` per token two all-gathers of 16 bytes and one all-reduce of 24.
    """
    reader, chunk_tokens = _prepared(student, labels, shard, group, chunk_tokens)

    def of(chunk: Tensor) -> dict[str, Tensor]:
        return _of_student(reader, reader.log_probs(student, chunk), labels[chunk], [])[0]

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


def _of_student(
    reader: _Reader, own: Tensor, labels: Tensor, more: list[Tensor]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Figures without a teacher, and the sums over the ranks of further values ``[n]``."""
    label = reader.at(own, labels.unsqueeze(1)).squeeze(1)
    squares = own.mul(2.0).exp_().sum(1)
    label, squares, entropy, *sums = reader.summed([label, squares, -_mean_log(own), *more])
    top, value = reader.top(own)
    figures = {
        "label_nll": -label,
        "brier": squares - 2.0 * label.exp() + 1.0,
        "student_entropy": entropy,
        "student_top": top,
        "confidence": value.exp(),
        "is_label": top == labels,
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


def _gap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``sum p (log p - log q)`` ``[n]`` of this rank's columns; zero where p is."""
    return (log_p.exp() * (log_p - log_q)).masked_fill_(log_p == -math.inf, 0.0).sum(1)


def _mean_log(log_p: Tensor) -> Tensor:
    """``sum p log p`` ``[n]`` of this rank's columns."""
    return (log_p.exp() * log_p).masked_fill_(log_p == -math.inf, 0.0).sum(1)


def _overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``sum min(p, q)`` ``[n]`` of this rank's columns."""
    return torch.minimum(log_p, log_q).exp_().sum(1)

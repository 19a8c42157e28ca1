"""Float64 oracles of the losses between models with different tokenizers.

Whole logits, one chunk at a time, each formula as it is written in the documentation; autograd for
gradients. Student logits are ``[N, S]``, teacher logits ``[M, G]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.divergences import ORACLES


@dataclass(frozen=True)
class Alignment:
    """The chunk of the label that each row predicts, -1 for none, and the labels."""

    student_chunks: Tensor
    teacher_chunks: Tensor
    student_labels: Tensor
    teacher_labels: Tensor
    count: int

    def rows(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Numbers of the student's and the teacher's rows of a chunk."""
        student = (self.student_chunks == chunk).nonzero().squeeze(1)
        teacher = (self.teacher_chunks == chunk).nonzero().squeeze(1)
        return student, teacher


def _per_chunk(
    student: Tensor,
    at: Alignment,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    one_each: bool = False,
) -> Tensor:
    """A loss of the rows of each chunk; zero without rows on a side, or with more than one."""
    nothing = student.double().sum() * 0
    values = []
    for chunk in range(at.count):
        rows = at.rows(chunk)
        counts = [len(one) for one in rows]
        is_defined = counts == [1, 1] if one_each else min(counts) > 0
        values.append(loss(*rows) if is_defined else nothing)
    return torch.stack(values) if values else student.new_zeros(0, dtype=torch.float64)


def _between(name: str, log_p: Tensor, log_q: Tensor, **given: float) -> Tensor:
    return ORACLES[name](log_p.unsqueeze(0), log_q.unsqueeze(0), **given).squeeze(0)


def _label_log_prob(logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    log_probs = logits.double()[rows].log_softmax(1)
    return log_probs.gather(1, labels[rows].unsqueeze(1)).sum()


def _log_rest(log_prob: Tensor) -> Tensor:
    return (-torch.expm1(log_prob)).log()


def likelihood(
    student: Tensor, teacher: Tensor, at: Alignment, name: str, tau: float = 1.0, **given: float
) -> Tensor:
    """Binary divergence between the probabilities of each chunk's text, to the power 1/tau."""

    def of_chunk(rows: Tensor, teacher_rows: Tensor) -> Tensor:
        log_q = _label_log_prob(student, at.student_labels, rows) / tau
        log_p = _label_log_prob(teacher, at.teacher_labels, teacher_rows) / tau
        of_student = torch.stack([log_q, _log_rest(log_q)])
        of_teacher = torch.stack([log_p, _log_rest(log_p)])
        return _between(name, of_teacher, of_student, **given)

    return _per_chunk(student, at, of_chunk)


def _others(width: int, ids: Tensor) -> Tensor:
    is_other = torch.ones(width, dtype=torch.bool)
    is_other[ids] = False
    return is_other


def _with_rest(log_probs: Tensor, ids: Tensor, *, has_rest: bool) -> Tensor:
    """Log-probabilities of the ids, and of all further ids together."""
    if not has_rest:
        return log_probs[ids].log_softmax(0)
    rest = log_probs[_others(len(log_probs), ids)].logsumexp(0, keepdim=True)
    return torch.cat([log_probs[ids], rest])


def common(
    student: Tensor,
    teacher: Tensor,
    at: Alignment,
    ids: tuple[Tensor, Tensor],
    name: str,
    temperature: float = 1.0,
    top_k: int | None = None,
    **given: float,
) -> Tensor:
    """Divergence over common tokens and one class of all further ones, at chunks of one token each.

    Without further tokens in one of the vocabularies, both models are normalised over the common
    ones. With ``top_k`` all but the teacher's k most probable common tokens are the further ones.
    """
    has_rest = len(ids[0]) < student.shape[1] and len(ids[1]) < teacher.shape[1]

    def of_chunk(rows: Tensor, teacher_rows: Tensor) -> Tensor:
        log_q = (student.double()[rows[0]] / temperature).log_softmax(0)
        log_p = (teacher.double()[teacher_rows[0]] / temperature).log_softmax(0)
        log_q = _with_rest(log_q, ids[0], has_rest=has_rest)
        log_p = _with_rest(log_p, ids[1], has_rest=has_rest)
        if top_k is not None:
            chosen = log_p[: len(ids[1])].topk(top_k).indices
            log_q = _with_rest(log_q, chosen, has_rest=top_k < len(log_q))
            log_p = _with_rest(log_p, chosen, has_rest=top_k < len(log_p))
        return _between(name, log_p, log_q, **given)

    return _per_chunk(student, at, of_chunk, one_each=True)


def chunk_mean(logits: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """Arithmetic mean of the distributions of some rows."""
    return (logits.double()[rows] / temperature).softmax(1).mean(0)


def projection(
    student: Tensor,
    teacher: Tensor,
    at: Alignment,
    matrix: Tensor,
    name: str,
    temperature: float = 1.0,
    top_k: int | None = None,
    **given: float,
) -> Tensor:
    """Divergence between chunk means, the student's projected by ``matrix [S, G]``.

    The classes are the k teacher ids with the largest teacher mean among those that some student
    id projects to, and all further ids as one class.
    """
    covered = (matrix.abs().sum(0) > 0).nonzero().squeeze(1)
    k = len(covered) if top_k is None else min(top_k, len(covered))

    def of_chunk(rows: Tensor, teacher_rows: Tensor) -> Tensor:
        q = chunk_mean(student, rows, temperature) @ matrix.double()
        p = chunk_mean(teacher, teacher_rows, temperature)
        order = p[covered].sort(descending=True, stable=True).indices
        chosen = covered[order[:k]]
        of_student, of_teacher = q[chosen], p[chosen]
        if len(chosen) < len(p):
            of_student = torch.cat([of_student, 1 - q[chosen].sum(0, keepdim=True)])
            of_teacher = torch.cat([of_teacher, p[_others(len(p), chosen)].sum(0, keepdim=True)])
        return _between(name, of_teacher.log(), of_student.log(), **given)

    return _per_chunk(student, at, of_chunk)


_EPSILON = 1e-10


def published_projection(
    student: Tensor,
    teacher: Tensor,
    at: Alignment,
    matrix: Tensor,
    *,
    reverse: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Tensor:
    """The published projection loss (X-Token, arXiv 2605.21699): no divergence, may be negative.

    The teacher's ids are the k with the largest logit over all rows. The teacher's chunk mean is
    one of log-probabilities, not normalised again; the student's mean is normalised over the ids.
    """
    k = teacher.shape[1] if top_k is None else top_k
    chosen = teacher.double().amax(0).topk(k).indices.sort().values

    def of_chunk(rows: Tensor, teacher_rows: Tensor) -> Tensor:
        q = (chunk_mean(student, rows, temperature) @ matrix.double())[chosen]
        q = q / (q.sum() + _EPSILON)
        log_p = (teacher.double()[teacher_rows][:, chosen] / temperature).log_softmax(1).mean(0)
        log_q = (q + _EPSILON).log()
        if reverse:
            value = ((q + _EPSILON) * (log_q - log_p)).sum()
        else:
            value = (log_p.exp() * (log_p - log_q)).sum()
        return temperature**2 * value

    return _per_chunk(student, at, of_chunk)


def sorted_distance(left: Tensor, right: Tensor, top_k: int | None = None) -> Tensor:
    """Sum of absolute differences of both vectors in descending order, the shorter with zeros."""
    size = max(len(left), len(right))
    if top_k is not None:
        size = min(size, top_k)

    def ranked(values: Tensor) -> Tensor:
        ordered = values.sort(descending=True).values[:size]
        return torch.cat([ordered, ordered.new_zeros(size - len(ordered))])

    return (ranked(left) - ranked(right)).abs().sum()


def gold(
    student: Tensor,
    teacher: Tensor,
    at: Alignment,
    ids: tuple[Tensor, Tensor],
    name: str,
    temperature: float = 1.0,
    uncommon_top_k: int | None = None,
    **given: float,
) -> Tensor:
    """Divergence over common tokens and the rest, plus the sorted distance of uncommon ones."""
    has_rest = len(ids[0]) < student.shape[1] and len(ids[1]) < teacher.shape[1]

    def of_chunk(rows: Tensor, teacher_rows: Tensor) -> Tensor:
        q = chunk_mean(student, rows, temperature)
        p = chunk_mean(teacher, teacher_rows, temperature)
        log_q = _with_rest(q.log(), ids[0], has_rest=has_rest)
        log_p = _with_rest(p.log(), ids[1], has_rest=has_rest)
        left, right = q[_others(len(q), ids[0])], p[_others(len(p), ids[1])]
        distance = sorted_distance(left, right, uncommon_top_k)
        return _between(name, log_p, log_q, **given) + distance

    return _per_chunk(student, at, of_chunk)


def uld(
    student: Tensor,
    teacher: Tensor,
    at: Alignment,
    temperature: float = 1.0,
    uncommon_top_k: int | None = None,
) -> Tensor:
    """Sorted distance of the whole chunk means (universal logit distillation)."""

    def of_chunk(rows: Tensor, teacher_rows: Tensor) -> Tensor:
        q = chunk_mean(student, rows, temperature)
        p = chunk_mean(teacher, teacher_rows, temperature)
        return sorted_distance(q, p, uncommon_top_k)

    return _per_chunk(student, at, of_chunk)


@dataclass(frozen=True)
class AlignedProblem:
    """Hidden states and heads of two models, and the alignment of their rows."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    at: Alignment
    ids: tuple[Tensor, Tensor]

    @classmethod
    def random(
        cls,
        chunks: int = 11,
        *,
        sizes: tuple[int, int] = (83, 61),
        common_tokens: int = 40,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> AlignedProblem:
        """Chunks of one to three rows; some have one on each side, and some rows have no chunk.

        Labels are among the more probable tokens, so that texts are not improbable beyond fp64.
        """
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def side(lengths: Tensor, size: int, features: int) -> tuple[Tensor, ...]:
            numbers = torch.arange(chunks).repeat_interleave(lengths)
            # A row before, one between, and the row after the last label have none.
            middle = len(numbers) // 2
            while middle < len(numbers) and numbers[middle] == numbers[middle - 1]:
                middle += 1
            none = torch.tensor([-1])
            numbers = torch.cat([none, numbers[:middle], none, numbers[middle:], none])
            hidden = normal(len(numbers), features).to(dtype)
            weight = (normal(size, features) * 2 / features**0.5).to(dtype)
            labels = (hidden @ weight.t()).topk(6, 1).indices
            chosen = torch.randint(6, (len(numbers), 1), generator=generator)
            return numbers, hidden, weight, labels.gather(1, chosen).squeeze(1)

        lengths = torch.randint(1, 4, (2, chunks), generator=generator)
        lengths[:, ::3] = 1
        numbers, hidden, weight, labels = side(lengths[0], sizes[0], 12)
        others, teacher_hidden, teacher_weight, teacher_labels = side(lengths[1], sizes[1], 16)
        ids = tuple(torch.randperm(size, generator=generator)[:common_tokens] for size in sizes)
        at = Alignment(numbers, others, labels, teacher_labels, chunks)
        return cls(hidden, weight, teacher_hidden, teacher_weight, at, (ids[0], ids[1]))

    @property
    def logits(self) -> tuple[Tensor, Tensor]:
        """The student's and the teacher's logits in the dtype of the models."""
        return self.hidden @ self.weight.t(), self.teacher_hidden @ self.teacher_weight.t()

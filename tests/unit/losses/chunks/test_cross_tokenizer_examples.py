"""The losses of the package on small examples computed by hand: values, and gradients by central
differences of every logit. X-Token's chunks with a many-to-many one, one token against three
digits, a top-k with a class of the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite, log
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import token_divergence
from megatron_distill.signals import DenseLogits
from tests.reference.cross_tokenizer import Alignment
from tests.support.aligned_losses import Loss, divergence, identity_rows


def logs(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


# Student tokens a, b, ab, c; teacher tokens a, b, c, d; the text "abcab" as ab|c|ab and a|b|c|a|b.
EVEN = [0.25] * 4
STUDENT = logs([0.1, 0.2, 0.4, 0.3], [0.2, 0.1, 0.6, 0.1], EVEN)
TEACHER = logs(
    [0.1, 0.6, 0.2, 0.1], [0.1, 0.2, 0.6, 0.1], [0.7, 0.1, 0.1, 0.1], [0.2, 0.5, 0.2, 0.1], EVEN
)
# Chunk 0 starts the document: the label "a" of the teacher has no predictor.
EXAMPLE = Alignment(
    ints(0, 1, -1), ints(-1, 0, 1, 1, -1), ints(3, 2, -1), ints(1, 2, 0, 1, -1), count=2
)
ONE_TOKEN = Alignment(ints(0), ints(0), ints(0), ints(0), count=1)
STEP = 1e-5  # of a logit: the difference is exact to 1e-10


def copies(at: Alignment, count: int) -> Alignment:
    """The same rows so many times, one after another, each time with chunks of their own."""

    def numbered(chunks: Tensor) -> Tensor:
        first = torch.arange(count).repeat_interleave(len(chunks)) * at.count
        repeated = chunks.repeat(count)
        return torch.where(repeated >= 0, repeated + first, -1)

    return Alignment(
        numbered(at.student_chunks),
        numbered(at.teacher_chunks),
        at.student_labels.repeat(count),
        at.teacher_labels.repeat(count),
        at.count * count,
    )


def assert_slopes(values_of: Callable[[Tensor, int], Tensor], student: Tensor) -> Tensor:
    """Compare the gradient of the sum of all values with differences; return the values.

    values_of: the values of so many copies of the student's rows.
    """
    leaf = student.clone().requires_grad_()
    values = values_of(leaf, 1)
    (found,) = torch.autograd.grad(values.sum(), leaf)
    moves = STEP * torch.eye(student.numel(), dtype=torch.float64).view(-1, *student.shape)
    rows = torch.cat([student + moves, student - moves])
    ahead, behind = values_of(rows.flatten(0, 1), len(rows)).view(2, student.numel(), -1).sum(2)
    expected = (ahead - behind).view_as(student) / (2 * STEP)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    return values.detach()


def slopes_of_chunks(student: Tensor, teacher: Tensor, at: Alignment, loss: Loss) -> Tensor:
    """Values per chunk, whose gradient was compared with differences."""
    return assert_slopes(
        lambda rows, n: divergence(rows, teacher.repeat(n, 1), copies(at, n), loss), student
    )


def first_rows(k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The map of the example to the teacher's first k tokens: a, b, ab to a and b, c."""
    rows = [[(0, 1.0)], [(1, 1.0)], [(0, 10 / 11), (1, 1 / 11)], [(2, 1.0)]]
    inside = [[one for one in row if one[0] < k] for row in rows]
    ends = torch.tensor([0, *(len(row) for row in inside)]).cumsum(0)
    entries = [one for row in inside for one in row]
    return ends, ints(*(one for one, _ in entries)), torch.tensor([one for _, one in entries])


# k -> temperature, direction -> both chunks where they are published, and the mean over them
PUBLISHED: dict[int, dict[tuple[int, str], tuple[tuple[float, ...], float]]] = {
    4: {
        (1, "f"): ((2.301411, 1.946029), 2.123720),
        (1, "r"): ((), 0.482409),
        (2, "f"): ((), 14.231138),
        (2, "r"): ((), 1.361716),
    },
    3: {
        (1, "f"): ((0.359899, -0.053795), 0.153052),
        (1, "r"): ((0.437367, 0.316731), 0.377049),
        (2, "f"): ((), 0.386654),
        (2, "r"): ((), 0.612607),
    },
    2: {
        (1, "f"): ((0.224618, -0.086849), 0.068885),
        (1, "r"): ((), 0.274020),
        (2, "f"): ((), 0.241976),
        (2, "r"): ((), 0.474044),
    },
}
DIRECTIONS = {"f": "forward_kl", "r": "reverse_kl"}


@pytest.mark.parametrize("k", PUBLISHED)
def test_published_projection(k: int) -> None:
    for (temperature, direction), (of_chunks, mean) in PUBLISHED[k].items():
        loss = {
            "alignment": "projection",
            "divergence": DIRECTIONS[direction],
            "temperature": float(temperature),
            "top_k": k,
            "published": True,
            "map_rows": first_rows(k),
        }
        # The loss takes no label, and those of the example are tokens that k = 2 lacks.
        at = replace(EXAMPLE, teacher_labels=EXAMPLE.teacher_labels.clamp(max=k - 1))
        values = slopes_of_chunks(STUDENT, TEACHER[:, :k], at, loss)
        assert float(values.mean()) == pytest.approx(mean, abs=2e-6), (temperature, direction)
        if of_chunks:
            assert values.tolist() == pytest.approx(of_chunks, abs=2e-6), (temperature, direction)


def test_a_hole_costs_the_published_loss_a_log_of_its_epsilon_and_ours_no_infinity() -> None:
    """The teacher has 0.1 on d, which no row leads to."""
    teacher = logs([0.4, 0.3, 0.2, 0.1])
    student = logs([0.4, 0.3, 1e-12, 0.3])
    loss = {"alignment": "projection", "divergence": "forward_kl", "top_k": 4}
    loss |= {"map_rows": first_rows(4)}
    (value,) = divergence(student, teacher, ONE_TOKEN, loss | {"published": True}).tolist()
    reached = 0.2 * log(0.2 / 0.3)
    assert value - reached == pytest.approx(2.0723, abs=5e-5)
    # The student projects nothing outside of a, b and c, so the rest has a probability of zero.
    (ours,) = divergence(student, teacher, ONE_TOKEN, loss).tolist()
    assert isfinite(ours)
    # With a row that is a hole the rest has the mass of its token.
    offsets, ids, weights = first_rows(4)
    holed = (torch.where(torch.arange(5) >= 4, offsets - 1, offsets), ids[:-1], weights[:-1])
    (ours,) = divergence(student, teacher, ONE_TOKEN, loss | {"map_rows": holed}).tolist()
    # c of the teacher is in no row then, and belongs to the rest as well.
    assert ours == pytest.approx(0.0, abs=1e-9)


# The chunk of each row, the student's and the teacher's, and the loss of each chunk. The first case
# reads the rows of a chunk's own tokens, as the first version published did.
SHAPES = {
    "own rows": ([0, 1, 2], [0, 0, 1, 2, 2], [2.101178, 1.984755, 3.246358], 2.444097),
    "one chunk of two and four rows": ([0, 0, -1], [0, 0, 0, 0, -1], [1.972702], 1.972702),
    "two rows each, then one and two": (
        [0, 1, -1], [0, 0, 1, 1, -1], [2.101178, 1.946029], 2.023603,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHAPES)
def test_published_projection_of_chunks_of_every_shape(case: str) -> None:
    own, others, expected, mean = SHAPES[case]
    # The loss takes no label; the rows without one in the example have one here.
    labels = (EXAMPLE.student_labels.clamp(min=0), EXAMPLE.teacher_labels.clamp(min=0))
    at = Alignment(ints(*own), ints(*others), *labels, len(expected))
    loss = {"alignment": "projection", "divergence": "forward_kl", "top_k": 4, "published": True}
    values = slopes_of_chunks(STUDENT, TEACHER, at, loss | {"map_rows": first_rows(4)})
    assert values.tolist() == pytest.approx(expected, abs=2e-6)
    assert float(values.mean()) == pytest.approx(mean, abs=2e-6)


TWO_ROWS = logs([0.7, 0.1, 0.1, 0.1], [0.2, 0.5, 0.2, 0.1])


@pytest.mark.parametrize(
    ("direction", "expected"), [("forward_kl", -0.143097), ("reverse_kl", 0.180049)]
)
def test_equal_models_have_a_published_loss(direction: str, expected: float) -> None:
    """A chunk of two rows: a mean of log-probabilities sums to 0.839194, and not to one."""
    both, apart = Alignment(*[ints(0, 0)] * 4, count=1), Alignment(*[ints(0, 1)] * 4, count=2)
    loss = {"alignment": "projection", "divergence": direction, "published": True, "top_k": 4}
    loss |= {"map_rows": identity_rows(4)}
    (value,) = divergence(TWO_ROWS, TWO_ROWS, both, loss).tolist()
    assert value == pytest.approx(expected, abs=1e-6)
    assert float(divergence(TWO_ROWS, TWO_ROWS, apart, loss).abs().max()) < 1e-8


# No probability of the student is another one or the teacher's of the same rank: there the sorted
# distance has a corner.
APART_IN_RANK = logs([0.12, 0.23, 0.37, 0.28], [0.22, 0.07, 0.58, 0.13], EVEN)
SORTED = {"alignment": "uld", "divergence": "forward_kl"}
ABC = {"alignment": "projection", "map_rows": first_rows(3), "top_k": 3}
# Common a, b, c and the rest; uncommon ab and d at 0.4 and 0.1, then 0.6 and 0.1.
GOLD = {"alignment": "gold", "common_ids": (ints(0, 1, 3), ints(0, 1, 2))}
# The teacher's means in order are 0.6, 0.2, 0.1, 0.1 and 0.45, 0.3, 0.15, 0.1.
OURS: dict[str, tuple[Tensor, Tensor, dict[str, Any], tuple[float, float]]] = {
    "all ranks": (APART_IN_RANK, TEACHER, SORTED | {"uncommon_top_k": 256}, (0.46, 0.26)),
    "three ranks": (APART_IN_RANK, TEACHER, SORTED | {"uncommon_top_k": 3}, (0.44, 0.23)),
    "one rank": (APART_IN_RANK, TEACHER, SORTED | {"uncommon_top_k": 1}, (0.23, 0.13)),
    "projection": (
        STUDENT, TEACHER[:, :3].log_softmax(1), ABC | {"divergence": "forward_kl"},
        (0.359899, 0.141663),
    ),
    "projection reversed": (
        STUDENT, TEACHER[:, :3].log_softmax(1), ABC | {"divergence": "reverse_kl"},
        (0.437367, 0.127849),
    ),
    "gold": (STUDENT, TEACHER, GOLD | {"divergence": "forward_kl"}, (0.577259, 1.076147)),
}  # fmt: skip


@pytest.mark.parametrize("case", OURS)
def test_divergences_of_chunk_means(case: str) -> None:
    *logits, loss, expected = OURS[case]
    values = slopes_of_chunks(*logits, EXAMPLE, loss)
    assert values.tolist() == pytest.approx(expected, abs=1e-6)
    slopes_of_chunks(*logits, EXAMPLE, loss | {"temperature": 2.0})


def test_one_token_of_the_student_beside_three_digits_of_the_teacher() -> None:
    number = logs([0.1, 0.5, 0.2, 0.2])
    digits = logs([0.05, 0.05, 0.8, 0.1], [0.6, 0.2, 0.1, 0.1], [0.2, 0.5, 0.2, 0.1])
    chain = Alignment(ints(0), ints(0, 0, 0), ints(1), ints(2, 0, 1), count=1)
    loss = {"alignment": "likelihood", "divergence": "forward_kl"}
    value = slopes_of_chunks(number, digits, chain, loss)
    assert float(value) == pytest.approx(0.142067, abs=1e-6)


def slopes_of_tokens(student: Tensor, teacher: Tensor, name: str, **given: Any) -> float:
    """The value of one token, whose gradient was compared with differences."""
    value = assert_slopes(
        lambda rows, n: token_divergence(
            rows, DenseLogits(teacher.repeat(n, 1)), divergence=name, **given
        ),
        student,
    )
    return float(value)


@pytest.mark.parametrize(("beta", "expected"), [(0.1, 0.002755), (0.5, 0.007817), (0.9, 0.002892)])
def test_generalised_js_divergence(beta: float, expected: float) -> None:
    teacher, student = logs([0.5, 0.2, 0.3]), logs([0.4, 0.3, 0.3])
    found = slopes_of_tokens(student, teacher, "js_divergence", beta=beta)
    assert found == pytest.approx(expected, abs=1e-6)


# k -> forward and reverse KL on the teacher's top-k: with a class of the rest, renormalised
TOP_K = {
    1: ((0.020411, 0.020136), (0.0, 0.0)),
    2: ((0.030479, 0.032382), (0.043541, 0.046260)),
    3: ((0.048146, 0.049372), (0.046785, 0.050419)),
    5: ((0.050752, 0.052655), (0.050752, 0.052655)),
}
TRUNCATED = {1: 0.111572, 2: 0.030479, 3: 0.091299, 5: 0.050752}


@pytest.mark.parametrize("k", TOP_K)
def test_a_top_k_with_the_rest_and_without(k: int) -> None:
    teacher = logs([0.5, 0.2, 0.15, 0.1, 0.05])
    student = logs([0.4, 0.3, 0.1, 0.15, 0.05])
    ids = (torch.arange(5), torch.arange(5))
    tail, renormalized = TOP_K[k]
    for number, name in enumerate(("forward_kl", "reverse_kl")):
        loss = {"alignment": "common", "divergence": name, "common_ids": ids, "top_k": k}
        of_chunk = float(slopes_of_chunks(student, teacher, ONE_TOKEN, loss))
        assert of_chunk == pytest.approx(tail[number], abs=1e-6)
        for support, expected in (("tail", tail[number]), ("renormalized", renormalized[number])):
            found = slopes_of_tokens(student, teacher, name, top_k=k, support=support)
            assert found == pytest.approx(expected, abs=1e-6), support
    found = slopes_of_tokens(student, teacher, "forward_kl", top_k=k, support="raw")
    assert found == pytest.approx(TRUNCATED[k], abs=1e-6)

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
COMMON = ints(0, 1, 3), ints(0, 1, 2)  # ids of a, b and c
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


def projection(k: int, divergence: str = "forward_kl", **given: Any) -> Loss:
    """The loss of the example's map to the teacher's first k tokens."""
    loss = {"alignment": "projection", "divergence": divergence, "top_k": k}
    return {**loss, "map_rows": first_rows(k), **given}


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
        given = {"temperature": float(temperature), "published": True}
        loss = projection(k, DIRECTIONS[direction], **given)
        # The loss takes no label, and those of the example are tokens that k = 2 lacks.
        at = replace(EXAMPLE, teacher_labels=EXAMPLE.teacher_labels.clamp(max=k - 1))
        values = slopes_of_chunks(STUDENT, TEACHER[:, :k], at, loss)
        assert float(values.mean()) == pytest.approx(mean, abs=2e-6), (temperature, direction)
        if of_chunks:
            assert values.tolist() == pytest.approx(of_chunks, abs=2e-6), (temperature, direction)


def test_projected_rows_of_the_example() -> None:
    """A teacher that is sure of one token has the loss -log of what the student projects to it."""
    # A logit of -60: no probability, and its row of the loss is below 1e-24.
    sure = torch.full((3, 4), -60.0, dtype=torch.float64)
    sure.fill_diagonal_(0.0)
    loss = projection(4)
    # a, b and c; no row leads to d.
    for row, expected in enumerate([(0.463636, 0.236364, 0.3), (0.745455, 0.154545, 0.1)]):
        student, every = STUDENT[row].repeat(3, 1), torch.arange(3)
        at = Alignment(every, every, every, every, count=3)
        found = (-divergence(student, sure, at, loss)).exp()
        assert found.tolist() == pytest.approx(expected, abs=1e-6)
        assert float(found.sum()) == pytest.approx(1.0, abs=1e-6)


def test_a_hole_costs_the_published_loss_a_log_of_its_epsilon_and_ours_no_infinity() -> None:
    """The teacher has 0.1 on d, which no row leads to."""
    teacher = logs([0.4, 0.3, 0.2, 0.1])
    student = logs([0.4, 0.3, 1e-12, 0.3])
    loss = projection(4)
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
    values = slopes_of_chunks(STUDENT, TEACHER, at, projection(4, published=True))
    assert values.tolist() == pytest.approx(expected, abs=2e-6)
    assert float(values.mean()) == pytest.approx(mean, abs=2e-6)


# Both models are one, each token maps to itself, and a chunk has two rows on each side.
TWO_ROWS = logs([0.7, 0.1, 0.1, 0.1], [0.2, 0.5, 0.2, 0.1])
TOGETHER = Alignment(ints(0, 0), ints(0, 0), ints(0, 1), ints(0, 1), count=1)
APART = Alignment(ints(0, 1), ints(0, 1), ints(0, 1), ints(0, 1), count=2)


@pytest.mark.parametrize(
    ("direction", "expected"), [("forward_kl", -0.143097), ("reverse_kl", 0.180049)]
)
def test_equal_models_have_a_published_loss_and_none_of_the_others(
    direction: str, expected: float
) -> None:
    """A mean of log-probabilities sums to 0.839194; a mean of probabilities to one."""
    assert float(TWO_ROWS.mean(0).exp().sum()) == pytest.approx(0.839194, abs=1e-6)
    maps = {"map_rows": identity_rows(4)}
    published = {"alignment": "projection", "divergence": direction, "published": True, "top_k": 4}
    (value,) = divergence(TWO_ROWS, TWO_ROWS, TOGETHER, published | maps).tolist()
    assert value == pytest.approx(expected, abs=1e-6)
    apart = divergence(TWO_ROWS, TWO_ROWS, APART, published | maps)
    assert float(apart.abs().max()) < 1e-8
    ids = {"common_ids": (ints(0, 1, 2), ints(0, 1, 2))}
    for at in (TOGETHER, APART):
        for loss in (
            {"alignment": "likelihood"},
            {"alignment": "common", **ids},
            {"alignment": "common", "top_k": 2, **ids},
            {"alignment": "projection", **maps},
            {"alignment": "projection", "top_k": 2, **maps},
            {"alignment": "gold", **ids},
            {"alignment": "uld", "divergence": "forward_kl"},
        ):
            values = divergence(TWO_ROWS, TWO_ROWS, at, {"divergence": direction, **loss})
            assert not values.any(), loss


def test_the_gradient_of_the_published_projection_is_that_of_the_example() -> None:
    leaf = STUDENT.clone().requires_grad_()
    values = divergence(leaf, TEACHER[:, :3], EXAMPLE, projection(3, published=True))
    (found,) = torch.autograd.grad(values.mean(), leaf)
    expected = [0.038017, 0.005983, 0.139333, -0.183333, 0.026363, -0.039315, 0.050454, -0.037501]
    assert found[:2].flatten().tolist() == pytest.approx(expected, abs=1e-6)
    assert not found[2].any()


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "js_divergence", "squared_hellinger"])
def test_arithmetic_projection_and_gold(name: str) -> None:
    """Divergences of chunk means, on the chunks and the map of the published loss."""
    gold: Loss = {"alignment": "gold", "divergence": name, "common_ids": COMMON}
    for loss in (projection(4, name, top_k=2), gold):
        for temperature in (1.0, 2.0):
            given = {**loss, "temperature": temperature}
            assert bool((slopes_of_chunks(STUDENT, TEACHER, EXAMPLE, given) > 0).all())
    if name in DIRECTIONS.values():
        expected = {"forward_kl": (0.359899, 0.141663), "reverse_kl": (0.437367, 0.127849)}
        teacher = TEACHER[:, :3].log_softmax(1)
        values = slopes_of_chunks(STUDENT, teacher, EXAMPLE, projection(3, name))
        assert values.tolist() == pytest.approx(expected[name], abs=1e-6)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "js_divergence", "squared_hellinger"])
def test_common_tokens_with_the_rest_and_alone(name: str) -> None:
    """The first chunk has one token on each side; the second has two of the teacher, and no loss.

    Of three student tokens all are common, and both models are normalised over these.
    """
    alone = STUDENT[:, :3].log_softmax(1)
    for student, ids in ((STUDENT, ints(0, 1, 3)), (alone, ints(0, 1, 2))):
        loss: dict[str, Any] = {"alignment": "common", "common_ids": (ids, ints(0, 1, 2))}
        for temperature in (1.0, 2.0):
            given = {**loss, "divergence": name, "temperature": temperature}
            at = replace(EXAMPLE, student_labels=EXAMPLE.student_labels.clamp(max=2))
            of_pair, of_others = slopes_of_chunks(student, TEACHER, at, given).tolist()
            assert of_pair > 0
            assert of_others == 0
            if (name, temperature) == ("forward_kl", 1.0):
                p = torch.tensor([0.1, 0.2, 0.6], dtype=torch.float64)
                q = student[0, ids].exp()
                if student is alone:
                    p = p / p.sum()
                else:
                    p, q = torch.cat([p, 1 - p.sum(0, True)]), torch.cat([q, 1 - q.sum(0, True)])
                assert of_pair == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-12)


# The most mass of the tail, and the share of forward KL. In order of p the classes are a and the
# rest with 0.1 each, b with 0.2 and d with 0.6; the distance is 0.3 in the rest and 0.3 in d.
BLENDS = {0.05: 1.0, 0.15: 1.0, 0.25: 0.5, 0.5: 0.5}


@pytest.mark.parametrize("alpha", BLENDS)
def test_adaptive_kl_orders_the_rest_by_its_probability(alpha: float) -> None:
    """Of classes of one probability the rest is the last; its blend is a constant to the slope."""

    def values_of(rows: Tensor, count: int, name: str, **given: float) -> Tensor:
        loss = {"alignment": "common", "divergence": name, "common_ids": COMMON, **given}
        return divergence(rows, TEACHER.repeat(count, 1), copies(EXAMPLE, count), loss)

    def of_blend(rows: Tensor, count: int) -> Tensor:
        if count == 1:
            return values_of(rows, count, "adaptive_kl", adaptive_alpha=alpha)
        forward, reverse = (values_of(rows, count, name) for name in DIRECTIONS.values())
        return BLENDS[alpha] * forward + (1 - BLENDS[alpha]) * reverse

    found = assert_slopes(of_blend, STUDENT)
    forward, reverse = (values_of(STUDENT, 1, name) for name in DIRECTIONS.values())
    expected = BLENDS[alpha] * forward + (1 - BLENDS[alpha]) * reverse
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)


# No probability of the student is another one or the teacher's of the same rank: there the sorted
# distance has a corner.
APART_IN_RANK = logs([0.12, 0.23, 0.37, 0.28], [0.22, 0.07, 0.58, 0.13], EVEN)


@pytest.mark.parametrize(
    ("uncommon_top_k", "expected"), [(256, (0.46, 0.26)), (3, (0.44, 0.23)), (1, (0.23, 0.13))]
)
def test_a_distance_of_sorted_probabilities(
    uncommon_top_k: int, expected: tuple[float, float]
) -> None:
    """The teacher's means in order are 0.6, 0.2, 0.1, 0.1 and 0.45, 0.3, 0.15, 0.1."""
    loss = {"alignment": "uld", "divergence": "forward_kl", "uncommon_top_k": uncommon_top_k}
    for temperature in (1.0, 2.0):
        given = {**loss, "temperature": temperature}
        values = slopes_of_chunks(APART_IN_RANK, TEACHER, EXAMPLE, given).tolist()
        if temperature == 1:
            assert values == pytest.approx(expected, abs=1e-12)


def test_gold_of_common_and_uncommon_tokens() -> None:
    """Common a, b, c and the rest; uncommon ab and d at 0.4 and 0.1, then 0.6 and 0.1."""
    loss = {"alignment": "gold", "divergence": "forward_kl", "common_ids": COMMON}
    p = torch.tensor([[0.1, 0.2, 0.6, 0.1], [0.45, 0.3, 0.15, 0.1]], dtype=torch.float64)
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.2, 0.1, 0.1, 0.6]], dtype=torch.float64)
    expected = (p * (p / q).log()).sum(1) + torch.tensor([0.3, 0.5])
    torch.testing.assert_close(divergence(STUDENT, TEACHER, EXAMPLE, loss), expected)


# Direction and temperature -> divergence and distance of the gold loss as it was published
PUBLISHED_GOLD = {
    ("forward_kl", 1.0): (0.439606, 0.4),
    ("reverse_kl", 1.0): (-0.224175, 0.4),
    ("forward_kl", 2.0): (4 * 0.213526, 4 * 0.200849),
}


@pytest.mark.parametrize(("direction", "temperature"), PUBLISHED_GOLD)
def test_gold_as_published_is_no_divergence_and_ours_is(direction: str, temperature: float) -> None:
    """It adds p log(p/q) of common tokens alone, of means of log-probabilities: that has any sign.

    Ours has the rest as a class and means of probabilities; the distance is of the same tokens.
    """
    parts: list[tuple[float, float]] = []
    for chunk in range(EXAMPLE.count):
        of_student, of_teacher = (
            (logits[rows] / temperature).log_softmax(1).mean(0)
            for logits, rows in zip((STUDENT, TEACHER), EXAMPLE.rows(chunk), strict=True)
        )
        log_q, log_p = of_student[[0, 1, 3]], of_teacher[[0, 1, 2]]
        of = log_p.exp() if direction == "forward_kl" else -log_q.exp()
        distance = (of_student[2].exp() - of_teacher[3].exp()).abs()
        parts.append((float((of * (log_p - log_q)).sum()), float(distance)))
    factor = temperature**2 / EXAMPLE.count
    found = [factor * sum(one) for one in zip(*parts, strict=True)]
    assert found == pytest.approx(list(PUBLISHED_GOLD[direction, temperature]), abs=4e-6)
    loss = {"alignment": "gold", "divergence": direction, "common_ids": COMMON}
    loss |= {"temperature": temperature}
    q, p = (
        torch.stack([
            (logits[EXAMPLE.rows(chunk)[side]] / temperature).softmax(1).mean(0)
            for chunk in range(EXAMPLE.count)
        ])
        for side, logits in enumerate((STUDENT, TEACHER))
    )  # fmt: skip
    q, p = q[:, [0, 1, 3, 2]], p[:, [0, 1, 2, 3]]
    first, second = (p, q) if direction == "forward_kl" else (q, p)
    of_classes = (first * (first / second).log()).sum(1)
    expected = of_classes + (q[:, 3] - p[:, 3]).abs()
    values = slopes_of_chunks(STUDENT, TEACHER, EXAMPLE, loss)
    torch.testing.assert_close(values, expected)
    assert bool((of_classes > 0).all())


# One student token of text "201" beside the teacher's three digits.
NUMBER = logs([0.1, 0.5, 0.2, 0.2])
DIGITS = logs([0.05, 0.05, 0.8, 0.1], [0.6, 0.2, 0.1, 0.1], [0.2, 0.5, 0.2, 0.1])
CHAIN = Alignment(ints(0), ints(0, 0, 0), ints(1), ints(2, 0, 1), count=1)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "js_divergence", "total_variation"])
def test_likelihood_of_a_chain(name: str) -> None:
    for tau in (1.0, 2.0):
        loss = {"alignment": "likelihood", "divergence": name, "temperature": tau}
        value = float(slopes_of_chunks(NUMBER, DIGITS, CHAIN, loss))
        if (name, tau) == ("forward_kl", 1.0):
            assert value == pytest.approx(0.142067, abs=1e-6)


def test_the_binary_cross_entropy_of_a_chain_has_a_floor_and_the_likelihood_none() -> None:
    """The text has 0.24 and 0.5. Cross-entropy is the forward KL plus the teacher's entropy."""
    loss = {"alignment": "likelihood", "divergence": "forward_kl"}
    same = logs([0.1, 0.24, 0.2, 0.46])
    # tau -> cross-entropy. The last is published with an offset of 1e-6 on the logarithms.
    for tau, expected in ((1.0, 0.693147), (2.0, 0.796164), (100.0, 0.077334)):
        p = torch.tensor(0.24, dtype=torch.float64) ** (1 / tau)
        entropy = float(-p * p.log() - (1 - p) * (1 - p).log())
        given = {**loss, "temperature": tau}
        (value,) = divergence(NUMBER, DIGITS, CHAIN, given).tolist()
        assert value + entropy == pytest.approx(expected, abs=1e-6 if tau < 100 else 1e-5)
        (nothing,) = divergence(same, DIGITS, CHAIN, given).tolist()
        assert nothing == pytest.approx(0.0, abs=1e-15)
    assert entropy == pytest.approx(0.074389, abs=1e-5)


def slopes_of_tokens(student: Tensor, teacher: Tensor, name: str, **given: Any) -> float:
    """The value of one token, whose gradient was compared with differences."""
    value = assert_slopes(
        lambda rows, n: token_divergence(
            rows, DenseLogits(teacher.repeat(n, 1)), divergence=name, **given
        ),
        student,
    )
    return float(value)


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        ("forward_kl", {}, 0.342348),
        ("reverse_kl", {}, 0.309100),
        ("js_divergence", {"beta": 0.5}, 0.078634),
    ],
)
def test_chains_of_digits_beside_tokens(
    name: str, parameters: dict[str, float], expected: float
) -> None:
    """Three texts of one token beside their chains, and all further texts as one class."""
    chains = logs([0.096, 0.24, 0.096, 0.568])
    assert slopes_of_tokens(NUMBER, chains, name, **parameters) == pytest.approx(expected, abs=1e-6)


# The student's and the teacher's rows of five tokens.
FIVE = logs([0.4, 0.3, 0.1, 0.15, 0.05]), logs([0.5, 0.2, 0.15, 0.1, 0.05])
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
    student, teacher = FIVE
    ids = (torch.arange(5), torch.arange(5))
    tail, renormalized = TOP_K[k]
    for number, name in enumerate(("forward_kl", "reverse_kl")):
        loss = {"alignment": "common", "divergence": name, "common_ids": ids, "top_k": k}
        of_chunk = float(slopes_of_chunks(student, teacher, ONE_TOKEN, loss))
        assert of_chunk == pytest.approx(tail[number], abs=1e-6)
        for support, expected in (("tail", tail[number]), ("renormalized", renormalized[number])):
            found = slopes_of_tokens(student, teacher, name, top_k=k, support=support)
            assert found == pytest.approx(expected, abs=1e-6), support
    if k == 2:
        both = [slopes_of_tokens(student, teacher, name, top_k=k, support="renormalized")
                for name in DIRECTIONS.values()]  # fmt: skip
        assert sum(both) / 2 == pytest.approx(0.044901, abs=1e-6)
    found = slopes_of_tokens(student, teacher, "forward_kl", top_k=k, support="raw")
    assert found == pytest.approx(TRUNCATED[k], abs=1e-6)


def test_zero_outside_of_the_top_k_as_published_is_no_divergence() -> None:
    """It compares a teacher normalised over its top two with the student's own log-probabilities.

    A reverse KL takes -100 for the logarithms of the teacher's other tokens. From our renormalised
    losses: the student's mass Q of the two is missing in its logarithms, and weighs the reverse.
    """
    student, teacher = FIVE
    forward, reverse = (
        slopes_of_tokens(student, teacher, name, top_k=2, support="renormalized")
        for name in DIRECTIONS.values()
    )
    inside, rest = 0.7, student[0, 2:].exp()
    correction = float((rest * student[0, 2:]).sum() + 100 * rest.sum())
    assert correction == pytest.approx(29.335387, abs=1e-6)
    published = forward - log(inside), inside * (reverse + log(inside)) + correction
    assert published == pytest.approx((0.400216, 29.118097), abs=2e-6)
    assert sum(published) / 2 == pytest.approx(14.759156, abs=1e-6)
    # Equal models still have the entropy of what is outside, and a forward loss of -log Q.
    same = slopes_of_tokens(student, student, "forward_kl", top_k=2, support="renormalized")
    assert same - log(inside) == pytest.approx(0.356675, abs=1e-6)
    assert slopes_of_tokens(student, student, "reverse_kl", top_k=2, support="tail") == 0.0


@pytest.mark.parametrize(("beta", "expected"), [(0.1, 0.002755), (0.5, 0.007817), (0.9, 0.002892)])
def test_generalised_js_divergence(beta: float, expected: float) -> None:
    teacher, student = logs([0.5, 0.2, 0.3]), logs([0.4, 0.3, 0.3])
    found = slopes_of_tokens(student, teacher, "js_divergence", beta=beta)
    assert found == pytest.approx(expected, abs=1e-6)

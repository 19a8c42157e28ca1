"""The oracles of the losses between tokenizers give the numbers of hand-checked examples."""

import pytest
import torch
from torch import Tensor

from tests.reference.cross_tokenizer import (
    Alignment,
    common,
    gold,
    likelihood,
    projection,
    published_projection,
    uld,
)
from tests.reference.divergences import ORACLES, on_top_k, topk


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
MATRIX = torch.tensor(
    [[1, 0, 0, 0], [0, 1, 0, 0], [10 / 11, 1 / 11, 0, 0], [0, 0, 1, 0]], dtype=torch.float64
)
# Chunk 0 starts the document: the label "a" of the teacher has no predictor.
EXAMPLE = Alignment(
    ints(0, 1, -1), ints(-1, 0, 1, 1, -1), ints(3, 2, -1), ints(1, 2, 0, 1, -1), count=2
)
ONE_TOKEN = Alignment(ints(0), ints(0), ints(0), ints(0), count=1)


@pytest.mark.parametrize(
    ("k", "temperature", "reverse", "expected", "chunks"),
    [
        (4, 1.0, False, 2.123720, (2.301411, 1.946029)),
        (4, 1.0, True, 0.482409, None),
        (4, 2.0, True, 1.361716, None),
        (3, 1.0, False, 0.153052, (0.359899, -0.053795)),
        (2, 1.0, False, 0.068885, (0.224618, -0.086849)),
        (2, 2.0, True, 0.474044, None),
    ],
)
def test_published_projection(
    k: int, temperature: float, reverse: bool, expected: float, chunks: tuple[float, ...] | None
) -> None:
    # The example's subsets of k ids are the first k, which the largest logits do not choose.
    teacher, matrix = TEACHER[:, :k], MATRIX[:, :k]
    value = published_projection(
        STUDENT, teacher, EXAMPLE, matrix, reverse=reverse, temperature=temperature
    )
    assert float(value.mean()) == pytest.approx(expected, abs=1e-6)
    if chunks is not None:
        assert value.tolist() == pytest.approx(chunks, abs=1e-6)


def test_arithmetic_chunk_means_are_a_divergence() -> None:
    """Over a, b, c alone; the id d of the teacher is renormalised away."""
    teacher = TEACHER[:, :3].log_softmax(1)
    forward = projection(STUDENT, teacher, EXAMPLE, MATRIX[:, :3], "forward_kl")
    reverse = projection(STUDENT, teacher, EXAMPLE, MATRIX[:, :3], "reverse_kl")
    assert forward.tolist() == pytest.approx([0.359899, 0.141663], abs=1e-6)
    assert reverse.tolist() == pytest.approx([0.437367, 0.127849], abs=1e-6)


def test_gold() -> None:
    """Common a, b, c and the rest; uncommon ab and d at 0.4 and 0.1, then 0.6 and 0.1."""
    ids = (ints(0, 1, 3), ints(0, 1, 2))
    p = torch.tensor([[0.1, 0.2, 0.6, 0.1], [0.45, 0.3, 0.15, 0.1]], dtype=torch.float64)
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.2, 0.1, 0.1, 0.6]], dtype=torch.float64)
    expected = (p * (p / q).log()).sum(1) + torch.tensor([0.3, 0.5])
    torch.testing.assert_close(gold(STUDENT, TEACHER, EXAMPLE, ids, "forward_kl"), expected)


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_likelihood_of_a_chain(tau: float) -> None:
    """The student's token "201" against the teacher's digits 2, 0, 1."""
    student = logs([0.1, 0.5, 0.2, 0.2])
    teacher = logs([0.05, 0.05, 0.8, 0.1], [0.6, 0.2, 0.1, 0.1], [0.2, 0.5, 0.2, 0.1])
    at = Alignment(ints(0), ints(0, 0, 0), ints(1), ints(2, 0, 1), count=1)
    value = float(likelihood(student, teacher, at, "forward_kl", tau))
    if tau == 1.0:
        assert value == pytest.approx(0.142067, abs=1e-6)
    u = torch.tensor([0.24, 0.76]) ** 1
    u = torch.stack([u[0] ** (1 / tau), 1 - u[0] ** (1 / tau)])
    cross_entropy = value - float((u * u.log()).sum())
    assert cross_entropy == pytest.approx({1.0: 0.693147, 2.0: 0.796164}[tau], abs=1e-6)


def test_rest_class_of_a_top_k() -> None:
    teacher = logs([0.5, 0.2, 0.15, 0.1, 0.05])
    student = logs([0.4, 0.3, 0.1, 0.15, 0.05])
    ids = (torch.arange(5), torch.arange(5))
    expected = {
        1: (0.020411, 0.020136),
        2: (0.030479, 0.032382),
        3: (0.048146, 0.049372),
        5: (0.050752, 0.052655),
    }
    for k, (forward, reverse) in expected.items():
        for name, value in (("forward_kl", forward), ("reverse_kl", reverse)):
            found = common(student, teacher, ONE_TOKEN, ids, name, top_k=k)
            assert float(found) == pytest.approx(value, abs=1e-6)
    renormalized = on_top_k(
        "forward_kl", student, *topk(teacher, 2, 1.0), "renormalized", temperature=1.0
    )
    assert float(renormalized) == pytest.approx(0.043541, abs=1e-6)


def test_prefix_chain_and_rest() -> None:
    """Three chains of digits beside three student tokens, all further texts as one class."""
    student, teacher = logs([0.1, 0.5, 0.2, 0.2]), logs([0.096, 0.24, 0.096, 0.568])
    for name, value in (
        ("forward_kl", 0.342348),
        ("reverse_kl", 0.3091),
        ("js_divergence", 0.078634),
    ):
        assert float(ORACLES[name](teacher, student)) == pytest.approx(value, abs=1e-6)


def test_equal_models_have_no_loss_where_the_published_one_has() -> None:
    rows = logs([0.7, 0.1, 0.1, 0.1], [0.2, 0.5, 0.2, 0.1])
    at = Alignment(ints(0, 0), ints(0, 0), ints(0, 1), ints(0, 1), count=1)
    identity, ids = torch.eye(4, dtype=torch.float64), (torch.arange(4), torch.arange(4))
    forward = published_projection(rows, rows, at, identity)
    reverse = published_projection(rows, rows, at, identity, reverse=True)
    assert float(forward) == pytest.approx(-0.143097, abs=1e-6)
    assert float(reverse) == pytest.approx(0.180049, abs=1e-6)
    assert float(projection(rows, rows, at, identity, "forward_kl")) == 0
    assert float(gold(rows, rows, at, ids, "forward_kl")) == 0
    assert float(uld(rows, rows, at)) == 0
    assert float(likelihood(rows, rows, at, "forward_kl")) == 0

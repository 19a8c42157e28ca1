"""Every divergence on every support against its float64 oracle: values, gradients, temperatures,
dtypes, parameters. Their laws are in test_properties.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import token_divergence
from megatron_distill.ops import VocabShard, vocab_parallel_topk
from megatron_distill.signals import DenseLogits, Sampled, TopK
from tests.reference import divergences as oracles
from tests.reference.distillation import GRADIENT_TOLERANCE, VALUE_TOLERANCE, row_error
from tests.reference.logits import logit_pair
from tests.support.divergence_runs import KEPT_SUPPORTS, NAMES, differentiated, solved

TEMPERATURES = [0.5, 1.0, 2.0, 4.0]
DTYPES = [torch.float32, torch.bfloat16]
# A raw sum has terms of both signs, and may be anything, zero included.
LEAST = {"tail": 0.0, "renormalized": 0.0, "raw": 1.0}
PARAMETERS: list[tuple[str, dict[str, float]]] = [
    ("js_divergence", {"beta": 0.1}),
    ("js_divergence", {"beta": 0.9}),
    ("skewed_forward_kl", {"skew_lambda": 0.7}),
    ("skewed_forward_kl", {"skew_lambda": 0.0}),
    ("skewed_reverse_kl", {"skew_lambda": 0.7}),
    ("skewed_reverse_kl", {"skew_lambda": 0.0}),
    ("adaptive_kl", {"adaptive_alpha": 0.2}),
    ("adaptive_kl", {"adaptive_alpha": 0.9}),
]


def assert_equal(
    found: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    least: float = 0.0,
) -> None:
    """Compare values relative to themselves, or to ``least`` where their parts cancel."""
    error = (found[0] - expected[0]).abs() / expected[0].abs().clamp(min=least)
    assert float(error.max()) < VALUE_TOLERANCE[dtype]
    assert row_error(found[1], expected[1]) < GRADIENT_TOLERANCE[dtype]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_between_logits(name: str, dtype: torch.dtype, temperature: float) -> None:
    student, teacher = logit_pair(20, 1003, dtype=dtype)
    upstream = torch.rand(20, generator=torch.Generator().manual_seed(1)) + 0.1
    found = solved(
        student, DenseLogits(teacher), upstream, divergence=name, temperature=temperature
    )
    expected = differentiated(
        student, lambda leaf: oracles.dense(name, leaf, teacher, temperature), upstream
    )
    assert_equal(found, expected, dtype)


ENDS: list[tuple[str, dict[str, float]]] = [
    ("js_divergence", {"beta": 1e-3}),
    ("js_divergence", {"beta": 1 - 1e-3}),
    ("skewed_forward_kl", {"skew_lambda": 1e-3}),
    ("skewed_forward_kl", {"skew_lambda": 1e-9}),
    ("skewed_reverse_kl", {"skew_lambda": 1e-3}),
    ("skewed_reverse_kl", {"skew_lambda": 1e-9}),
]


@pytest.mark.parametrize(("name", "given"), ENDS)
def test_mixtures_that_are_nearly_one_model(name: str, given: dict[str, float]) -> None:
    # Of one plus something near minus one, few digits would be left.
    student, teacher = logit_pair(20, 307)
    ones = torch.ones(20)
    found = solved(student, DenseLogits(teacher), ones, divergence=name, **given)
    expected = differentiated(
        student, lambda leaf: oracles.dense(name, leaf, teacher, 1.0, **given), ones
    )
    error = (found[0] - expected[0]).abs() / expected[0]
    assert float(error.max()) < 1e-6
    assert row_error(found[1], expected[1]) < 1e-6


MIXTURES: list[tuple[str, dict[str, float]]] = [
    ("js_divergence", {}),
    *(
        (name, given)
        for name, given in PARAMETERS
        if min(given.values()) > 0 and "adapt" not in name
    ),
    ("skewed_forward_kl", {}),
    ("skewed_reverse_kl", {}),
]


@pytest.mark.parametrize(("apart", "value", "gradient"), [(0.5, 1e-6, 2e-6), (0.01, 5e-5, 5e-5)])
@pytest.mark.parametrize(("name", "given"), MIXTURES)
def test_a_student_close_to_its_teacher_has_most_of_its_digits(
    name: str, given: dict[str, float], apart: float, value: float, gradient: float
) -> None:
    # A logarithm of p/m or q/m, each rounded near one, would leave two digits of the value.
    generator = torch.Generator().manual_seed(3)
    teacher = torch.randn(48, 3001, generator=generator) * 2
    student = teacher + torch.randn(48, 3001, generator=generator) * apart
    ones = torch.ones(48)
    found = solved(student, DenseLogits(teacher), ones, divergence=name, **given)
    expected = differentiated(
        student, lambda leaf: oracles.dense(name, leaf, teacher, 1.0, **given), ones
    )
    error = (found[0] - expected[0]).abs() / expected[0]
    assert float(error.max()) < value
    assert row_error(found[1], expected[1]) < gradient


@pytest.mark.parametrize(("name", "given"), PARAMETERS)
def test_parameters(name: str, given: dict[str, float]) -> None:
    student, teacher = logit_pair(20, 307)
    upstream = torch.ones(20)
    found = solved(student, DenseLogits(teacher), upstream, divergence=name, **given)
    expected = differentiated(
        student, lambda leaf: oracles.dense(name, leaf, teacher, 1.0, **given), upstream
    )
    assert_equal(found, expected, torch.float32)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("support", KEPT_SUPPORTS)
@pytest.mark.parametrize("name", NAMES)
def test_on_kept_ids(name: str, support: str, dtype: torch.dtype, temperature: float) -> None:
    student, teacher = logit_pair(20, 503, seed=3, dtype=dtype)
    ids, log_probs, log_tail = oracles.topk(teacher, 16, temperature)
    signal = TopK(ids, log_probs.float(), log_tail.float())
    upstream = torch.rand(20, generator=torch.Generator().manual_seed(1)) + 0.1
    found = solved(
        student, signal, upstream, divergence=name, support=support, temperature=temperature
    )
    expected = differentiated(
        student,
        lambda leaf: oracles.kept(
            name, leaf, ids, signal.log_probs, signal.log_tail, support, temperature
        ),
        upstream,
    )
    assert_equal(found, expected, dtype, least=LEAST[support])


@pytest.mark.parametrize("support", KEPT_SUPPORTS)
@pytest.mark.parametrize(("name", "given"), PARAMETERS)
def test_parameters_on_kept_ids(name: str, given: dict[str, float], support: str) -> None:
    student, teacher = logit_pair(20, 307)
    ids, log_probs, log_tail = oracles.topk(teacher, 9, 1.0)
    signal = TopK(ids, log_probs.float(), log_tail.float())
    upstream = torch.ones(20)
    found = solved(student, signal, upstream, divergence=name, support=support, **given)
    expected = differentiated(
        student,
        lambda leaf: oracles.kept(
            name, leaf, ids, signal.log_probs, signal.log_tail, support, 1.0, **given
        ),
        upstream,
    )
    assert_equal(found, expected, torch.float32, least=LEAST[support])


def test_samples_pull_towards_their_weights() -> None:
    student, teacher = logit_pair(12, 90)
    generator = torch.Generator().manual_seed(4)
    draws = torch.multinomial(teacher.softmax(1), 50, replacement=True, generator=generator)
    counts = torch.zeros(12, 90).scatter_add_(1, draws, torch.ones(12, 50))
    most, ids = counts.topk(40, 1)
    upstream = torch.ones(12)
    found = solved(student, Sampled(ids, most.long()), upstream, divergence="forward_kl")
    weights = (counts / 50).double()
    expected = differentiated(
        student, lambda leaf: -(weights * leaf.log_softmax(1)).sum(1), upstream
    )
    assert_equal(found, expected, torch.float32)


def test_samples_estimate_the_gradient_of_forward_kl_without_bias() -> None:
    student, teacher = logit_pair(1, 12)
    generator = torch.Generator().manual_seed(6)
    rounds = 4000
    draws = torch.multinomial(
        teacher.softmax(1).expand(rounds, -1), 8, replacement=True, generator=generator
    )
    _, gradient = solved(
        student.expand(rounds, -1).contiguous(),
        Sampled(draws, torch.ones_like(draws)),
        torch.ones(rounds),
        divergence="forward_kl",
    )
    _, expected = solved(student, DenseLogits(teacher), torch.ones(1), divergence="forward_kl")
    # Four standard errors of a mean of 4000 draws of 8.
    assert float((gradient.mean(0) - expected[0]).abs().max()) < 4 * 0.5 / (8 * rounds) ** 0.5


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("support", KEPT_SUPPORTS)
def test_a_top_k_may_be_chosen_on_the_way(support: str, temperature: float) -> None:
    student, teacher = logit_pair(7, 60)
    given = {"divergence": "reverse_kl", "support": support, "temperature": temperature}
    kept = vocab_parallel_topk(teacher, 5, temperature=temperature)
    expected = solved(student, kept, torch.ones(7), **given)
    found = solved(student, DenseLogits(teacher), torch.ones(7), top_k=5, **given)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    with pytest.raises(
        ValueError, match="has top_k 3, but the signal has only 5 ids per token; remove top_k"
    ):
        solved(student, kept, torch.ones(7), top_k=3, **given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("support", ["dense", *KEPT_SUPPORTS])
def test_overwriting_the_logits_changes_nothing_else(support: str, dtype: torch.dtype) -> None:
    student, teacher = logit_pair(7, 60, dtype=dtype)
    shard = VocabShard(55, 0, 60)
    signal: Any = DenseLogits(teacher)
    if support != "dense":
        signal = vocab_parallel_topk(teacher, 5, shard)
    upstream = torch.tensor([1.0, 2.0, 0.5, 0.0, 4.0, 1.0, 8.0])
    given = {
        "divergence": "js_divergence",
        "support": "tail" if support == "dense" else support,
        "shard": shard,
    }
    expected = solved(student, signal, upstream, **given)
    leaf = student.clone().requires_grad_()
    logits = leaf * 1
    value = token_divergence(logits, signal, overwrite_logits=True, **given)
    (gradient,) = torch.autograd.grad(value, leaf, upstream, retain_graph=True)
    torch.testing.assert_close((value.detach(), gradient), expected, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="given away by the first backward pass"):
        torch.autograd.grad(value, leaf, upstream)
    assert logits.data_ptr() != leaf.data_ptr()
    assert not logits.detach()[:, 55:].any()


def test_entries_of_minus_infinity_are_not_kept() -> None:
    student, teacher = logit_pair(5, 40)
    kept = vocab_parallel_topk(teacher, 6)
    padded = TopK(
        torch.cat([kept.ids, kept.ids[:, :3]], 1),
        torch.cat([kept.log_probs, torch.full((5, 3), -torch.inf)], 1),
        kept.log_tail,
    )
    for name in NAMES:
        for support in KEPT_SUPPORTS:
            plain = solved(student, kept, torch.ones(5), divergence=name, support=support)
            found = solved(student, padded, torch.ones(5), divergence=name, support=support)
            torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-8)


def test_combinations_that_are_not_defined() -> None:
    student, teacher = logit_pair(5, 40)
    sampled = Sampled(torch.zeros(5, 3, dtype=torch.int64), torch.ones(5, 3))
    with pytest.raises(ValueError, match="js_divergence is not defined on sampled ids"):
        token_divergence(student, sampled, divergence="js_divergence")
    at_one = vocab_parallel_topk(teacher, 3)
    with pytest.raises(ValueError, match="at temperature 2, the top-k at 1"):
        token_divergence(student, at_one, divergence="forward_kl", temperature=2.0)
    cooled = token_divergence(
        student, at_one, divergence="forward_kl", temperature=2.0, support="renormalized"
    )
    at_two = vocab_parallel_topk(teacher, 3, temperature=2.0)
    expected = token_divergence(
        student, at_two, divergence="forward_kl", temperature=2.0, support="renormalized"
    )
    torch.testing.assert_close(cooled, expected, rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="support of forward_kl is 'ghost'; known: tail"):
        token_divergence(student, at_one, divergence="forward_kl", support="ghost")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="forward_kl takes no parameter, not 'beta'"):
        token_divergence(student, at_one, divergence="forward_kl", beta=0.5)
    with pytest.raises(ValueError, match="beta is 1.5; it must be between 0 and 1"):
        token_divergence(student, at_one, divergence="js_divergence", beta=1.5)

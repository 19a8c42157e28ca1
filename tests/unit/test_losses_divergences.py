"""Every divergence on every support against its float64 oracle: values, gradients, temperatures,
dtypes, parameters, exact zeros, rows that sum to zero, degenerate rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_distill.losses import token_divergence
from megatron_distill.ops import VocabShard, vocab_parallel_topk
from megatron_distill.signals import DenseLogits, Sampled, TopK
from tests.reference import divergences as oracles
from tests.reference.distillation import GRADIENT_TOLERANCE, VALUE_TOLERANCE, row_error

NAMES = list(oracles.ORACLES)
TEMPERATURES = [0.5, 1.0, 2.0, 4.0]
DTYPES = [torch.float32, torch.bfloat16]
SUPPORTS = ["tail", "renormalized", "raw"]
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


def logit_pair(
    tokens: int, vocab: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, tokens, vocab, generator=generator, dtype=torch.float64) * 2
    return student.to(dtype), teacher.to(dtype)


def solved(student: Tensor, signal: Any, upstream: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    leaf = student.detach().requires_grad_()
    value = token_divergence(leaf, signal, **given)
    (gradient,) = torch.autograd.grad(value, leaf, upstream.to(value.dtype))
    return value.detach(), gradient


def differentiated(student: Tensor, oracle: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
    leaf = student.detach().double().requires_grad_()
    value = oracle(leaf)
    (gradient,) = torch.autograd.grad(value, leaf, upstream.double())
    return value.detach(), gradient


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
@pytest.mark.parametrize("support", SUPPORTS)
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


@pytest.mark.parametrize("support", SUPPORTS)
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
@pytest.mark.parametrize("support", SUPPORTS)
def test_a_top_k_may_be_chosen_on_the_way(support: str, temperature: float) -> None:
    student, teacher = logit_pair(7, 60)
    given = {"divergence": "reverse_kl", "support": support, "temperature": temperature}
    kept = TopK(*vocab_parallel_topk(teacher, 5, temperature=temperature))
    expected = solved(student, kept, torch.ones(7), **given)
    found = solved(student, DenseLogits(teacher), torch.ones(7), top_k=5, **given)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="top_k is 3, but the signal is one of few ids already"):
        solved(student, kept, torch.ones(7), top_k=3, **given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("support", ["dense", *SUPPORTS])
def test_overwriting_the_logits_changes_nothing_else(support: str, dtype: torch.dtype) -> None:
    student, teacher = logit_pair(7, 60, dtype=dtype)
    shard = VocabShard(55, 0, 60)
    signal: Any = DenseLogits(teacher)
    if support != "dense":
        signal = TopK(*vocab_parallel_topk(teacher, 5, shard))
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
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(value, leaf, upstream)
    assert logits.data_ptr() != leaf.data_ptr()
    assert not logits.detach()[:, 55:].any()


@pytest.mark.parametrize("name", NAMES)
def test_all_ids_kept_is_the_whole_vocabulary(name: str) -> None:
    student, teacher = logit_pair(9, 60)
    signal = TopK(*vocab_parallel_topk(teacher, 60))
    assert bool((signal.log_tail == -torch.inf).all())
    upstream = torch.ones(9)
    whole = solved(student, DenseLogits(teacher), upstream, divergence=name)
    for support in SUPPORTS:
        found = solved(student, signal, upstream, divergence=name, support=support)
        torch.testing.assert_close(found[0], whole[0], rtol=2e-6, atol=1e-7)
        assert row_error(found[1], whole[1].double()) < 2e-6


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), temperature=st.sampled_from(TEMPERATURES))
@pytest.mark.parametrize("name", NAMES)
def test_equal_models_have_exactly_zero_loss_and_gradient(
    name: str, seed: int, temperature: float
) -> None:
    logits, _ = logit_pair(6, 200, seed)
    for dtype in DTYPES:
        student = (logits * 5).to(dtype)
        signals: list[tuple[Any, str]] = [(DenseLogits(student.clone()), "tail")]
        kept = TopK(*vocab_parallel_topk(student, 7, temperature=temperature))
        signals += [(kept, support) for support in SUPPORTS]
        for signal, support in signals:
            value, gradient = solved(
                student,
                signal,
                torch.ones(6),
                divergence=name,
                temperature=temperature,
                support=support,
            )
            assert not value.any(), support
            # A raw sum is not least where the models are equal.
            assert support == "raw" or not gradient.any(), support


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.01, 1.0, 20.0]))
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_the_gradient_sum_to_zero(name: str, seed: int, spread: float) -> None:
    student, teacher = (logits * spread for logits in logit_pair(4, 130, seed))
    signals: list[tuple[Any, str]] = [(DenseLogits(teacher), "tail")]
    signals += [(TopK(*vocab_parallel_topk(teacher, 5)), support) for support in SUPPORTS]
    for signal, support in signals:
        value, gradient = solved(student, signal, torch.ones(4), divergence=name, support=support)
        assert bool(value.isfinite().all())
        # Slopes are differences of logits, and rounded like these.
        assert float(gradient.sum(1).abs().max()) < 1e-5 * max(1.0, spread)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "adaptive_kl"])
def test_gradcheck_through_the_public_entry(name: str, support: str) -> None:
    # Not of adaptive_kl, whose blend is a constant to the gradient and not to finite differences.
    student, teacher = logit_pair(4, 11, dtype=torch.float64)
    shard = VocabShard(9, 0, 11)
    for signal in (
        DenseLogits(teacher),
        TopK(*vocab_parallel_topk(teacher, 3, shard, temperature=2.0)),
    ):
        assert torch.autograd.gradcheck(
            lambda logits, signal=signal: token_divergence(
                logits,
                signal,
                divergence=name,
                temperature=2.0,
                scale_by_temperature_squared=True,
                support=support,
                shard=shard,
            ),
            student.requires_grad_(),
        )


@pytest.mark.parametrize("name", NAMES)
def test_point_masses_that_agree_and_disagree(name: str) -> None:
    student = torch.full((2, 50), -200.0)
    teacher = student.clone()
    student[:, 3] = 200.0
    teacher[0, 3] = teacher[1, 4] = 200.0
    signals: list[tuple[Any, str]] = [(DenseLogits(teacher), "tail")]
    signals += [(TopK(*vocab_parallel_topk(teacher, 2)), support) for support in SUPPORTS]
    for signal, support in signals:
        value, gradient = solved(student, signal, torch.ones(2), divergence=name, support=support)
        assert bool(value.isfinite().all()), support
        assert bool(gradient.isfinite().all()), support
        assert float(value[0]) == 0.0
        assert support == "raw" or float(value[1]) > 0.2


def test_entries_of_minus_infinity_are_not_kept() -> None:
    student, teacher = logit_pair(5, 40)
    kept = TopK(*vocab_parallel_topk(teacher, 6))
    padded = TopK(
        torch.cat([kept.ids, kept.ids[:, :3]], 1),
        torch.cat([kept.log_probs, torch.full((5, 3), -torch.inf)], 1),
        kept.log_tail,
    )
    for name in NAMES:
        for support in SUPPORTS:
            plain = solved(student, kept, torch.ones(5), divergence=name, support=support)
            found = solved(student, padded, torch.ones(5), divergence=name, support=support)
            torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-8)


def test_combinations_that_are_not_defined() -> None:
    student, teacher = logit_pair(5, 40)
    sampled = Sampled(torch.zeros(5, 3, dtype=torch.int64), torch.ones(5, 3))
    with pytest.raises(ValueError, match="js_divergence is not defined on sampled ids"):
        token_divergence(student, sampled, divergence="js_divergence")
    at_one = TopK(*vocab_parallel_topk(teacher, 3), temperature=1.0)
    with pytest.raises(ValueError, match="at temperature 2, the top-k at 1"):
        token_divergence(student, at_one, divergence="forward_kl", temperature=2.0)
    cooled = token_divergence(
        student, at_one, divergence="forward_kl", temperature=2.0, support="renormalized"
    )
    at_two = TopK(*vocab_parallel_topk(teacher, 3, temperature=2.0), temperature=2.0)
    expected = token_divergence(
        student, at_two, divergence="forward_kl", temperature=2.0, support="renormalized"
    )
    torch.testing.assert_close(cooled, expected, rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="support of forward_kl is 'ghost'; known: tail"):
        token_divergence(student, at_one, divergence="forward_kl", support="ghost")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="forward_kl takes no parameter, not 'beta'"):
        token_divergence(student, at_one, divergence="forward_kl", beta=0.5)
    with pytest.raises(ValueError, match="beta is 1.0; it must be between 0 and 1"):
        token_divergence(student, at_one, divergence="js_divergence", beta=1.0)

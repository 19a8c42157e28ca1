"""Every divergence on every support against its float64 oracle: values, gradients, temperatures,
dtypes, parameters. Their laws are in test_properties.py."""

from __future__ import annotations

from functools import cache
from itertools import product
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
from tests.support.divergence_runs import (
    KEPT_SUPPORTS,
    NAMES,
    PAIRWISE,
    REPRESENTATIVE,
    differentiated,
    signal_of,
    solved,
)
from tests.support.divergence_runs import expected as oracle_of

DTYPES = [torch.float32, torch.bfloat16]
# Every divergence once, representatives also at the ends of temperatures and in bf16, the supports
# by turns; all of them at each temperature, on shards:
# tests/distributed/losses/test_divergences_tensor_parallel.py.
SETTINGS = [
    (torch.float32, 2.0),
    (torch.float32, 0.5),
    (torch.bfloat16, 4.0),
    (torch.bfloat16, 1.0),
]
GRID: list[tuple[str, dict[str, float], torch.dtype, float]] = [
    (name, {}, dtype, temperature)
    for name in NAMES
    for dtype, temperature in (SETTINGS if name in REPRESENTATIVE else SETTINGS[:1])
]
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

# Nearly one model: of one plus something near minus one, few digits would be left.
ENDS: list[tuple[str, dict[str, float]]] = [
    ("js_divergence", {"beta": 1e-3}),
    ("js_divergence", {"beta": 1 - 1e-3}),
    ("skewed_forward_kl", {"skew_lambda": 1e-3}),
    ("skewed_forward_kl", {"skew_lambda": 1e-9}),
    ("skewed_reverse_kl", {"skew_lambda": 1e-3}),
    ("skewed_reverse_kl", {"skew_lambda": 1e-9}),
]


def assert_equal(
    found: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    least: float = 0.0,
) -> None:
    """Compare values relative to themselves, or to ``least`` where their parts cancel."""
    assert found[0].dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert found[1].dtype is dtype
    error = (found[0] - expected[0]).abs() / expected[0].abs().clamp(min=least)
    assert float(error.max()) < VALUE_TOLERANCE[dtype]
    assert row_error(found[1], expected[1]) < GRADIENT_TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("name", "given", "dtype", "temperature"),
    [
        *GRID,
        ("forward_kl", {}, torch.float64, 0.5),
        *((*one, torch.float32, 1.0) for one in [*PARAMETERS, *ENDS]),
    ],
)
def test_defect_08_between_logits_with_an_upstream_gradient_per_token(
    name: str, given: dict[str, float], dtype: torch.dtype, temperature: float
) -> None:
    # Liger-Kernel's fused cross-entropy once applied it after the sum over tokens: reduction="none"
    # gave every token the same factor.
    student, teacher = logit_pair(20, 1003, dtype=dtype)
    upstream = torch.rand(20, generator=torch.Generator().manual_seed(1)) + 0.1
    upstream[:6] = torch.tensor([1.0, -3.0, 0.0, 1e-3, 40.0, 0.25])
    found = solved(
        student, DenseLogits(teacher), upstream, divergence=name, temperature=temperature, **given
    )
    expected = differentiated(
        student, lambda leaf: oracles.dense(name, leaf, teacher, temperature, **given), upstream
    )
    assert_equal(found, expected, dtype)


@pytest.mark.parametrize(
    ("name", "given", "dtype", "temperature", "support"),
    [
        (*case, KEPT_SUPPORTS[number % 3])
        for number, case in enumerate([*GRID, *((*one, torch.float32, 1.0) for one in PARAMETERS)])
    ],
)
def test_on_top_k_ids(
    name: str, given: dict[str, float], dtype: torch.dtype, temperature: float, support: str
) -> None:
    student, teacher = logit_pair(20, 503, seed=3, dtype=dtype)
    ids, log_probs, log_tail = oracles.topk(teacher, 16, temperature)
    signal = TopK(ids, log_probs.float(), log_tail.float())
    upstream = torch.rand(20, generator=torch.Generator().manual_seed(1)) + 0.1
    upstream[:3] = torch.tensor([-3.0, 0.0, 40.0])
    arguments = {"divergence": name, "support": support, "temperature": temperature, **given}
    found = solved(student, signal, upstream, **arguments)
    expected = differentiated(
        student,
        lambda leaf: oracles.on_top_k(
            name, leaf, ids, signal.log_probs, signal.log_tail, support, temperature, **given
        ),
        upstream,
    )
    assert_equal(found, expected, dtype, least=LEAST[support])


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


def test_entries_of_minus_infinity_are_not_in_the_top_k() -> None:
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
    with pytest.raises(ValueError, match="beta is 1.5; it must be between 0 and 1"):
        token_divergence(student, at_one, divergence="js_divergence", beta=1.5)


@pytest.mark.parametrize(("name", "support"), PAIRWISE)
def test_defect_03_temperature_squared_is_on_loss_and_gradient(name: str, support: str) -> None:
    # Axolotl multiplied the loss by T^2 and formed the gradient without it.
    student, teacher = logit_pair(3, 11, dtype=torch.float64)
    for temperature in (0.5, 3.0):
        plain, scaled = (
            solved(
                student,
                signal_of(support, teacher, k=3, temperature=temperature),
                torch.ones(3),
                divergence=name,
                support=support,
                temperature=temperature,
                scale_by_temperature_squared=scale,
            )
            for scale in (False, True)
        )
        for ours, other in zip(scaled, plain, strict=True):
            torch.testing.assert_close(ours, other * temperature**2, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("name", "support"), PAIRWISE)
def test_defect_04_padding_of_unequal_width_carries_no_probability(name: str, support: str) -> None:
    # Liger-Kernel filled the narrower vocabulary with zeros: e^0 each, where -inf was meant.
    student, teacher = logit_pair(4, 50)
    given = {"divergence": name, "support": support}
    plain = solved(student, signal_of(support, teacher), torch.ones(4), **given)
    for extra, garbage in product((0, 3, 30), (0.0, 1e4, torch.nan, torch.inf)):
        wide = torch.nn.functional.pad(student, (0, 14), value=garbage)
        other = torch.nn.functional.pad(teacher, (0, extra), value=garbage)
        signal = signal_of(support, other, shard=VocabShard(50, 0, 50 + extra))
        value, gradient = solved(wide, signal, torch.ones(4), shard=VocabShard(50, 0, 64), **given)
        torch.testing.assert_close((value, gradient[:, :50]), plain, rtol=0, atol=0)
        assert not gradient[:, 50:].any()


@cache
def large_pair() -> tuple[Tensor, Tensor]:
    """Teachers that like best the last of 2^18 ids, and one just above 2^17."""
    student, teacher = logit_pair(2, 2**18)
    teacher[:, 2**18 - 1] = 14.0
    teacher[:, 2**17 + 1] = 13.0
    return student, teacher


@pytest.mark.parametrize(
    ("name", "support"), [one for one in PAIRWISE if one[1] in ("dense", "tail")]
)
def test_defect_07_large_vocabularies(name: str, support: str) -> None:
    # Megatron-LM's stored logits have 17 bits per id, and SpecForge's blocks ended at 131,072.
    student, teacher = large_pair()
    signal = signal_of(support, teacher)
    found = solved(student, signal, torch.ones(2), divergence=name, support=support)
    value, gradient = oracle_of(student, signal, torch.ones(2), divergence=name, support=support)
    torch.testing.assert_close(found[0].double(), value, rtol=1e-6, atol=0)
    assert row_error(found[1], gradient) < 2e-6


def test_defect_07_ids_of_large_vocabularies_are_whole() -> None:
    _, teacher = large_pair()
    kept = vocab_parallel_topk(teacher, 6)
    ids, log_probs, log_tail = oracles.topk(teacher, 6, 1.0)
    assert kept.ids[:, :2].tolist() == [[2**18 - 1, 2**17 + 1]] * 2
    assert torch.equal(kept.ids, ids)
    torch.testing.assert_close(kept.log_probs.double(), log_probs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(kept.log_tail.double(), log_tail, rtol=1e-6, atol=1e-6)
    # Ids travel as fp32 between ranks, which count up to 2^24.
    last = VocabShard(2**24, 2**24 - 8, 2**24)
    logits = torch.arange(8.0).flip(0).view(1, 8)
    assert vocab_parallel_topk(logits, 8, last).ids.tolist() == [[*range(2**24 - 8, 2**24)]]
    with pytest.raises(ValueError, match="size is 16777217; .* up to 16777216"):
        VocabShard(2**24 + 1, 0, 8)


@pytest.mark.parametrize(("name", "support"), PAIRWISE)
def test_defect_06_inputs_are_as_they_were(name: str, support: str) -> None:
    # Megatron-LM's cached distillation subtracted the maximum in place from `.float()`, which is
    # the caller's own tensor where that is fp32 already.
    student, teacher = logit_pair(5, 40)
    upstream = torch.tensor([1.0, 0.0, 2.0, 1.0, -1.0])
    signals: list[Any] = [signal_of(support, teacher, temperature=2.0), DenseLogits(teacher)]
    given: dict[str, Any] = {"divergence": name, "temperature": 2.0}
    kept: dict[str, Any] = {} if support == "dense" else {"top_k": 3, "support": support}
    tensors = [student, upstream, teacher, *vars(signals[0]).values()]
    tensors = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    before = [tensor.clone() for tensor in tensors]

    def both() -> Any:
        return (
            solved(student, signals[0], upstream, support=support, **given),
            solved(student, signals[1], upstream, **given, **kept),
        )

    # Nor do kernels that work in place give something else when they run again.
    torch.testing.assert_close(both(), both(), rtol=0, atol=0)
    torch.testing.assert_close(tensors, before, rtol=0, atol=0)


def test_defect_06_samples_are_as_they_were() -> None:
    student, _ = logit_pair(5, 40)
    ids = torch.arange(20).view(5, 4)
    before = student.clone(), ids.clone(), ids.clone()
    signal = Sampled(ids, ids.clone())
    solved(student, signal, torch.ones(5), divergence="forward_kl", temperature=2.0)
    torch.testing.assert_close((student, signal.ids, signal.counts), before, rtol=0, atol=0)

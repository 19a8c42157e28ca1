"""Defects of value and gradient that shipped losses had: T^2 on one of them alone, upstream factors
applied to a sum, a mean taken twice, log-probabilities in bf16.

The list of all of them is in tests/guards/test_known_defects.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import Term, fused_linear_objective, token_divergence, token_weights
from megatron_distill.ops import VocabShard
from megatron_distill.signals import DenseLogits, HiddenState
from tests.reference import divergences as oracles
from tests.reference.distillation import Problem, row_error
from tests.reference.logits import logit_pair
from tests.support.divergence_runs import (
    EACH,
    KEPT,
    MAINLY,
    NAMES,
    SUPPORTS,
    expected,
    signal_of,
    solved,
    term_of,
)
from tests.support.objective_runs import run

# The blend of adaptive KL is a constant to the gradient and not to finite differences.
SMOOTH = [case for case in EACH if case[0] != "adaptive_kl"]
SMOOTH_MAINLY = [case for case in MAINLY if case.values[0] != "adaptive_kl"]
# A raw sum has terms of both signs, and may be anything, zero included.
LEAST = dict.fromkeys(SUPPORTS, 0.0) | {"raw": 1.0}


@pytest.mark.parametrize("temperature", [pytest.param(0.5, marks=pytest.mark.slow), 3.0])
@pytest.mark.parametrize(("name", "support"), SMOOTH)
def test_defect_03_temperature_squared_is_on_loss_and_gradient(
    name: str, support: str, temperature: float
) -> None:
    # Axolotl multiplied the loss by T^2 and formed the gradient without it.
    student, teacher = logit_pair(3, 11, dtype=torch.float64)
    shard = VocabShard(9, 0, 11)
    signal = signal_of(support, teacher, k=3, temperature=temperature, shard=shard)

    def loss(logits: Tensor) -> Tensor:
        return token_divergence(
            logits,
            signal,
            divergence=name,
            temperature=temperature,
            scale_by_temperature_squared=True,
            support="tail" if support == "dense" else support,  # type: ignore[arg-type]
            shard=shard,
        )

    assert torch.autograd.gradcheck(loss, student.requires_grad_())


@pytest.mark.parametrize(("name", "support"), SMOOTH_MAINLY)
def test_defect_03_temperature_squared_in_the_fused_objective(name: str, support: str) -> None:
    temperature = 3.0
    problem = Problem.random(3, 2, 6, seed=5, dtype=torch.float64)
    signal = HiddenState(problem.teacher_hidden, problem.teacher_weight, 4.0, 0.5)
    scaled, plain = (
        term_of(
            name,
            support,
            k=3,
            weight=0.5,
            temperature=temperature,
            scale_by_temperature_squared=scale,
        )
        for scale in (True, False)
    )

    def loss(hidden: Tensor, weight: Tensor, term: Term = scaled) -> Tensor:
        return fused_linear_objective(
            hidden,
            weight,
            signal,
            problem.labels_N,
            ce_weights=problem.ce_weights_N,
            kd_weights=problem.kd_weights_N,
            terms=[term],
            chunk_tokens=3,
            ce_coefficient=0.0,
            student_softcap=3.0,
            student_scale=0.5,
        )[0]

    leaves = problem.hidden_NH.requires_grad_(), problem.weight_GH.requires_grad_()
    assert torch.autograd.gradcheck(loss, leaves)
    with_factor, without = (
        torch.autograd.grad(loss(*leaves, term), leaves) for term in (scaled, plain)
    )
    for ours, other in zip(with_factor, without, strict=True):
        torch.testing.assert_close(ours, other * temperature**2)


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 2.0])
@pytest.mark.parametrize(("name", "support"), EACH)
def test_defect_08_every_token_has_its_own_upstream_gradient(
    name: str, support: str, temperature: float
) -> None:
    # Liger-Kernel's fused cross-entropy once applied it after the sum over tokens: reduction="none"
    # gave every token the same factor.
    student, teacher = logit_pair(6, 90)
    signal = signal_of(support, teacher, temperature=temperature)
    upstream = torch.tensor([1.0, -3.0, 0.0, 1e-3, 40.0, 0.25])
    given = {"divergence": name, "support": support, "temperature": temperature}
    found = solved(student, signal, upstream, **given)
    value, gradient = expected(student, signal, upstream, **given)  # type: ignore[arg-type]
    assert found[0].shape == (6,)
    error = (found[0] - value).abs() / value.abs().clamp(min=LEAST[support])
    assert float(error.max()) < 1e-6
    assert row_error(found[1], gradient) < 1e-6


def one_step(problem: Problem, terms: list[Term], parts: list[slice]) -> tuple[Tensor, Tensor]:
    """The loss of a batch in micro-batches, and its head after one step of SGD."""
    weight = problem.weight_GH.detach().clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    mask = problem.kd_weights_N != 0
    weights = token_weights(mask, int(mask.sum()))
    loss = torch.zeros(())
    for rows in parts:
        total, _ = fused_linear_objective(
            problem.hidden_NH[rows],
            weight,
            HiddenState(problem.teacher_hidden[rows], problem.teacher_weight),
            problem.labels_N[rows],
            ce_weights=weights[rows],
            kd_weights=weights[rows],
            terms=terms,
            chunk_tokens=4,
        )
        total.backward()
        loss += total.detach()
    optimizer.step()
    return loss, weight.detach()


@pytest.mark.parametrize(("name", "support"), MAINLY)
def test_defect_09_the_mean_is_taken_once_however_a_batch_is_split(name: str, support: str) -> None:
    # Torchtune normalised by the tokens of a micro-batch, and then again by those of the batch.
    problem = Problem.random(13, 6, 50)
    terms = [term_of(name, support)]
    whole = one_step(problem, terms, [slice(0, 13)])
    # Micro-batches of unequal mask; one of them is empty.
    for parts in (
        [slice(0, 2), slice(2, 13)],
        [slice(0, 1), slice(1, 9), slice(9, 9), slice(9, 13)],
    ):
        split = one_step(problem, terms, parts)
        torch.testing.assert_close(split[0], whole[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(split[1], whole[1], rtol=1e-6, atol=1e-7)
    counted = problem.kd_weights_N != 0
    hidden, weight = (
        problem.hidden_NH[counted].double(),
        problem.weight_GH.double().requires_grad_(),
    )
    student, labels = hidden @ weight.t(), problem.labels_N[counted]
    teacher = (problem.teacher_hidden[counted] @ problem.teacher_weight.t()).double()
    if support == "dense":
        value = oracles.dense(name, student, teacher, 1.0)
    else:
        value = oracles.kept(name, student, *oracles.topk(teacher, KEPT, 1.0), support, 1.0)
    loss = value.mean() + torch.nn.functional.cross_entropy(student, labels)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert float(whole[0]) == pytest.approx(float(loss.detach()), rel=1e-6)
    moved = (weight - 0.5 * gradient).detach()
    torch.testing.assert_close(whole[1].double(), moved, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 2.0])
@pytest.mark.parametrize(("name", "support"), EACH)
def test_defect_13_bf16_logits_do_not_make_bf16_probabilities(
    name: str, support: str, temperature: float
) -> None:
    # TRL took log-probabilities in bf16, and their difference is what a divergence is.
    student, teacher = logit_pair(8, 1000, dtype=torch.bfloat16)
    close = (teacher.float() + 0.3 * student.float()).bfloat16()
    given = {"divergence": name, "support": support, "temperature": temperature}
    signal = signal_of(support, teacher, temperature=temperature)
    for logits in (student, close):
        found, _ = solved(logits, signal, torch.ones(8), **given)
        value, _ = expected(logits, signal, torch.ones(8), **given)  # type: ignore[arg-type]
        error = (found - value).abs() / value.abs().clamp(min=LEAST[support] / 10)
        assert found.dtype is torch.float32
        assert float(error.max()) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_defect_13_would_show(name: str) -> None:
    # The same formula on log-probabilities in bf16 is wrong by a hundred times that bound.
    student, teacher = logit_pair(8, 1000, dtype=torch.bfloat16)
    close = (teacher.float() + 0.3 * student.float()).bfloat16()
    log_p, log_q = (logits.log_softmax(1).double() for logits in (teacher, close))
    rounded = oracles.ORACLES[name](log_p, log_q)
    exact = oracles.dense(name, close, teacher, 1.0)
    assert float((rounded / exact - 1).abs().max()) > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_defect_13_in_the_fused_objective(name: str) -> None:
    # The products are bf16, and so are the logits, as the oracle is given them.
    problem = Problem.random(8, 6, 1000, dtype=torch.bfloat16)
    problem = problem.with_weights(torch.zeros(8), torch.full((8,), 1 / 8))
    report = run(problem, [Term(name)], chunk_tokens=8)[1]
    student = problem.hidden_NH @ problem.weight_GH.t()
    teacher = problem.teacher_hidden @ problem.teacher_weight.t()
    value = oracles.dense(name, student, teacher, 1.0).mean()
    assert float(report[name]) == pytest.approx(float(value), rel=1e-6)
    given = run(problem, [Term(name)], signal=DenseLogits(teacher))[1]
    assert float(given[name]) == pytest.approx(float(value), rel=1e-6)
    alone = replace(problem, labels_N=problem.labels_N.fill_(-100))
    assert float(run(alone, [Term(name)])[0]) == pytest.approx(float(value), rel=1e-6)

"""The fused objective against its float64 oracle: total, report and gradients in fp32 and bf16,
several terms, soft-caps and scales, every kind of teacher."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import Term, token_divergence
from megatron_distill.ops import vocab_parallel_topk
from megatron_distill.signals import DenseLogits, HiddenState
from tests.reference.distillation import Problem, row_error, solve
from tests.support.objective_runs import objective, run


@pytest.mark.parametrize(
    ("temperature", "ce_coefficient"), [(0.5, 0.7), (1.0, 0.0), (2.0, 0.7), (4.0, 0.0)]
)
def test_total_report_and_gradients_equal_the_oracle(
    temperature: float, ce_coefficient: float
) -> None:
    problem = Problem.random(vocab=1003, seed=1)
    term = Term(weight=0.3, temperature=temperature)
    total, report, hidden, weight = run(problem, [term], ce_coefficient=ce_coefficient)
    answer = solve(problem, [(0.3, temperature)], ce_coefficient=ce_coefficient)
    assert float(total) == pytest.approx(float(answer.total), rel=1e-6)
    assert total.dtype is torch.float32
    # Of a row's largest entry, over the sum of a thousand columns that cancel.
    assert row_error(hidden, answer.hidden_gradient) < 2e-6
    assert float((weight - answer.weight_gradient).abs().max()) < 1e-6 * float(
        answer.weight_gradient.abs().max()
    )
    for name, expected in answer.report.items():
        assert float(report[name]) == pytest.approx(float(expected), rel=1e-6), name
        assert not report[name].requires_grad
    assert float(report[term.name]) == pytest.approx(float(answer.report["kd"]) / 0.3, rel=1e-6)


def test_bf16_products_with_fp32_statistics() -> None:
    problem = Problem.random(vocab=1003, seed=3, dtype=torch.bfloat16)
    total, report, hidden, weight = run(problem, [Term(temperature=2.0)])

    class Bf16Product(torch.autograd.Function):
        """The product as the hardware rounds it, with the gradient of the exact one."""

        @staticmethod
        def forward(ctx, left: Tensor, right: Tensor) -> Tensor:
            ctx.save_for_backward(left, right)
            return (left.bfloat16() @ right.bfloat16()).double()

        @staticmethod
        def backward(ctx, upstream: Tensor) -> tuple[Tensor, Tensor]:
            left, right = ctx.saved_tensors
            return upstream @ right.t(), left.t() @ upstream

    answer = solve(problem, [(1.0, 2.0)], product=Bf16Product.apply)
    assert total.dtype is torch.float32
    assert (hidden.dtype, weight.dtype) == (torch.bfloat16, torch.bfloat16)
    assert float(total) == pytest.approx(float(answer.total), rel=1e-6)
    for name, expected in answer.report.items():
        assert float(report[name]) == pytest.approx(float(expected), rel=2e-6), name
    assert row_error(hidden, answer.hidden_gradient) < 2e-2
    error = (weight.double() - answer.weight_gradient).abs().max()
    assert float(error) < 2e-2 * float(answer.weight_gradient.abs().max())


def test_labels_alone_need_no_teacher() -> None:
    problem = Problem.random(seed=14)
    hidden = problem.hidden_NH.requires_grad_()
    total, report = objective(
        problem, hidden, problem.weight_GH, terms=[], is_taught=False, ce_coefficient=2.0
    )
    answer = solve(problem, [], ce_coefficient=2.0)
    assert set(report) == {"ce"}
    assert float(total.detach()) == pytest.approx(float(answer.total), rel=1e-6)
    assert float(report["ce"]) == pytest.approx(float(answer.report["ce"]), rel=1e-6)
    (gradient,) = torch.autograd.grad(total, hidden)
    assert row_error(gradient, answer.hidden_gradient) < 2e-6


def test_a_teacher_without_terms_is_only_reported() -> None:
    problem = Problem.random(seed=15)
    total, report, hidden, _ = run(problem, [])
    answer = solve(problem, [])
    assert float(total) == pytest.approx(float(answer.total), rel=1e-6)
    assert row_error(hidden, answer.hidden_gradient) < 2e-6
    assert float(report["kd"]) == 0.0
    expected = float(answer.report["teacher_entropy"])
    assert float(report["teacher_entropy"]) == pytest.approx(expected, rel=1e-6)


def test_teacher_gets_no_gradient() -> None:
    problem = Problem.random(seed=17)
    teacher = problem.teacher_hidden.requires_grad_(), problem.teacher_weight.requires_grad_()
    hidden = problem.hidden_NH.requires_grad_()
    objective(problem, hidden, problem.weight_GH, HiddenState(*teacher))[0].backward()
    assert problem.hidden_NH.grad is not None
    assert [leaf.grad for leaf in teacher] == [None, None]


def test_defect_02_hidden_states_of_three_dimensions_are_refused() -> None:
    # TRL's chunked JSD cut the batch axis of [b, s, H]: with b = 1 nothing was chunked.
    problem = Problem.random(24)
    for shape in ((1, 24, 12), (2, 12, 12), (24, 1, 12)):
        with pytest.raises(ValueError, match=rf"hidden is .* of shape \({shape[0]}, {shape[1]}, "):
            run(replace(problem, hidden_NH=problem.hidden_NH.reshape(shape)))
    with pytest.raises(ValueError, match=r"HiddenState.hidden is .* of shape \(2, 12, 16\)"):
        HiddenState(problem.teacher_hidden.reshape(2, 12, 16), problem.teacher_weight)
    with pytest.raises(ValueError, match=r"DenseLogits.logits is .* of shape \(2, 3, 5\)"):
        token_divergence(
            torch.zeros(2, 3, 5), DenseLogits(torch.zeros(6, 5)), divergence="forward_kl"
        )
    with pytest.raises(ValueError, match=r"logits are \(2, 3, 5\)"):
        vocab_parallel_topk(torch.zeros(2, 3, 5), 2)
    # A second dimension beside the tokens would be broadcast against them.
    for name in ("ce_weights", "kd_weights"):
        with pytest.raises(
            ValueError, match=rf"{name} is of shape \(24, 1\); .* each of 24 tokens"
        ):
            run(replace(problem, **{f"{name}_N": torch.ones(24, 1)}), rows=torch.arange(24))
    with pytest.raises(ValueError, match=r"labels is of shape \(2, 12\)"):
        run(replace(problem, labels_N=problem.labels_N.view(2, 12)))


def test_misuse_is_named() -> None:
    problem = Problem.random()
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        run(problem, chunk_tokens=0)
    with pytest.raises(ValueError, match="labels has 22 rows for 23 tokens"):
        run(replace(problem, labels_N=problem.labels_N[1:]))
    with pytest.raises(ValueError, match="kd_weights has 22 rows for 23 tokens"):
        run(replace(problem, kd_weights_N=problem.kd_weights_N[1:]))
    with pytest.raises(ValueError, match="teacher_signal has 22 rows"):
        run(replace(problem, teacher_hidden=problem.teacher_hidden[1:]))
    with pytest.raises(ValueError, match="teacher has 202 vocabulary columns; .* has 203"):
        run(replace(problem, teacher_weight=problem.teacher_weight[1:]))
    with pytest.raises(ValueError, match="1 divergence term without a teacher signal"):
        objective(problem, problem.hidden_NH, problem.weight_GH, is_taught=False)

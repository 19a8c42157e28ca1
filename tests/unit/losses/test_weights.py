"""Token weights: one division by the global count, nothing where nothing counts."""

from dataclasses import fields

import pytest
import torch

from megatron_distill.losses import token_weights
from tests.reference.distillation import Problem, cross_entropy
from tests.support.divergence_runs import term_of, value_of
from tests.support.objective_runs import objective


def test_weights_are_the_mask_over_the_global_count() -> None:
    mask = torch.tensor([True, False, True])
    weights = token_weights(mask, 8)
    assert weights.dtype is torch.float32
    assert weights.tolist() == [0.125, 0.0, 0.125]
    assert token_weights(torch.tensor([0.25, 1.0]), 1.25).tolist() == pytest.approx([0.2, 0.8])


def test_nothing_counts_anywhere() -> None:
    assert token_weights(torch.tensor([False, False]), 0).tolist() == [0.0, 0.0]


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="global token count is -1"):
        token_weights(torch.tensor([True]), -1)


@pytest.mark.parametrize(
    ("name", "support"),
    [("forward_kl", "dense"), ("js_divergence", "tail"), ("adaptive_kl", "renormalized")],
)
def test_defect_09_the_mean_is_taken_once_however_a_batch_is_split(name: str, support: str) -> None:
    # Torchtune normalised by the tokens of a micro-batch, and then again by those of the batch.
    problem = Problem.random(13, 6, 50)
    mask = problem.kd_weights_N != 0
    weights = token_weights(mask, int(mask.sum()))
    term = term_of(name, support)
    exact = problem.weight_GH.double().requires_grad_()
    student = problem.hidden_NH[mask].double() @ exact.t()
    teacher = (problem.teacher_hidden[mask] @ problem.teacher_weight.t()).double()
    labels = problem.labels_N[mask]
    loss = value_of(term, student, teacher).mean() + cross_entropy(student, labels).mean()
    (gradient,) = torch.autograd.grad(loss, exact)
    # Micro-batches of unequal mask; one of them is empty.
    for cuts in ((13,), (2, 11), (1, 8, 0, 4)):
        head = problem.weight_GH.detach().requires_grad_()
        total = torch.zeros(())
        for part in torch.arange(13).split(list(cuts)):
            given = (getattr(problem, field.name) for field in fields(problem))
            rows = [value[part] if len(value) == 13 else value for value in given]
            micro = Problem(*rows).with_weights(weights[part], weights[part])
            value, _ = objective(micro, micro.hidden_NH, head, terms=[term], chunk_tokens=4)
            value.backward()
            total += value.detach()
        assert float(total) == pytest.approx(float(loss.detach()), rel=1e-6)
        assert head.grad is not None
        torch.testing.assert_close(head.grad.double(), gradient, rtol=1e-6, atol=2e-6)

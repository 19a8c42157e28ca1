"""The divergence table: every pull is -q dl/dq with the right total, unknown names are refused."""

import pytest
import torch

from megatron_distill.ops.divergence import DIVERGENCES, Divergence, divergence_named


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 5, 17, generator=generator, dtype=torch.float64) * 3
    student, teacher = logits.softmax(2)
    return student, teacher


@pytest.mark.parametrize("row", DIVERGENCES.values(), ids=list(DIVERGENCES))
def test_pull_is_minus_q_times_the_slope_of_the_value(row: Divergence) -> None:
    student, teacher = distributions(1)
    student.requires_grad_()
    log_ratio = teacher.log() - student.log()
    value = row.weighted_log_ratio(student, teacher, log_ratio * 1).sum()
    (slope,) = torch.autograd.grad(value, student)
    pull = row.pull(student.detach().clone(), teacher.clone())
    torch.testing.assert_close(pull, -(student * slope).detach(), rtol=1e-12, atol=1e-14)
    total = torch.full((5,), row.pull_total, dtype=torch.float64)
    torch.testing.assert_close(pull.sum(1), total, rtol=1e-12, atol=0)


def test_names_are_those_of_the_table() -> None:
    for name, row in DIVERGENCES.items():
        assert divergence_named(name) is row
        assert row.name == name
    with pytest.raises(ValueError, match="unknown divergence 'foward_kl'; known: forward_kl"):
        divergence_named("foward_kl")

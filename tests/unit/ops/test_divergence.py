"""The divergence table: every slope is dl/dq up to the row's constant, equal models give exactly
nothing, both anchors agree, unknown names are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_distill.ops.divergences import DIVERGENCES, Classes, divergence_named

NONLINEAR = [name for name in DIVERGENCES if name not in ("forward_kl", "adaptive_kl")]
PARAMETERS: dict[str, dict[str, float]] = {
    "js_divergence": {"beta": 0.3},
    "skewed_forward_kl": {"skew_lambda": 0.6},
    "skewed_reverse_kl": {"skew_lambda": 0.6},
}


def distributions(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 5, 17, generator=generator, dtype=torch.float64) * 3
    student, teacher = logits.softmax(2).to(dtype)
    return student, teacher


def classes(student: Tensor, teacher: Tensor, near_equal: Tensor | bool = True) -> Classes:
    return Classes(
        teacher,
        student,
        lambda: teacher.log() - student.log(),
        lambda _: torch.empty_like(student),
        near_equal,
    )


@pytest.mark.parametrize("name", NONLINEAR)
def test_anchors_differ_by_a_constant_of_the_row(name: str) -> None:
    student, teacher = distributions()
    row = divergence_named(name, **PARAMETERS.get(name, {}))
    near, far = (
        row.evaluate(classes(student, teacher, torch.full((5, 1), value)))
        for value in (True, False)
    )
    assert near[1] is not None
    assert far[1] is not None
    torch.testing.assert_close(near[0], far[0], rtol=1e-12, atol=1e-15)
    difference = near[1] - far[1]
    torch.testing.assert_close(difference, difference[:1, :1].expand_as(difference))


def test_names_are_those_of_the_table() -> None:
    for name in DIVERGENCES:
        assert divergence_named(name).name == name
    assert divergence_named("js_divergence", beta=0.25).name == "js_divergence_beta0.25"
    with pytest.raises(ValueError, match="unknown divergence 'foward_kl'; known: adaptive_kl, for"):
        divergence_named("foward_kl")

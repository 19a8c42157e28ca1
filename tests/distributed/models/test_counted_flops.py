"""The FLOPs that plans and reports count against those of built models, as torch counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_distill.losses import Term, fused_linear_objective
from megatron_distill.signals import HiddenState
from tests.distributed.megatron_world import build, megatron_groups, small_architecture
from tests.distributed.models.test_parameters import SHAPES
from tests.distributed.pool import Pool

ROWS, LENGTH = 2, 32


def products(rank: int, world: int, shapes: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """FLOPs of the products of a forward pass without attention and head: built, and counted."""
    with megatron_groups() as groups:
        from megatron_distill.models.flops import forward_flops_per_token, head_flops_per_token
        from megatron_distill.models.gpt import run_model
        from megatron_distill.runtime.batch import Batch

        found = {}
        for name, fields in shapes.items():
            shape = small_architecture(**fields)
            (model,) = build(shape, groups, seed=1)
            model.requires_grad_(False).eval()
            batch = Batch.untrained(torch.ones((ROWS, LENGTH), dtype=torch.int64))
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                run_model(model, batch, context_size=1)
            built = sum(
                count
                for operation, count in counter.get_flop_counts()["Global"].items()
                if "attention" not in str(operation)
            )
            per_token = forward_flops_per_token(
                shape, sequence_length=LENGTH, attended_positions=0.0
            )
            found[name] = built, ROWS * LENGTH * (per_token - head_flops_per_token(shape))
        return found


def test_every_dense_kind_of_model_takes_the_counted_products(pool: Pool) -> None:
    """Of experts torch counts no product, since they add to a given matrix."""
    shapes = {name: fields for name, fields in SHAPES.items() if "moe" not in fields}
    (found,) = pool.run(1, products, shapes)
    assert len(found) == 6
    for name, (built, counted) in found.items():
        assert built == pytest.approx(counted, rel=1e-9), name


def test_the_heads_take_three_products_of_the_student_and_one_of_the_teacher() -> None:
    tokens, vocabulary, width, teacher_width = 48, 320, 16, 24
    generator = torch.Generator().manual_seed(1)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    hidden, weight = normal(tokens, width), normal(vocabulary, width)
    hidden.requires_grad_()
    weight.requires_grad_()
    teacher = HiddenState(normal(tokens, teacher_width), normal(vocabulary, teacher_width))
    weights = torch.full((tokens,), 1 / tokens)
    with FlopCounterMode(display=False) as counter:
        total, _ = fused_linear_objective(
            hidden, weight, teacher, torch.arange(tokens), ce_weights=weights, kd_weights=weights,
            terms=[Term()],
        )  # fmt: skip
        total.backward()
    expected = 2 * tokens * vocabulary * (3 * width + teacher_width)
    assert counter.get_total_flops() == expected

"""The FLOPs that plans and reports count against those of built models, as torch counts them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_distill.losses import BalanceMode, BalanceState, Term, fused_linear_objective
from megatron_distill.models.flops import forward_flops_per_token, head_flops_per_token
from megatron_distill.runtime.batch import Batch, StepBatches
from megatron_distill.signals import HiddenState
from tests.distributed import balanced_steps
from tests.distributed.balanced_steps import Case
from tests.distributed.megatron_world import build, megatron_groups, small_architecture
from tests.distributed.models.test_parameters import SHAPES
from tests.distributed.pool import Pool

ROWS, LENGTH = 2, 32


def without_attention(counter: FlopCounterMode) -> int:
    counts = counter.get_flop_counts()["Global"].items()
    return sum(count for operation, count in counts if "attention" not in str(operation))


def products(rank: int, world: int, shapes: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """FLOPs of the products of a forward pass without attention and head: built, and counted."""
    with megatron_groups() as groups:
        from megatron_distill.models.gpt import run_model

        found = {}
        for name, fields in shapes.items():
            shape = small_architecture(**fields)
            (model,) = build(shape, groups, seed=1)
            model.requires_grad_(False).eval()
            batch = Batch.untrained(torch.ones((ROWS, LENGTH), dtype=torch.int64))
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                run_model(model, batch, context_size=1)
            built = without_attention(counter)
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


def measured_products(rank: int, world: int, mode: BalanceMode) -> tuple[int, float, float]:
    """FLOPs of the products of a pass that measures; those of its layers, and of one head."""
    with megatron_groups() as groups:
        case = Case(mode=mode)
        student, teacher, objective, balancing = balanced_steps.build(case, groups)
        shape = small_architecture(vocab_size=balanced_steps.VOCABULARY)
        length = balanced_steps.LENGTH
        batch = balanced_steps.whole_batch(case)
        every = torch.ones_like(batch.ce_mask_bs)
        batch = replace(batch, ce_mask_bs=every, kd_mask_bs=every)
        tokens = every.numel()
        step = StepBatches((batch,), ce_tokens=tokens, kd_tokens=tokens, positions=tokens)
        signals = list(teacher.signals(step.micro_batches))
        with FlopCounterMode(display=False) as counter:
            balancing.prepare(student, signals, objective, step, steps_done=0, state=BalanceState())
        built = without_attention(counter)
        whole = forward_flops_per_token(shape, sequence_length=length, attended_positions=0.0)
        head = 2 * tokens * balanced_steps.VOCABULARY * shape.hidden_size
        return built, tokens * (whole - head_flops_per_token(shape)), head


@pytest.mark.parametrize(("mode", "heads"), [("magnitude", 2), ("gradient_norm", 5)])
def test_a_pass_that_measures_takes_a_forward_pass_and_these_products_of_heads(
    pool: Pool, mode: BalanceMode, heads: int
) -> None:
    """Of losses one of each model; of gradients two of the student's, two back, one teacher's."""
    ((built, layers, head),) = pool.run(1, measured_products, mode)
    assert built == pytest.approx(layers + heads * head, rel=1e-9)

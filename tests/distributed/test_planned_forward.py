"""The planner's memory and calls of passes on a CPU against those of built models."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_distill.planning.operations import CALLS_OF_LAYER
from tests.distributed.megatron_world import build, megatron_groups, small_architecture
from tests.distributed.pool import Pool
from tests.support.peaks import least_peak

WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "ffn_hidden_size": 192,
    "num_attention_heads": 8,
    "num_kv_heads": 4,
    "head_size": 8,
    "max_position_embeddings": 128,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gated": {},
    "narrow feed-forward": {"ffn_hidden_size": 48},
    "like GPT-2": {"norm": "layernorm", "activation": "gelu", "positions": "learned"},
    "experts": {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 96}},
}
ROWS, LENGTH = 4, 128


def peaks(rank: int, world: int, layout: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """Bytes at the peak of a forward pass: measured, and planned."""
    with megatron_groups(**layout) as groups:
        import torch

        from megatron_distill.models.gpt import run_model
        from megatron_distill.planning.activations import forward_bytes
        from megatron_distill.runtime.batch import Batch

        found = {}
        for name, changes in SHAPES.items():
            shape = small_architecture(**(WIDE | changes))
            (model,) = build(shape, groups, seed=1)
            model.requires_grad_(False).eval()
            batch = Batch.untrained(torch.ones((ROWS, LENGTH), dtype=torch.int64))

            def forward(model: Any = model, batch: Batch = batch) -> None:
                with torch.no_grad():
                    run_model(model, batch, context_size=1)

            planned = forward_bytes(shape, groups.layout, 4, is_fused=False)
            found[name] = least_peak(forward), ROWS * LENGTH * planned
        return found


@pytest.mark.parametrize("layout", [{}, {"tensor": 2, "sequence": True}], ids=str)
def test_a_forward_pass_has_the_planned_peak(pool: Pool, layout: dict[str, Any]) -> None:
    for rank in pool.run(layout.get("tensor", 1), peaks, layout):
        for name, (measured, planned) in rank.items():
            assert 0.93 * measured < planned < 1.2 * measured, (name, planned / measured)


def calls_of_passes(rank: int, world: int) -> float:
    """Calls of torch in one pass of a layer: the mean of a teacher's, and a student's two."""
    with megatron_groups() as groups:
        import torch
        from torch.profiler import ProfilerActivity, profile

        from megatron_distill.models.gpt import run_model
        from megatron_distill.runtime.batch import Batch

        batch = Batch.untrained(torch.ones((2, 16), dtype=torch.int64))
        found = []
        for layers in (2, 6):
            (model,) = build(small_architecture(num_layers=layers), groups, seed=1)
            run_model(model, batch, context_size=1).sum().backward()
            with profile(activities=[ProfilerActivity.CPU]) as record:
                with torch.no_grad():
                    run_model(model, batch, context_size=1)
                run_model(model, batch, context_size=1).sum().backward()
            calls = [one.count for one in record.key_averages() if one.key.startswith("aten::")]
            found.append(sum(calls))
        return (found[1] - found[0]) / 4 / 3


def test_a_layer_has_the_planned_calls(pool: Pool) -> None:
    (found,) = pool.run(1, calls_of_passes)
    assert found == pytest.approx(CALLS_OF_LAYER, rel=0.1)

"""The planner's memory and calls of passes on a CPU against those of built models."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_distill.planning.end_operations import CALLS_OF_PASSES
from megatron_distill.planning.layers import CALLS_OF_EXPERT, CALLS_OF_EXPERTS
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
MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 96}
SHAPES: dict[str, dict[str, Any]] = {
    "gated": {},
    "narrow feed-forward": {"ffn_hidden_size": 48},
    "like GPT-2": {"norm": "layernorm", "activation": "gelu", "positions": "learned"},
    "experts": {"moe": MOE},
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


EXPERTS = {f"{count} experts": {"moe": {**MOE, "num_experts": count}} for count in (4, 8)}


def calls_of_passes(rank: int, world: int) -> dict[str, tuple[float, float]]:
    """Calls of torch in a layer's two passes of training and outside of layers, by the layers."""
    with megatron_groups() as groups:
        import torch
        from torch.profiler import ProfilerActivity, profile

        from megatron_distill.models.gpt import run_model
        from megatron_distill.runtime.batch import Batch

        torch.manual_seed(1)
        batch = Batch.untrained(torch.randint(0, 90, (ROWS, LENGTH)))  # every expert has tokens
        calls: dict[str, tuple[float, float]] = {}
        for name, changes in ({"dense": {}} | EXPERTS).items():
            few, many = 2, 6
            found = {}
            for layers in (few, many):
                shape = small_architecture(num_layers=layers, **changes)
                (model,) = build(shape, groups, seed=1)
                run_model(model, batch, context_size=1).sum().backward()
                with profile(activities=[ProfilerActivity.CPU]) as record:
                    run_model(model, batch, context_size=1).sum().backward()
                counted = [one for one in record.key_averages() if one.key.startswith("aten::")]
                found[layers] = sum(one.count for one in counted)
            of_layer = (found[many] - found[few]) / (many - few)
            calls[name] = of_layer, found[few] - few * of_layer
        return calls


def test_passes_have_the_planned_calls(pool: Pool) -> None:
    (found,) = pool.run(1, calls_of_passes)
    of_layer, outside = found["dense"]
    assert of_layer == pytest.approx(2 * CALLS_OF_LAYER, rel=0.1), found
    # A run has more of them: its batches have documents, and gradients are summed over ranks.
    assert 0.7 * sum(CALLS_OF_PASSES) < outside < sum(CALLS_OF_PASSES), found
    for name, (with_experts, _) in found.items():
        if name != "dense":
            planned = CALLS_OF_EXPERTS + int(name.split()[0]) * CALLS_OF_EXPERT
            assert with_experts - of_layer == pytest.approx(2 * planned, rel=0.1), (name, found)

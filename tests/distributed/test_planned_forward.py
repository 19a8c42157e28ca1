"""The planner's memory and calls of passes on a CPU against those of built models."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_distill.planning.end_operations import CALLS_OF_PASSES
from megatron_distill.planning.layers import (
    CALLS_OF_CONTEXT,
    CALLS_OF_EXCHANGE,
    CALLS_OF_EXPERT,
    CALLS_OF_EXPERTS,
    CALLS_OF_SEQUENCE,
    CALLS_OF_TILES,
    GATHERED_FOR_EXPERTS,
)
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


def calls_of_passes(
    rank: int, world: int, layout: dict[str, Any], changes: dict[str, Any]
) -> tuple[float, float]:
    """Calls of torch in both passes of training: in a layer, and outside of layers."""
    with megatron_groups(**layout) as groups:
        import torch
        from torch.profiler import ProfilerActivity, profile

        from megatron_distill.models.gpt import run_model
        from megatron_distill.runtime.batch import Batch

        torch.manual_seed(1)
        batch = Batch.untrained(torch.randint(0, 90, (ROWS, LENGTH)))  # every expert has tokens
        few, many = 2, 6
        found = {}
        for layers in (few, many):
            (model,) = build(small_architecture(num_layers=layers, **changes), groups, seed=1)

            def step(model: Any = model) -> None:
                run_model(model, batch, context_size=1).sum().backward()

            step()
            with profile(activities=[ProfilerActivity.CPU]) as record:
                step()
            counted = [one for one in record.key_averages() if one.key.startswith("aten::")]
            found[layers] = sum(one.count for one in counted)
        of_layer = (found[many] - found[few]) / (many - few)
        return of_layer, found[few] - few * of_layer


OF_LAYER = 2 * CALLS_OF_LAYER
OF_EXPERTS = 2 * CALLS_OF_EXPERTS
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "one rank": ({}, {}, OF_LAYER),
    "tensor ranks": ({"tensor": 2}, {}, OF_LAYER),
    "with sequence": ({"tensor": 2, "sequence": True}, {}, OF_LAYER + sum(CALLS_OF_SEQUENCE)),
    "experts": ({}, {"moe": MOE}, OF_LAYER + OF_EXPERTS + 2 * 4 * CALLS_OF_EXPERT),
    "twice the experts": (
        {}, {"moe": {**MOE, "num_experts": 8}}, OF_LAYER + OF_EXPERTS + 2 * 8 * CALLS_OF_EXPERT,
    ),
    "experts over ranks": (
        {"expert": 2}, {"moe": MOE},
        OF_LAYER + OF_EXPERTS + 2 * CALLS_OF_EXCHANGE + 2 * 2 * CALLS_OF_EXPERT,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=[] if name in ("one rank", "experts") else pytest.mark.slow)
        for name in CALLS
    ],
)
def test_passes_have_the_planned_calls(pool: Pool, case: str) -> None:
    layout, changes, planned = CALLS[case]
    for of_layer, outside in pool.run(2 if layout else 1, calls_of_passes, layout, changes):
        assert of_layer == pytest.approx(planned, rel=0.12)
        # A run has more of them: its batches have documents, and gradients are summed over ranks.
        assert 0.7 * sum(CALLS_OF_PASSES) < outside < 1.2 * sum(CALLS_OF_PASSES)


GATHER, SCATTER = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"


def messages_of_experts(rank: int, world: int, layout: dict[str, Any]) -> list[tuple[float, float]]:
    """Gathers and scatters of a layer, forward and backward."""
    with megatron_groups(**layout) as groups:
        import torch
        from torch.profiler import ProfilerActivity, profile

        from megatron_distill.models.gpt import run_model
        from megatron_distill.runtime.batch import Batch

        torch.manual_seed(1)
        batch = Batch.untrained(torch.randint(0, 90, (ROWS, LENGTH)))
        few, many = 2, 6
        found: list[list[dict[str, int]]] = []
        for layers in (few, many):
            (model,) = build(small_architecture(num_layers=layers, moe=MOE), groups, seed=1)
            with profile(activities=[ProfilerActivity.CPU]) as ahead:
                loss = run_model(model, batch, context_size=1).sum()
            with profile(activities=[ProfilerActivity.CPU]) as back:
                loss.backward()
            records = (record.key_averages() for record in (ahead, back))
            found.append([{one.key: one.count for one in record} for record in records])
        return [
            tuple(
                (after.get(key, 0) - before.get(key, 0)) / (many - few) for key in (GATHER, SCATTER)
            )
            for before, after in zip(*found, strict=True)
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "of_attention"),
    [({"expert": 2}, ((0, 0), (0, 0))), ({"tensor": 2, "sequence": True}, ((1, 1), (2, 1)))],
)
def test_layers_of_experts_have_the_planned_messages(
    pool: Pool, layout: dict[str, Any], of_attention: tuple[tuple[int, int], ...]
) -> None:
    """Attention's weights need its gathered inputs again."""
    pairs = zip(GATHERED_FOR_EXPERTS, of_attention, strict=True)
    planned = [tuple(map(sum, zip(*both, strict=True))) for both in pairs]
    for found in pool.run(2, messages_of_experts, layout):
        assert found == planned


def calls_of_keys(rank: int, world: int) -> tuple[int, int]:
    """Calls of torch in which context ranks gather keys, forward and backward."""
    with megatron_groups(context=world) as groups:
        import torch
        from torch.profiler import ProfilerActivity, profile

        from megatron_distill.models.context_keys import gathered_keys, saved_in_part

        key, value = (torch.ones((16, 2, 2, 8), requires_grad=True) for _ in range(2))
        found = []
        with profile(activities=[ProfilerActivity.CPU]) as ahead:
            whole = gathered_keys(key, value, groups.context)
            with saved_in_part(key, value, whole, groups.context):
                scores = whole[:, 0] * whole[:, 1]
        with profile(activities=[ProfilerActivity.CPU]) as back:
            scores.backward(torch.ones_like(scores))
        for record in (ahead, back):
            counted = [one for one in record.key_averages() if one.key.startswith("aten::")]
            found.append(sum(one.count for one in counted))
        return found[0], found[1]


def test_context_ranks_gather_keys_in_the_planned_calls(pool: Pool) -> None:
    for found in pool.run(2, calls_of_keys):
        assert found == pytest.approx(CALLS_OF_CONTEXT, rel=0.2)


def calls_of_attention(rank: int, size: int) -> tuple[int, int]:
    """Calls of torch in the attention of a context rank over one document, forward and backward."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from megatron_distill.models.attention_kernels.rule import AttentionRule
    from megatron_distill.models.attention_kernels.tiles import attend
    from megatron_distill.runtime.segments import Segments

    query = torch.ones((LENGTH // size, 1, 4, 16), requires_grad=True)
    key, value = (torch.ones((LENGTH, 1, 2, 16), requires_grad=True) for _ in range(2))
    segments, rule = Segments(((0, LENGTH),), rank, size), AttentionRule(0.25)
    with profile(activities=[ProfilerActivity.CPU]) as ahead:
        found = attend(query, key, value, segments, rule)
    with profile(activities=[ProfilerActivity.CPU]) as back:
        found.backward(torch.ones_like(found))
    first, second = (
        sum(one.count for one in record.key_averages() if one.key.startswith("aten::"))
        for record in (ahead, back)
    )
    return first, second


def test_the_tiles_of_context_ranks_have_the_planned_calls() -> None:
    alone = calls_of_attention(0, 1)
    for size, planned in zip((2, 4), CALLS_OF_TILES, strict=True):
        most = map(max, zip(*(calls_of_attention(rank, size) for rank in range(size)), strict=True))
        further = [each - one for each, one in zip(most, alone, strict=True)]
        assert further == pytest.approx(planned, rel=0.1)

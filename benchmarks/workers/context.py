"""One layer on context ranks: keys gathered, and keys around a ring, in turns.

`attention` is the core attention alone, `layer` a GPT of one layer without its output head.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.peak import LiveStorages
from benchmarks.workers import ring
from benchmarks.workers.attention import GROUPS, HEAD_SIZE, HEADS, batch_of, bounds_of
from megatron_distill.models.attention_kernels import tiles
from megatron_distill.models.attention_kernels.rule import AttentionRule
from megatron_distill.runtime.launch import joined_world
from megatron_distill.runtime.segments import Segments

_TIMEOUT_SECONDS = 1800

_VOCABULARY = 1000

Attend = Callable[[Tensor, Tensor, Tensor, Segments, AttentionRule, dist.ProcessGroup], Tensor]
Round = Callable[[], list[Tensor]]


def main() -> None:
    """Measure the case given by the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subject", required=True, choices=("attention", "layer"))
    parser.add_argument("--length", required=True, type=int)
    parser.add_argument("--documents", required=True)
    parser.add_argument("--rounds", required=True, type=int)
    parser.add_argument("--result", required=True, type=Path)
    arguments = parser.parse_args()
    with joined_world(device="cpu", backend="auto", threads=1, timeout_seconds=_TIMEOUT_SECONDS):
        found = _compared(arguments)
        if dist.get_rank() == 0:
            arguments.result.write_text(json.dumps(found), encoding="utf-8")


def gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    rule: AttentionRule,
    group: dist.ProcessGroup,
) -> Tensor:
    """Attend as `TorchAttention` does."""
    # Imported late: it imports Megatron-Core, which must be prepared first.
    from megatron_distill.models.context_keys import gathered_keys, saved_in_part

    whole = gathered_keys(key, value, group)
    with saved_in_part(key, value, whole, group):
        whole_key, whole_value = whole.unbind(1)
        return tiles.attend(query, whole_key, whole_value, segments, rule)


def _attention(bounds: tuple[int, ...]) -> dict[str, Round]:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    segments = Segments((bounds,)).sharded(rank, size)
    generator = torch.Generator().manual_seed(rank)
    query, key, value, gradient = (
        torch.randn(segments.queries, 1, heads, HEAD_SIZE, generator=generator)
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    leaves = [leaf.requires_grad_() for leaf in (query, key, value)]
    rule = AttentionRule(HEAD_SIZE**-0.5)

    def round_(attend: Attend) -> list[Tensor]:
        # New documents, as a micro-batch brings them: the tiles are made again.
        out = attend(query, key, value, replace(segments), rule, group)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]

    return {"gathered": partial(round_, gathered), "ring": partial(round_, ring.attend)}


def _layer(bounds: tuple[int, ...]) -> dict[str, Round]:
    # Imported late: these import Megatron-Core, which must be prepared first.
    from megatron_distill.models.architecture import Architecture
    from megatron_distill.models.attention import TorchAttention
    from megatron_distill.models.execution import Execution
    from megatron_distill.models.gpt import build_gpt, run_model
    from megatron_distill.models.taps import LayerCall
    from megatron_distill.runtime.groups import Layout, create_groups, seed_everything

    size = dist.get_world_size()
    groups = create_groups(Layout(context=size), timeout_minutes=30)
    seed_everything(1, groups)
    architecture = Architecture(
        num_layers=1,
        hidden_size=HEADS * HEAD_SIZE,
        ffn_hidden_size=1408,
        num_attention_heads=HEADS,
        num_kv_heads=GROUPS,
        head_size=HEAD_SIZE,
        vocab_size=_VOCABULARY,
        max_position_embeddings=bounds[-1],
    )
    execution = Execution(torch.float32, torch.device("cpu"))
    (model,) = build_gpt(architecture, groups=groups, execution=execution, seed=1)
    weights = [weight for name, weight in model.named_parameters() if "output_layer" not in name]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(_VOCABULARY, (1, bounds[-1] + 1), generator=generator)
    batch = batch_of(tokens, bounds).context_shard(groups.context.rank(), size)
    gradient = torch.randn(bounds[-1] // size, 1, HEADS * HEAD_SIZE, generator=generator)

    def around_the_ring(
        core: TorchAttention, query: Tensor, key: Tensor, value: Tensor, *_: object,
        attention_bias: LayerCall, **__: object,
    ) -> Tensor:  # fmt: skip
        segments = attention_bias.segments
        return ring.attend(query, key, value, segments, core.rule, core.context_group).flatten(2)

    def round_() -> list[Tensor]:
        fresh = replace(batch, documents=replace(batch.segments))
        out = run_model(model, fresh, context_size=size)
        return [out.detach(), *torch.autograd.grad(out, weights, gradient)]

    def ring_round() -> list[Tensor]:
        with patch.object(TorchAttention, "forward", around_the_ring):
            return round_()

    return {"gathered": round_, "ring": ring_round}


def _compared(arguments: argparse.Namespace) -> dict[str, Any]:
    size = dist.get_world_size()
    bounds = bounds_of(arguments.length, arguments.documents)
    ways = {"attention": _attention, "layer": _layer}[arguments.subject](bounds)
    results, peaks = {}, {}
    for name, way in ways.items():
        with LiveStorages() as live:
            results[name] = way()
        peaks[name] = live.peak
    pairs = zip(*results.values(), strict=True)
    difference = max(_relative(one, other) for one, other in pairs)
    del results, pairs
    clock: dict[str, list[float]] = {name: [] for name in ways}
    work: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds):
        for name in sorted(ways, reverse=number % 2 == 1):
            dist.barrier()
            started, started_work = time.perf_counter(), time.process_time()
            ways[name]()
            work[name].append(time.process_time() - started_work)
            dist.barrier()
            clock[name].append(time.perf_counter() - started)
    mine = {
        name: {
            "median": statistics.median(clock[name]),
            "least": min(clock[name]),
            "work": min(work[name]),
            "peak": peaks[name],
        }
        for name in ways
    }
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, (difference, mine))
    return {
        "documents": len(bounds) - 1,
        "difference": max(found for found, _ in everyone),
        **{name: _of_slowest([ways_[name] for _, ways_ in everyone]) for name in ways},
    }


def _relative(one: Tensor, other: Tensor) -> float:
    """Return the largest difference over the largest number."""
    return float((one - other).abs().max() / one.abs().max())


def _of_slowest(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Return the largest figures of all ranks."""
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


if __name__ == "__main__":
    main()

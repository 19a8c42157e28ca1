"""Hidden states and every gradient of models of many kinds of layers, in every layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.runtime.batch import Batch
from tests.distributed.megatron_world import (
    megatron_groups,
    parts_of,
    rows_of,
    small_architecture,
)
from tests.distributed.models.test_models import LENGTH, packed_batch
from tests.distributed.pool import Pool

if TYPE_CHECKING:
    from megatron_distill.runtime.groups import Groups

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gemma2": {
        "norm": "zero_centered_rmsnorm",
        "activation": "geglu_tanh",
        "post_norms": True,
        "embedding_scale": 32**0.5,
        "sliding_window": 6,
        "sliding_layers": (0, 2),
        "attention_scalar": 7.0,
        "attention_softcap": 1.5,
    },
    "gemma3": {
        "norm": "zero_centered_rmsnorm",
        "activation": "geglu_tanh",
        "post_norms": True,
        "embedding_scale": 32**0.5,
        "qk_norm": True,
        "sliding_window": 6,
        "sliding_layers": (0, 1, 3),
        "sliding_rope_base": 1e3,
        "rope_base": 1e5,
        "rope_scaling": {"kind": "linear", "factor": 8.0},
    },
    "biased": {
        "norm": "layernorm",
        "activation": "gelu_tanh",
        "post_norms": True,
        "qkv_bias": True,
        "linear_bias": True,
        "rotary_fraction": 0.5,
    },
    "gpt2": {
        "norm": "layernorm",
        "activation": "gelu",
        "positions": "learned",
        "qkv_bias": True,
        "linear_bias": True,
        "tied_embeddings": True,
    },
    "one KV head": {"num_kv_heads": 1, "qk_norm": True, "qkv_bias": True},
    "uneven": {"num_layers": 5, "sliding_window": 6, "sliding_layers": (1, 4)},
}
Parts = dict[tuple[str, tuple[int, ...]], Tensor]


def micro_batches(rank: int, size: int) -> list[Batch]:
    """The two sequences of `packed_batch`, one after another, as a context rank sees them."""
    whole = packed_batch(isolate=True)
    rows = [rows_of(whole, slice(row, row + 1)) for row in range(2)]
    return [row.context_shard(rank, size) for row in rows]


def _trained(
    rank: int,
    world: int,
    layout: dict[str, Any],
    changes: dict[str, Any],
    recompute: tuple[Any, ...],
) -> tuple[list[tuple[Tensor, Tensor]], Parts, Parts]:
    """Hidden states with their positions, weights, and gradients by their place in the model."""
    with megatron_groups(**layout) as groups:
        from megatron_distill.models.execution import Execution, Recompute
        from megatron_distill.models.gpt import build_gpt, run_model
        from megatron_distill.train.step import run_schedule

        execution = Execution(torch.float32, torch.device("cpu"), Recompute.of(*recompute))
        architecture = small_architecture(init_std=0.2, vocab_size=224, **changes)
        chunks = build_gpt(architecture, groups=groups, execution=execution, seed=11)
        seen: list[tuple[Tensor, Tensor]] = []

        def forward(iterator: Iterator[Batch], chunk: torch.nn.Module) -> tuple[Tensor, Any]:
            batch = next(iterator)
            output = run_model(chunk, batch, context_size=groups.context.size())
            return output, partial(_weighted, batch=batch, groups=groups, seen=seen)

        run_schedule(
            forward,
            chunks,
            micro_batches(groups.context.rank(), groups.context.size()),
            groups=groups,
            micro_batch_size=1,
            sequence_length=LENGTH,
        )
        weights = parts_of(chunks, groups)
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                parameter.data = _summed(name, parameter, groups)
        return seen, weights, parts_of(chunks, groups)


def _weighted(
    output: Tensor, *, batch: Batch, groups: Groups, seen: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A loss with a separate weight for each position and feature."""
    from megatron_distill.models.gpt import hidden_for_head

    hidden = hidden_for_head(output, groups=groups)
    seen.append((hidden.detach(), batch.sequence_index_s))
    generator = torch.Generator().manual_seed(int(batch.sample_ids_b[0]))
    weight = torch.randn(LENGTH, hidden.shape[1], generator=generator)[batch.sequence_index_s]
    loss = (hidden * weight).sum() / groups.tensor.size()  # each tensor rank gives its share
    return loss, torch.ones((), dtype=torch.int), {}


def _summed(name: str, parameter: torch.nn.Parameter, groups: Groups) -> Tensor:
    """The gradient summed over context ranks, and over tensor ranks where Megatron-Core does."""
    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    dist.all_reduce(gradient, group=groups.context)
    is_partial = getattr(parameter, "sequence_parallel", False)
    if is_partial or "q_layernorm" in name or "k_layernorm" in name:
        dist.all_reduce(gradient, group=groups.tensor)
    return gradient.clone()


def _whole(shards: Sequence[Parts]) -> dict[str, Tensor]:
    """Every tensor of the model, put together from the parts of all ranks."""
    found: dict[str, Tensor] = {}
    for parts in shards:
        for (key, offset), data in parts.items():
            size = [start + length for start, length in zip(offset, data.shape, strict=True)]
            old = found.get(key, data.new_empty([0] * data.dim()))
            grown = data.new_full(
                [max(pair) for pair in zip(size, old.shape, strict=True)], float("nan")
            )
            grown[tuple(map(slice, old.shape))] = old
            grown[tuple(slice(start, stop) for start, stop in zip(offset, size, strict=True))] = (
                data
            )
            found[key] = grown
    return found


def _in_order(shards: Sequence[tuple[list[tuple[Tensor, Tensor]], Parts, Parts]]) -> Tensor:
    """The hidden states [micro-batches, S, H] of the whole sequences."""
    states = [shard[0] for shard in shards if shard[0]]
    found = []
    for number in range(2):
        whole = torch.full((LENGTH, states[0][0][0].shape[1]), float("nan"))
        for state in states:
            hidden, index = state[number]
            whole[index] = hidden
        found.append(whole)
    return torch.stack(found)


LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[Any, ...]]] = {
    "TP2": (2, {"tensor": 2}, ("none",)),
    "TP2+sequence": (2, {"tensor": 2, "sequence": True}, ("none",)),
    "PP2": (2, {"pipeline": 2}, ("none",)),
    "PP2+virtual": (2, {"pipeline": 2, "virtual_pipeline": 2}, ("none",)),
    "CP2": (2, {"context": 2}, ("none",)),
    "TP2+sequence x PP2, recompute": (
        4, {"tensor": 2, "sequence": True, "pipeline": 2}, ("full",),
    ),
    "recompute layers": (1, {}, ("full",)),
    "recompute attention": (1, {}, ("selective",)),
    "recompute one layer of a stage": (2, {"pipeline": 2}, ("full", (), 1)),
    "recompute modules": (1, {}, ("selective", ("attention", "mlp", "layernorm"))),
    "recompute modules TP2+sequence": (
        2, {"tensor": 2, "sequence": True}, ("selective", ("mlp", "layernorm")),
    ),
    "TP4 on fewer KV heads": (4, {"tensor": 4}, ("none",)),
    "TP4+sequence on fewer KV heads, recompute": (
        4, {"tensor": 4, "sequence": True}, ("selective",),
    ),
}  # fmt: skip
CASES = [
    *[("gemma3", layout) for layout in LAYOUTS if layout not in ("TP2", "recompute attention")],
    ("gemma2", "recompute modules TP2+sequence"),
    ("gemma2", "PP2+virtual"),
    ("gemma2", "CP2"),
    ("biased", "recompute attention"),
    ("gpt2", "TP2"),
    ("gpt2", "TP2+sequence"),
    ("biased", "TP4+sequence on fewer KV heads, recompute"),
    ("one KV head", "TP4+sequence on fewer KV heads, recompute"),
    ("uneven", "PP2+virtual"),
]


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, Any]:
    """The results of one process, for each architecture."""
    return {
        name: pool.run(1, _trained, {}, changes, ("none",))
        for name, changes in ARCHITECTURES.items()
    }


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_states_and_gradients_are_those_of_one_process(
    pool: Pool, alone: dict[str, Any], name: str, layout: str
) -> None:
    expected = alone[name]
    world, groups, recompute = LAYOUTS[layout]
    shards = pool.run(world, _trained, groups, ARCHITECTURES[name], recompute)
    torch.testing.assert_close(_in_order(shards), _in_order(expected), atol=3e-5, rtol=0)
    weights, first = (_whole([shard[1] for shard in found]) for found in (shards, expected))
    assert weights.keys() == first.keys()
    assert all(torch.equal(weight, first[key]) for key, weight in weights.items())
    gradients, whole = (_whole([shard[2] for shard in found]) for found in (shards, expected))
    for key, gradient in whole.items():
        bound = 3e-5 * float(gradient.abs().max())
        torch.testing.assert_close(
            gradients[key], gradient, atol=bound, rtol=0, msg=lambda m, n=key: f"{n}: {m}"
        )


def _calls(rank: int, world: int, recompute: tuple[Any, ...]) -> dict[str, list[int]]:
    """Of each part of a layer, its forward calls in both passes, by layer."""
    with megatron_groups() as groups:
        from megatron_distill.models.execution import Execution, Recompute
        from megatron_distill.models.gpt import build_gpt, run_model

        execution = Execution(torch.float32, torch.device("cpu"), Recompute.of(*recompute))
        (model,) = build_gpt(small_architecture(), groups=groups, execution=execution, seed=11)
        found = {part: [0] * 4 for part in PARTS}

        def count(*_: Any, part: str, number: int) -> None:
            found[part][number] += 1

        for number, layer in enumerate(model.decoder.layers):
            for part in PARTS:
                hook = partial(count, part=part, number=number)
                layer.get_submodule(part).register_forward_pre_hook(hook)
        run_model(model, packed_batch(isolate=True), context_size=1).sum().backward()
        return found


ONCE, AGAIN = [1] * 4, [2] * 4
PARTS = ("input_layernorm", "self_attention.core_attention", "pre_mlp_layernorm", "mlp")
RECOMPUTED: dict[str, tuple[tuple[Any, ...], tuple[list[int], ...]]] = {
    "none": (("none",), (ONCE, ONCE, ONCE, ONCE)),
    "attention": (("selective",), (ONCE, AGAIN, ONCE, ONCE)),
    "mlp": (("selective", ("mlp",)), (ONCE, ONCE, ONCE, AGAIN)),
    "layernorm": (("selective", ("layernorm",)), (AGAIN, ONCE, AGAIN, ONCE)),
    "full": (("full",), (AGAIN, AGAIN, AGAIN, AGAIN)),
    "two layers": (("full", (), 2), ([2, 2, 1, 1],) * 4),
}


@pytest.mark.parametrize("case", RECOMPUTED)
def test_recomputed_modules_run_twice_and_no_others(pool: Pool, case: str) -> None:
    recompute, expected = RECOMPUTED[case]
    (found,) = pool.run(1, _calls, recompute)
    assert found == dict(zip(PARTS, expected, strict=True))


def test_post_norms_have_names_and_gradients_of_their_own(alone: dict[str, Any]) -> None:
    (_, weights, gradients), *_ = alone["gemma2"]
    for sublayer in ("self_attention", "mlp"):
        key = f"decoder.layers.{sublayer}.post_norm.weight"
        places = [place for place in weights if place[0] == key]
        assert len(places) == 4
        for place in places:
            assert weights[place].count_nonzero() == 0
            assert gradients[place].abs().max() > 0.01

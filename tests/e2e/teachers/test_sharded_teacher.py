"""A teacher whose weights are sharded over ranks: the same losses, and less memory by a formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.distributed.megatron_world import megatron_groups, small_architecture
from tests.distributed.pool import Pool
from tests.e2e.runs import (
    CONTEXT,
    EXPERT,
    FOUR,
    PIPELINE,
    SEQUENCE,
    TENSOR,
    VIRTUAL,
    Inputs,
    logged,
    quick_and_slow,
    records,
    run,
)
from tests.e2e.teachers.test_teacher_layouts import (
    EXPERTS,
    FEATURES,
    STEPS,
    VALIDATED,
    Course,
    assert_same,
)
from tests.support.peaks import PASSES, settle

SHARDED = "teacher.shard_weights=true"
BF16 = "train.precision=bf16"
TIED = "teacher.architecture.tied_embeddings=true"
DENSE_FIRST = """teacher.architecture={num_layers: 3, moe:
    {num_experts: 4, top_k: 2, ffn_hidden_size: 24, dense_layers: [0],
    shared_ffn_hidden_size: 40, shared_gate: true, score: sigmoid, correction_bias: true}}"""
_MODEL = "{num_layers: 2, hidden_size: 40, ffn_hidden_size: 64, num_attention_heads: 4}"
SEVERAL = (
    "teacher=null",
    f"teachers={{a: {{architecture: {_MODEL}, shard_weights: SHARD}}, "
    f"b: {{architecture: {_MODEL}}}}}",
    "objective.routing_weights={a: 1, b: 1}",
    "train.micro_batch_size=1",
)

# Ranks, and settings of both runs.
CASES: dict[str, tuple[int, Sequence[str]]] = {
    "TP2 x DP2": (4, (TENSOR, SEQUENCE)),
    "PP2 x DP2, virtual": (4, (PIPELINE, VIRTUAL)),
    "DP2, bf16, tied, at rest": (2, (BF16, TIED, "teacher.offload=true")),
    "CP2": (2, (CONTEXT,)),
    "EP2 x DP2, a dense layer": (4, (DENSE_FIRST, EXPERT)),
    "experts without ranks of their own": (2, (DENSE_FIRST, BF16)),
    "own layout, p1 to p2": (2, (PIPELINE, VIRTUAL, "teacher.parallel={tensor: 1}")),
    # One unit for four replicas.
    "own layout, d4 to t4": (
        4,
        (FOUR, "teacher.parallel={tensor: 1}", "train.global_batch_size=2"),
    ),
    "own layout, d2 t2 to d4": (4, ("teacher.parallel={tensor: 2, sequence: true}",)),
    "own layout, e2 to t2": (4, (TENSOR, SEQUENCE, EXPERTS, "teacher.parallel={expert: 2}")),
    "features, own layout": (2, (FEATURES, PIPELINE, "teacher.parallel={pipeline: 1}")),
}


@pytest.fixture(scope="module")
def train(pool: Pool, inputs: Inputs) -> Callable[..., Course]:
    """Train the dense configuration; returns all records."""

    def trained(world: int, label: str, *overrides: str) -> Course:
        folder = inputs.folder / f"sharded-{label}"
        run(pool, world, inputs.folder / "dense.yaml", folder, *STEPS, *VALIDATED, *overrides)
        return records(folder)

    return trained


@pytest.mark.parametrize("case", quick_and_slow(CASES, ()))
def test_losses_are_those_of_whole_weights_to_the_bit(
    train: Callable[..., Course], case: str
) -> None:
    world, settings = CASES[case]
    number = list(CASES).index(case)
    expected = train(world, f"{number}-whole", *settings)
    found = train(world, f"{number}", *settings, SHARDED)
    assert expected[0]["kd_loss"] > 0.1
    assert_same(found, expected, is_exact=True)


# In a layout of its own some of a step's units are for the other teacher.
@pytest.mark.slow
@pytest.mark.parametrize("own", [(), ("teachers.a.parallel={tensor: 1}", TENSOR)])
def test_one_of_several_teachers_is_sharded(
    train: Callable[..., Course], own: Sequence[str]
) -> None:
    found = [
        train(
            2,
            f"several-{len(own)}-{value}",
            *(text.replace("SHARD", value) for text in SEVERAL),
            *own,
        )
        for value in ("true", "false")
    ]
    assert_same(*found, is_exact=True)


@pytest.mark.slow
def test_weights_of_a_checkpoint_are_read_layer_by_layer(
    pool: Pool, inputs: Inputs, train: Callable[..., Course]
) -> None:
    origin = inputs.folder / "sharded-origin"
    save = ("checkpoint.save=true", "teacher=null", "objective.terms=[]", *STEPS)
    run(pool, 1, inputs.folder / "dense.yaml", origin, *save)
    teacher = ("teacher.architecture=null", f"teacher.checkpoint={origin}", "seed=8")
    expected = train(4, "read-whole", PIPELINE, *teacher)
    assert_same(train(4, "read", PIPELINE, *teacher, SHARDED), expected, is_exact=True)


@pytest.mark.slow
def test_it_is_without_effect_where_each_rank_has_other_weights(pool: Pool, inputs: Inputs) -> None:
    overrides = [*STEPS, TENSOR, SHARDED, f"output={inputs.folder}/sharded-alone"]
    first, second = pool.run(2, logged, inputs.folder / "dense.yaml", overrides)
    assert "shard_weights = true has no effect" in first
    assert "shard_weights" not in second


# Weights large beside the hidden states of a sequence of eight tokens.
LARGE = {
    "num_layers": 8,
    "hidden_size": 192,
    "ffn_hidden_size": 384,
    "head_size": 48,
    "init_std": 0.1,
}
HOST = 700_000  # bytes of everything that is not weights
FEW = 100_000


@dataclass
class Allocated:
    """Bytes that torch's allocator holds above those at the start: now and at most."""

    peak: int = 0
    current: int = 0


@contextmanager
def allocated() -> Iterator[Allocated]:
    """Count the allocations on the CPU inside the block, once it is over."""
    found = Allocated()
    with torch.profiler.profile(profile_memory=True) as profile:
        yield found
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda one: one.start_ns()):
        if event.name() == "[memory]":
            found.current += event.nbytes()
            found.peak = max(found.peak, found.current)


@dataclass
class Gathers:
    """The bytes received in each all-gather, and how many had begun when each layer was done."""

    received: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)


@contextmanager
def watched_gathers(layers: Sequence[torch.nn.Module]) -> Iterator[Gathers]:
    """Watch the gathers of weights, which must not block."""
    found, gather = Gathers(), dist.all_gather_single

    def counted(whole: torch.Tensor, own: torch.Tensor, **named: Any) -> Any:
        assert named["async_op"]
        found.received.append(whole.nbytes - own.nbytes)
        return gather(whole, own, **named)

    def done(*_: object) -> None:
        found.begun.append(len(found.received))

    handles = [layer.register_forward_hook(done) for layer in layers]
    with patch.object(dist, "all_gather_single", counted):
        yield found
    for handle in handles:
        handle.remove()


def weights_in_memory(
    rank: int, world: int, changes: dict[str, Any], layout: dict[str, Any], is_sharded: bool
) -> dict[str, Any]:
    """Bytes at most while the model is built, between and during forward passes, and by formula."""
    with megatron_groups(**layout) as groups:
        from megatron_distill.models.execution import Execution, WeightShards
        from megatron_distill.models.parameters import weights_of_rank
        from megatron_distill.models.sharded_weights import resident_numbers
        from megatron_distill.train.model_source import ModelSource

        source = ModelSource(small_architecture(**LARGE, **changes))
        shards = WeightShards() if is_sharded else None
        execution = Execution(torch.float32, torch.device("cpu"), weight_shards=shards)
        with allocated() as building:
            (model,) = source.build(execution, groups=groups, seed=1, interleaved=False)
        model.requires_grad_(False)
        model.eval()
        planned = weights_of_rank(
            source.architecture, groups.layout, ranks=world, is_sharded=is_sharded
        )
        layers = model.decoder.layers
        layer = [(name, one.numel()) for name, one in layers[0].named_parameters()]
        inputs = tokens()
        with torch.no_grad():
            with watched_gathers(layers) as gathers:
                outputs = model(**inputs)
            passes = []
            for _ in range(PASSES):
                with allocated() as running:
                    again = model(**inputs)
                    settle()
                passes.append(running)
        assert torch.equal(outputs, again)
        return {
            "built": building.peak,
            "at rest": building.current,
            "pass": min(one.peak for one in passes),
            "left": min(abs(one.current) for one in passes),
            "formula": 4 * resident_numbers(model),
            "planned": 4 * planned.resident,
            "planned to receive": 4 * planned.gathered,
            "received": sum(gathers.received),
            "begun": gathers.begun,
            "layers": len(layers),
            "layer": 4 * sum(count for _, count in layer),
            "experts": 4 * sum(count for name, count in layer if ".experts." in name),
        }


def tokens() -> dict[str, Any]:
    """Arguments of a forward pass of one short sequence."""
    from megatron_distill.models.taps import LayerCall
    from megatron_distill.runtime.segments import Segments

    ids = torch.arange(8).unsqueeze(0)
    segments = Segments.whole(1, 8)
    return {
        "input_ids": ids,
        "position_ids": ids,
        "attention_mask": None,
        "extra_block_kwargs": LayerCall(segments).arguments,
    }


MOE = {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 128}}
# Ranks, the layout, changes of the shape, and the ranks that share a layer's weights and its
# experts.
MEMORY: dict[str, tuple[int, dict[str, Any], dict[str, Any], int, int]] = {
    "DP4": (4, {}, {}, 4, 4),
    "TP2 x DP2": (4, {"tensor": 2}, {}, 2, 2),
    "EP2 x DP2": (4, {"expert": 2}, MOE, 4, 2),
}


@pytest.mark.parametrize("case", quick_and_slow(MEMORY, []))
def test_a_rank_has_its_shards_and_two_layers(pool: Pool, case: str) -> None:
    world, layout, changes, ranks, expert_ranks = MEMORY[case]
    whole, sharded = (
        pool.run(world, weights_in_memory, changes, layout, is_sharded)[0]
        for is_sharded in (False, True)
    )
    layer, layers, experts = whole["layer"], whole["layers"], whole["experts"]
    held = whole["formula"] - layers * layer
    shards = layers * ((layer - experts) // ranks + experts // expert_ranks)
    assert sharded["formula"] == held + shards + 2 * layer < 0.8 * whole["formula"]
    for found in (whole, sharded):
        assert found["planned"] == pytest.approx(found["formula"], rel=0.01)
    assert whole["built"] > whole["formula"]
    assert sharded["built"] < held + shards + layer + HOST
    assert held + shards <= sharded["at rest"] < held + shards + FEW
    # gloo gathers in a copy of its own, and its thread may hold one longer on a busy machine.
    assert 2 * layer <= sharded["pass"] < 3 * layer + HOST
    assert sharded["left"] < FEW
    assert sharded["received"] == pytest.approx(sharded["planned to receive"], rel=0.01)
    per_layer = 1 if ranks == expert_ranks else 2
    ahead = [per_layer * min(number + 2, layers) for number in range(layers)]
    assert sharded["begun"] == ahead  # the next layer's gather is under way while a layer runs

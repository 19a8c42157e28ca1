"""Grouped experts against Megatron-Core's sequential ones, and that nothing reads a count.

Regimes: a row in another expert's group; gate and rows up exchanged; an expert without a row; the
sum over a token's experts in an order that changes; a count read on the host; a rank without a row;
a checkpoint of one kind read by the other; a layer of Transformer Engine, with and without FP8, on
one rank and on several; GPUs with and without a kernel.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.distributed.megatron_world import (
    build,
    megatron_groups,
    save_checkpoint,
    small_architecture,
)
from tests.distributed.models.test_parameters import transformer_engine_layers
from tests.distributed.pool import Pool

MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "renormalize": False}
SHAPES: dict[str, dict[str, Any]] = {
    "gated": {"moe": MOE},
    "plain": {"moe": MOE, "activation": "gelu"},
    "one expert per token": {"moe": {**MOE, "top_k": 1}},
    "some layers": {"moe": {**MOE, "dense_layers": (1,), "shared_ffn_hidden_size": 16}},
}


def both(
    rank: int, world: int, shape: dict[str, Any], layout: dict[str, Any]
) -> list[tuple[str, list[Tensor], dict[Any, Tensor]]]:
    """Kind of the experts, output and input gradient, gradients of weights by key and place."""
    with megatron_groups(**layout) as groups:
        from megatron_distill.models import layers
        from megatron_distill.models.weights import sharded_tensors

        architecture = small_architecture(init_std=0.2, **shape)
        found = []
        for runs in (layers.grouped_experts_run, lambda *_, **__: False):
            with patch.object(layers, "grouped_experts_run", runs):
                chunks = build(architecture, groups, seed=11)
            layer = chunks[0].decoder.layers[0].mlp
            generator = torch.Generator().manual_seed(5)
            hidden = torch.randn(12, 2, 32, generator=generator)
            if world > 1 and layout.get("sequence"):
                hidden = hidden.chunk(groups.tensor.size())[groups.tensor.rank()]
            hidden.requires_grad_()
            output, _ = layer(hidden)
            weight = torch.randn(output.shape, generator=generator)
            (output * weight).sum().backward()
            assert hidden.grad is not None
            for parameter in chunks[0].parameters():
                if parameter.grad is not None:
                    parameter.data = parameter.grad
                else:
                    parameter.data.zero_()
            gradients = {
                (part.key, part.global_shape, part.global_offset, part.replica_id): part.data
                for part in sharded_tensors(chunks, groups)
            }
            kind = type(layer.experts).__name__
            found.append((kind, [output.detach(), hidden.grad], gradients))
        return found


SPLIT: dict[str, Any] = {"tensor": 2, "sequence": True}
RUNS: list[Any] = [
    *((shape, 1, {}) for shape in SHAPES),
    ("gated", 2, {"expert": 2}),
    ("some layers", 2, {"expert": 2}),
    pytest.param("plain", 2, SPLIT, marks=pytest.mark.slow),
    pytest.param("one expert per token", 4, {**SPLIT, "expert": 2}, marks=pytest.mark.slow),
    pytest.param("some layers", 4, {**SPLIT, "expert": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("shape", "ranks", "layout"), RUNS, ids=str)
def test_a_grouped_product_is_that_of_each_expert(
    pool: Pool, shape: str, ranks: int, layout: dict[str, Any]
) -> None:
    for (kind, grouped, gradients), (other, sequential, expected) in pool.run(
        ranks, both, SHAPES[shape], layout
    ):
        assert (kind, other) == ("GroupedExperts", "SequentialMLP")
        for ours, theirs in zip(grouped, sequential, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
        assert gradients.keys() == expected.keys()
        assert any(value.abs().max() > 0.1 for key, value in gradients.items() if "fc2" in key[0])
        for key, value in gradients.items():
            torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=1e-5)


def exchanged(
    rank: int, world: int, moe: dict[str, Any], layout: dict[str, Any]
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Output and gradients of a layer whose tokens are gathered, and are sent; twice, since sizes
    change."""
    with megatron_groups(**layout) as groups:
        from megatron.core.transformer.moe import token_dispatcher

        from megatron_distill.models import experts

        (model,) = build(small_architecture(init_std=0.2, moe=moe), groups, seed=11)
        layer = model.decoder.layers[0].mlp
        gathering = layer.token_dispatcher
        assert isinstance(gathering, token_dispatcher.MoEAllGatherTokenDispatcher)
        sending = experts.SentTokens(
            layer.num_local_experts, layer.local_expert_indices, layer.config, groups.megatron
        )
        weights = list(layer.parameters())
        found = []
        for seed in range(2):
            generator = torch.Generator().manual_seed(10 * rank + seed)
            hidden = torch.randn(12, 2, 32, generator=generator, requires_grad=True)
            gradient = torch.randn(12, 2, 32, generator=generator)
            sides = []
            for layer.token_dispatcher in (gathering, sending):
                with patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", on_host):
                    output, _ = layer(hidden)
                    grads = torch.autograd.grad(output, [hidden, *weights], gradient)
                sides.append([output.detach(), *grads])
            found.append((sides[0], sides[1]))
        return found


def on_host(tensor: Any, *, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Upstream's copy of sizes, which leaves tensors of the host as they are."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


@pytest.mark.parametrize(
    ("top_k", "ranks", "layout"),
    [
        (2, 2, {"expert": 2}),
        pytest.param(1, 4, {**SPLIT, "expert": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sent_tokens_give_the_result_of_gathered_ones(
    pool: Pool, top_k: int, ranks: int, layout: dict[str, Any]
) -> None:
    for rank in pool.run(ranks, exchanged, {**MOE, "top_k": top_k}, layout):
        for gathered, sent in rank:
            for one, other in zip(gathered, sent, strict=True):
                torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)


def without_numbers(rank: int, world: int, grouped: bool) -> str:
    """Run a layer on tensors that have no numbers, forward and backward; the error, if any."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    with megatron_groups() as groups:
        from megatron_distill.models import experts, layers
        from megatron_distill.models.execution import Execution
        from megatron_distill.models.gpt import build_gpt

        architecture = small_architecture(moe=MOE)
        execution = Execution(torch.bfloat16, torch.device("cpu"))
        with (
            patch.object(layers, "grouped_experts_run", lambda *_, **__: grouped),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
        ):
            (model,) = build_gpt(architecture, groups=groups, execution=execution, seed=None)
            layer = model.decoder.layers[0].mlp
            assert isinstance(layer.token_dispatcher, experts.OwnTokens)
            hidden = mode.from_tensor(torch.randn(12, 2, 32).bfloat16()).requires_grad_()
            try:
                output, _ = layer(hidden)
                output.sum().backward()
            except DataDependentOutputException as error:
                return str(error)
            return ""


def test_no_count_is_read_on_the_host(pool: Pool) -> None:
    assert pool.run(1, without_numbers, True) == [""]
    (error,) = pool.run(1, without_numbers, False)
    assert "_local_scalar_dense" in error, "the sequential experts would show a read count"


def of_no_rows(rank: int, world: int) -> list[Tensor | None]:
    with megatron_groups() as groups:
        architecture = small_architecture(moe=MOE)
        (model,) = build(architecture, groups, seed=1)
        experts = model.decoder.layers[0].mlp.experts
        rows = torch.empty(0, 32, requires_grad=True)
        weights = torch.empty(0, requires_grad=True)
        output, _ = experts(rows, torch.zeros(4, dtype=torch.long), weights)
        assert output.shape == (0, 32)
        output.sum().backward()
        assert weights.grad is not None, "other ranks would wait for its exchange"
        return [parameter.grad for parameter in experts.parameters()]


def test_a_rank_without_a_row_has_gradients_of_zero(pool: Pool) -> None:
    (gradients,) = pool.run(1, of_no_rows)
    assert len(gradients) == 2
    for gradient in gradients:
        assert not gradient.any()


def kinds(rank: int, world: int, layout: dict[str, Any], number_format: str | None) -> str:
    """The experts of a layer of Transformer Engine, whose own are sequential ones here."""
    with megatron_groups(**layout) as groups, transformer_engine_layers():
        from megatron.core.transformer import transformer_config

        from megatron_distill.models import gpt, transformer_engine
        from megatron_distill.models.execution import Execution, Fp8

        fp8 = None if number_format is None else Fp8(number_format, "train.fp8")
        execution = Execution(torch.bfloat16, torch.device("cpu"), fp8=fp8)
        with (  # there is no GPU, and no release to ask for its version
            patch.object(transformer_config, "is_te_min_version", lambda *_: True),
            patch.object(gpt, "check_fp8", lambda *_, **__: None),
            patch.object(transformer_engine, "device_capability", lambda _: (8, 0)),
        ):
            (model,) = gpt.build_gpt(
                small_architecture(moe=MOE), groups=groups, execution=execution, seed=None
            )
        return type(model.decoder.layers[0].mlp.experts).__name__


@pytest.mark.parametrize(
    ("ranks", "layout", "number_format", "kind"),
    [
        (1, {}, None, "GroupedExperts"),
        (1, {}, "hybrid", "SequentialMLP"),
        (2, {"expert": 2}, None, "SequentialMLP"),
        (2, SPLIT, None, "SequentialMLP"),
    ],
)
def test_transformer_engine_has_own_experts_for_fp8_and_several_ranks_alone(
    pool: Pool, ranks: int, layout: dict[str, Any], number_format: str | None, kind: str
) -> None:
    assert pool.run(ranks, kinds, layout, number_format) == [kind] * ranks


def grouped_majors(rank: int, world: int) -> list[int]:
    """Major compute capabilities at which experts are grouped products."""
    from megatron_distill.models.experts import grouped_experts_run

    architecture, found = small_architecture(moe=MOE), []
    for major in range(7, 14):
        with patch.object(torch.cuda, "get_device_capability", lambda _, is_of=major: (is_of, 0)):
            if grouped_experts_run(architecture, torch.bfloat16, torch.device("cuda"), tensor=1):
                found.append(major)
    return found


def test_experts_are_grouped_on_gpus_whose_kernel_waits_for_nothing(pool: Pool) -> None:
    assert pool.run(1, grouped_majors) == [[9, 10]]


@pytest.mark.parametrize("is_engine", [False, True], ids=["torch", "engine"])
@pytest.mark.parametrize("first", ["grouped", "sequential"])
def test_a_checkpoint_of_one_kind_is_read_by_the_other(
    pool: Pool, tmp_path: Path, first: str, is_engine: bool
) -> None:
    (pairs,) = pool.run(1, through_a_checkpoint, tmp_path, first, is_engine)
    assert len(pairs) > 20
    for key, (ours, theirs) in pairs.items():
        assert ours.equal(theirs), key


def through_a_checkpoint(
    rank: int, world: int, folder: Path, first: str, is_engine: bool
) -> dict[Any, tuple[Tensor, Tensor]]:
    """Save a model with one kind of experts, load it with the other; tensors of both by place."""
    with megatron_groups() as groups, transformer_engine_layers() if is_engine else nullcontext():
        from megatron_distill.models import layers
        from megatron_distill.models.weights import fill, sharded_tensors
        from megatron_distill.train.checkpoint.reader import CheckpointWeights

        architecture = small_architecture(moe=MOE)
        sides = []
        for kind in sorted(["grouped", "sequential"], key=lambda kind: kind != first):
            is_grouped = kind == "grouped"
            with patch.object(layers, "grouped_experts_run", lambda *_, on=is_grouped, **__: on):
                sides.append(build(architecture, groups, seed=len(sides)))
        saved = save_checkpoint(folder, sides[0], architecture, groups)
        fill(sides[1], CheckpointWeights(saved, architecture), groups=groups)
        found = [
            {(part.key, part.global_offset): part.data for part in sharded_tensors(side, groups)}
            for side in sides
        ]
        assert found[0].keys() == found[1].keys()
        return {key: (value, found[1][key]) for key, value in found[0].items()}

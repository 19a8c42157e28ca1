"""Parameters of models: conversion, names, and the saved architecture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.distributed.hugging_face_models import save_model
from tests.distributed.megatron_world import (
    build,
    megatron_groups,
    saved_description,
    small_architecture,
)
from tests.distributed.pool import Pool
from tests.e2e.runs import quick_and_slow

MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tied_embeddings": True},
    "like GPT-2": {
        "norm": "layernorm", "activation": "gelu", "positions": "learned", "qkv_bias": True,
        "linear_bias": True, "num_kv_heads": 4, "tied_embeddings": True,
    },
    "biased queries": {"qkv_bias": True},
    "qk norms": {"qk_norm": True, "head_size": 12},
    "post norms": {"norm": "zero_centered_rmsnorm", "post_norms": True, "activation": "geglu"},
    "experts": {"moe": MOE, "qk_norm": True},
    "shared expert": {"moe": {**MOE, "shared_ffn_hidden_size": 40, "shared_gate": True}},
    "experts in some layers": {
        "moe": {
            **MOE, "dense_layers": (0, 2), "shared_ffn_hidden_size": 40, "score": "sigmoid",
            "correction_bias": True,
        }
    },
}  # fmt: skip
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"tensor": 2, "sequence": True}),
    (2, {"pipeline": 2}),
]
Description = tuple[str, tuple[int, ...], tuple[int, ...]]


def described(
    rank: int, world: int, shape: dict[str, Any], layout: dict[str, Any]
) -> tuple[set[Description], set[Description]]:
    """Key, leading axes and shape: of this rank's tensors, and of all tensors in conversion."""
    with megatron_groups(**layout) as groups:
        from megatron_distill.models.parameters import parameters
        from megatron_distill.models.weights import sharded_tensors

        architecture = small_architecture(**shape)
        chunks = build(architecture, groups, seed=None)
        held = {
            (part.key, part.global_shape[:axes], part.global_shape[axes:])
            for part in sharded_tensors(chunks, groups)
            for axes in [part.prepend_axis_num]
        }
        padded = architecture.padded_vocab_size(groups.layout.tensor)
        known = {
            (
                key,
                parameter.leading_shape(architecture),
                (padded, *parameter.shape[1:]) if parameter.is_vocabulary else parameter.shape,
            )
            for parameter in parameters(architecture)
            for key in parameter.stored_keys(architecture)
        }
        return held, known


@pytest.mark.parametrize(
    ("name", "ranks", "layout"),
    [(name, *LAYOUTS[number % 3]) for number, name in enumerate(SHAPES)]
    + [("experts in some layers", *layout) for layout in LAYOUTS[:2]],
)
def test_conversion_knows_every_tensor_of_a_model(
    pool: Pool, name: str, ranks: int, layout: dict[str, Any]
) -> None:
    found = pool.run(ranks, described, SHAPES[name], layout)
    assert set().union(*(held for held, _ in found)) == found[0][1]


def transformer_engine_provider() -> type:
    """Return a provider of Transformer Engine's modules that uses torch's instead."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megatron_distill.models.layers import TorchNorm

    class LayerNormColumnLinear(ColumnParallelLinear):
        """A norm and a linear layer in one, with the parameter names of Transformer Engine's."""

        def __init__(
            self, input_size: int, output_size: int, *, config: Any, **arguments: Any
        ) -> None:
            super().__init__(input_size, output_size, config=config, **arguments)
            self.epsilon = config.layernorm_epsilon
            self.layer_norm_weight = torch.nn.Parameter(self.weight.new_empty(input_size))
            self.layer_norm_bias = None
            if config.normalization == "LayerNorm":
                self.layer_norm_bias = torch.nn.Parameter(self.weight.new_empty(input_size))

        def forward(self, x: Tensor, *given: Any, **named: Any) -> Any:
            weight, bias = self.layer_norm_weight, self.layer_norm_bias
            normed = (
                F.rms_norm(x, weight.shape, weight, self.epsilon)
                if bias is None
                else F.layer_norm(x, weight.shape, weight, bias, self.epsilon)
            )
            return super().forward(normed, *given, **named)

    feed_forward = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    answers = {
        "linear": ColumnParallelLinear,
        "column_parallel_linear": ColumnParallelLinear,
        "row_parallel_linear": RowParallelLinear,
        "fuse_layernorm_and_linear": True,
        "column_parallel_layer_norm_linear": LayerNormColumnLinear,
        "layer_norm": TorchNorm,
        "core_attention": None,  # ours takes its place
        "activation_func": None,
        "grouped_mlp_modules": (SequentialMLP, feed_forward),
    }
    methods = {
        name: lambda self, *_, answer=answer, **__: answer for name, answer in answers.items()
    }
    return type("Provider", (), methods)


@contextmanager
def transformer_engine_layers() -> Iterator[None]:
    """Let models be built from Megatron-Core's specification for Transformer Engine."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.models.gpt import gpt_layer_specs

    from megatron_distill.models import layers as specs
    from megatron_distill.models.layers import TorchNorm

    provider = transformer_engine_provider()
    with ExitStack() as stack:
        for patched in (
            patch.object(gpt_layer_specs, "TESpecProvider", provider, create=True),
            patch.object(specs, "transformer_engine_runs", lambda device: True),
            # Torch's modules cannot fuse.
            patch.object(specs, "fused_config", lambda config: config),
            patch.object(transformer_engine, "TENorm", TorchNorm),
        ):
            stack.enter_context(patched)
        yield


def filled(
    rank: int, world: int, folder: Path, layout: dict[str, Any]
) -> tuple[list[str], dict[Any, Tensor], dict[Any, Tensor]]:
    """Weights by sharded key and place: in torch's modules, and in Transformer Engine's."""
    with megatron_groups(**layout) as groups, ExitStack() as stack:
        from megatron_distill.models.hugging_face.description import describe
        from megatron_distill.models.hugging_face.model import HuggingFaceWeights
        from megatron_distill.models.weights import fill, sharded_tensors

        description = describe(folder)
        weights = HuggingFaceWeights(folder, description)
        names: list[str] = []
        sides: list[dict[Any, Tensor]] = []
        for layers in (None, transformer_engine_layers):
            if layers is not None:
                stack.enter_context(layers())
            chunks = build(description.architecture, groups, seed=None)
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.data.fill_(torch.nan)
            fill(chunks, weights, groups=groups)
            names = [name for chunk in chunks for name, _ in chunk.named_parameters()]
            sides.append(
                {
                    (part.key, part.global_shape, part.global_offset): part.data
                    for part in sharded_tensors(chunks, groups)
                }
            )
            for chunk in chunks:
                for parameter_name, parameter in chunk.named_parameters():
                    assert not parameter.isnan().any(), f"nothing reached {parameter_name}"
        return names, *sides  # type: ignore[return-value]


@pytest.mark.parametrize(
    "name",
    quick_and_slow(
        ["llama3.1", "qwen2", "gpt2", "qwen3", "gemma2", "qwen3_moe"], ["gpt2", "qwen3_moe"]
    ),
)
def test_weights_reach_the_names_of_transformer_engine(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    folder = save_model(tmp_path, name, tie_word_embeddings=False)
    # On one expert rank the experts are torch's.
    layout = {"expert": 2} if name == "qwen3_moe" else {"tensor": 2, "sequence": True}
    found = pool.run(2, filled, folder, layout)
    for names, torch_side, engine_side in found:
        assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names
        expected = (
            "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
            if name == "qwen3_moe"
            else "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
        )
        assert expected in names
        assert torch_side.keys() == engine_side.keys()
        for place, value in torch_side.items():
            assert value.equal(engine_side[place]), place


SLIDING: dict[str, Any] = {
    "sliding_window": 5,
    "sliding_layers": (0, 2),
    "rope_scaling": {"kind": "linear", "factor": 2.0},
}
EXPERTS: dict[str, Any] = {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}}


def _complaint(
    rank: int,
    world: int,
    saved: dict[str, Any],
    forgotten: list[str],
    added: dict[str, Any],
    ours: dict[str, Any],
) -> str:
    architecture = small_architecture(**ours)
    from megatron_distill.errors import CheckpointError
    from megatron_distill.train.checkpoint.description import check_same_model

    values = json.loads(json.dumps(small_architecture(**saved).as_dict()))
    for name in forgotten:
        holder, _, key = name.rpartition(".")
        del (values[holder] if holder else values)[key]
    description = saved_description({**values, **added}, tokenizer="abc")
    try:
        check_same_model(description, architecture, "abc", Path("folder"))
    except CheckpointError as error:
        return str(error)
    return ""


OLDER = ["sliding_window", "sliding_layers", "rope_scaling", "post_norms", "embedding_scale"]
SAME: dict[str, tuple[dict[str, Any], list[str]]] = {
    "of this release": (SLIDING, []),
    "of an older release": ({}, OLDER),
    "experts of an older release": (EXPERTS, [*OLDER, "moe.renormalize"]),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same_model_is_known_again(pool: Pool, case: str) -> None:
    changes, forgotten = SAME[case]
    assert pool.run(1, _complaint, changes, forgotten, {}, changes) == [""]


def test_another_model_is_distinguished_by_fields_that_only_one_of_them_has(pool: Pool) -> None:
    (text,) = pool.run(1, _complaint, {}, OLDER, {}, SLIDING)
    assert "sliding_window None vs 5" in text
    assert "rope_scaling.kind None vs 'linear'" in text
    (text,) = pool.run(1, _complaint, SLIDING, [], {}, {**SLIDING, "sliding_layers": (0, 1)})
    assert "sliding_layers (0, 2) vs (0, 1)" in text


def test_a_field_of_another_release_is_named(pool: Pool) -> None:
    (text,) = pool.run(1, _complaint, {}, [], {"sinks": 4}, {})
    assert "of another release" in text
    assert "sinks" in text

"""Decisions about Transformer Engine, its attention's arguments, the errors where it is missing.

Transformer Engine needs CUDA to be installed. In place of its attention stands one that computes
packed documents from the same arguments, document by document; in place of its layers torch's.

Regimes: lengths of another sample; a window one key too wide; samples and positions exchanged; a
fusion in a module that cannot compute it; FP8 in a model, a width or an environment without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_distill.runtime.batch import Batch
from tests.distributed.megatron_world import build, megatron_groups, small_architecture
from tests.distributed.models.test_parameters import transformer_engine_layers
from tests.distributed.pool import Pool

LENGTH = 24


class PackedAttention(torch.nn.Module):
    """Causal attention of rows [t, n, d] within the documents of `PackedSeqParams`."""

    def __init__(self, config: Any, layer_number: int, **named: Any) -> None:
        super().__init__()
        assert config.window_attn_skip_freq is None
        assert named.keys() >= {"attn_mask_type", "attention_type", "softmax_scale"}
        self.window, self.scale = config.window_size, named["softmax_scale"]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        attn_mask_type: Any,
        packed_seq_params: Any,
    ) -> Tensor:
        """Attend; returns [t, n * d]."""
        packed = packed_seq_params
        assert (packed.qkv_format, attn_mask_type.name) == ("thd", "causal")
        assert torch.equal(packed.cu_seqlens_q, packed.cu_seqlens_kv)
        bounds = packed.cu_seqlens_q.tolist()
        lengths = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
        assert max(lengths) == packed.max_seqlen_q == packed.max_seqlen_kv
        assert bounds[-1] == query.shape[0]
        found = []
        for rows in zip(*(part.split(lengths) for part in (query, key, value)), strict=True):
            q, k, v = (part.transpose(0, 1) for part in rows)
            count = q.shape[1]
            mask = torch.ones(count, count, dtype=torch.bool).tril()
            if self.window is not None:
                mask = mask.triu(-self.window[0])
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True
            )
            found.append(attended.transpose(0, 1).flatten(1))
        return torch.cat(found)


SHAPES: dict[str, dict[str, Any]] = {
    "documents": {},
    "windows": {"sliding_window": 5, "sliding_layers": (1, 2)},
    "scalar": {"attention_scalar": 3.0, "num_kv_heads": 4},
    "soft cap": {"attention_softcap": 2.0},
}


def attended(rank: int, world: int, shape: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Kind of the attention and hidden states: of torch's layers, and of the engine's in place."""
    with megatron_groups() as groups:
        from megatron.core.extensions import transformer_engine as extension

        from megatron_distill.models import layers, transformer_engine
        from megatron_distill.models.execution import Execution
        from megatron_distill.models.gpt import build_gpt, run_model
        from tests.distributed.models.test_models import packed_batch

        batch = packed_batch(isolate=True)
        batch = replace(batch, documents=batch.segments.to("cpu"))
        assert not Batch.untrained(batch.tokens_bs).segments.packed
        architecture = small_architecture(init_std=0.2, vocab_size=224, **shape)
        execution = Execution(torch.bfloat16, torch.device("cpu"))
        found = []
        for runs in (False, True):
            with (
                patch.object(extension, "TEDotProductAttention", PackedAttention),
                patch.object(layers, "transformer_engine_runs", lambda _, runs=runs: runs),
                patch.object(layers, "fused_rope_config", lambda _: None),
                patch.object(layers, "fused_config", lambda config: config),
                patch.object(layers, "_transformer_engine_layer", layers._torch_layer),
                patch.object(layers, "_norm", lambda _: layers.TorchNorm),
                patch.object(transformer_engine, "device_capability", lambda _: (9, 0)),
            ):
                (model,) = build_gpt(architecture, groups=groups, execution=execution, seed=3)
            kind = type(model.decoder.layers[1].self_attention.core_attention).__name__
            found.append((kind, run_model(model, batch, context_size=1).detach()))
        return found


@pytest.mark.parametrize("shape", SHAPES)
def test_its_attention_gets_the_documents_windows_and_scale_of_ours(pool: Pool, shape: str) -> None:
    (((kind, expected), (engine, found)),) = pool.run(1, attended, SHAPES[shape])
    assert kind == "TorchAttention"
    assert engine == ("TorchAttention" if shape == "soft cap" else "EngineAttention")
    scale = float(expected.abs().max())
    assert scale > 1, "states so small would hide a mistake"
    torch.testing.assert_close(found, expected, atol=0.04 * scale, rtol=0)  # bf16


ATTENTION: dict[str, tuple[dict[str, Any], tuple[int, int], bool]] = {
    "Hopper": ({}, (9, 0), True),
    "wide heads on Hopper": ({"head_size": 256}, (9, 0), True),
    "wide heads on Blackwell": ({"head_size": 256}, (10, 0), False),
    "odd heads": ({"head_size": 12}, (9, 0), False),
    "Ampere": ({}, (8, 0), False),
    "Ada": ({}, (8, 9), False),
    "a workstation's Blackwell": ({}, (12, 0), False),
    "a window": ({"sliding_window": 5}, (9, 0), True),
    "dropout": ({"attention_dropout": 0.1}, (9, 0), True),
    "dropout in a window": ({"attention_dropout": 0.1, "sliding_window": 5}, (9, 0), False),
}


def attends(
    rank: int, world: int, cases: dict[str, tuple[dict[str, Any], tuple[int, int], bool]]
) -> dict[str, bool]:
    """Whether the engine's attention is chosen."""
    with megatron_groups():
        from megatron_distill.models import transformer_engine
        from megatron_distill.models.execution import Execution, transformer_config
        from megatron_distill.runtime.groups import Layout

        cpu, found = torch.device("cpu"), {}
        for name, (shape, capability, _) in cases.items():
            architecture = small_architecture(**shape)
            config = transformer_config(architecture, Layout(), Execution(torch.bfloat16, cpu))
            with patch.object(
                transformer_engine, "device_capability", lambda _, own=capability: own
            ):
                found[name] = transformer_engine.engine_attends(architecture, config, cpu)
        return found


def test_its_attention_runs_where_its_kernel_for_packed_documents_does(pool: Pool) -> None:
    """Elsewhere its scores would be in memory."""
    (found,) = pool.run(1, attends, ATTENTION)
    assert found == {name: expected for name, (_, _, expected) in ATTENTION.items()}


def fused_rotation(t: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
    """Rotate as its kernel does: angles of one sample in fp32, read from memory in a line."""
    assert not interleaved
    assert freqs.dtype is torch.float32
    assert freqs.shape[1:3] == (1, 1)
    count, size = freqs.shape[0], freqs.shape[3]
    line = torch.as_strided(freqs, (count, 1, 1, size), (size, size, size, 1))
    first, second = t[..., :size].chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    found = t[..., :size] * line.cos() + turned * line.sin()
    return torch.cat([found, t[..., size:]], -1).to(t.dtype)


def rotated(rank: int, world: int, shape: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Hidden states with plain and with fused rotary positions, and the fused calls."""
    with megatron_groups() as groups, transformer_engine_layers():
        from megatron.core.models.common.embeddings import rope_utils

        from megatron_distill.models import layers
        from megatron_distill.models.gpt import run_model

        calls: list[Tensor] = []

        def fused(t: Tensor, freqs: Tensor, *, interleaved: bool) -> Tensor:
            calls.append(freqs)
            return fused_rotation(t, freqs, interleaved)

        batch = Batch.untrained(torch.arange(LENGTH)[None])
        architecture = small_architecture(init_std=0.2, **shape)
        found = []
        for kernel in (None, fused):
            with (
                patch.object(layers, "fused_config", lambda config: config),
                patch.object(rope_utils, "fused_apply_rotary_pos_emb", kernel),
            ):
                (model,) = build(architecture, groups, seed=3)
                found.append(run_model(model, batch, context_size=1).detach())
        return found[0], found[1], len(calls)


@pytest.mark.parametrize(
    "shape",
    [
        {"rotary_fraction": 0.5},
        {"sliding_window": 5, "sliding_layers": (0, 2), "sliding_rope_base": 50.0},
    ],
    ids=["a part of each head", "two bases"],
)
def test_fused_positions_are_those_of_the_layer(pool: Pool, shape: dict[str, Any]) -> None:
    ((plain, fused, calls),) = pool.run(1, rotated, shape)
    assert calls == 2 * 4  # queries and keys of each layer
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


def decisions(rank: int, world: int) -> dict[str, Any]:
    """Fields of the configurations of a model with Transformer Engine's layers in place."""
    with megatron_groups() as groups, transformer_engine_layers():
        from megatron.core.models.common.embeddings import rope_utils

        from megatron_distill.models import layers, transformer_engine

        moe = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "dense_layers": (0,)}
        found: dict[str, Any] = {}

        def kept(config: Any) -> Any:
            found.setdefault("layers", transformer_engine.fused_config(config))
            return config  # the modules in place cannot fuse

        with (
            patch.object(layers, "fused_config", kept),
            patch.object(rope_utils, "fused_apply_rotary_pos_emb", lambda *_, **__: None),
        ):
            (model,) = build(small_architecture(moe=moe), groups, seed=None)
        attention = model.decoder.layers[0].self_attention
        used = []
        for samples in (1, 2):
            hidden = torch.randn(4, samples, 32)
            with patch.object(layers.SelfAttention, "forward", lambda self, *_, **__: (self, None)):
                attention(hidden, None)
            used.append(attention.config.apply_rope_fusion)
        return {
            "fused rope, by samples": used,
            "core attention in fp32": type(attention.core_attention).__name__,
            "gradients": found["layers"].gradient_accumulation_fusion,
            "head's gradients": model.config.gradient_accumulation_fusion,
            "experts": found["layers"].moe_grouped_gemm,
            "ordering": found["layers"].moe_permute_fusion,
        }


def test_fusions_are_those_that_fit(pool: Pool) -> None:
    assert pool.run(1, decisions) == [
        {
            "fused rope, by samples": [True, False],
            "core attention in fp32": "TorchAttention",
            "gradients": True,
            "head's gradients": False,
            "experts": True,
            "ordering": False,  # the kernel is not in this installation
        }
    ]


def fp8_of(
    rank: int,
    world: int,
    shape: dict[str, Any],
    tensor: int,
    runs: bool,
    capability: tuple[int, int],
    number_format: str = "hybrid",
) -> str:
    """The FP8 fields of a model's configuration, or the error."""
    with megatron_groups():
        from megatron_distill.errors import ConfigError
        from megatron_distill.models import transformer_engine
        from megatron_distill.models.execution import Execution, Fp8, transformer_config
        from megatron_distill.runtime.groups import Layout

        architecture = small_architecture(**shape)
        fp8 = Fp8(number_format, "teacher.fp8")
        execution = Execution(torch.bfloat16, torch.device("cpu"), fp8=fp8)
        layout = Layout(tensor=tensor)
        try:
            with patch.object(transformer_engine, "device_capability", lambda _: capability):
                transformer_engine.check_fp8(architecture, layout, execution, engine_runs=runs)
        except ConfigError as error:
            return str(error)
        config = transformer_config(architecture, layout, execution)
        return f"{config.fp8} {config.fp8_recipe} {config.fp8_param}"


FP8: dict[str, tuple[dict[str, Any], int, bool, tuple[str, ...]]] = {
    "as asked": ({}, 1, True, ("hybrid tensorwise False",)),
    "missing": (
        {}, 1, False,
        ("teacher.fp8 = 'hybrid'", "needs Transformer Engine", "[gpu]", "teacher.fp8=null"),
    ),
    "old": ({}, 1, True, ("compute capability 8.9", "has 8.0", "teacher.fp8=null")),
    "narrow": ({"ffn_hidden_size": 40}, 1, True, ("ffn_hidden_size is 40", "multiples of 16")),
    "narrow on a rank": ({}, 4, True, ("width of the attention is 8", "lower parallel.tensor")),
    "narrow experts": (
        {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}}, 1, True,
        ("moe.ffn_hidden_size is 24",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FP8)
def test_fp8_is_set_or_refused_by_key_value_and_remedy(pool: Pool, case: str) -> None:
    shape, tensor, runs, parts = FP8[case]
    capability = (8, 0) if case == "old" else (8, 9)
    (found,) = pool.run(1, fp8_of, shape, tensor, runs, capability)
    for part in parts:
        assert part in found


def test_the_other_number_format_reaches_the_configuration_too(pool: Pool) -> None:
    (found,) = pool.run(1, fp8_of, {}, 1, True, (8, 9), "e4m3")
    assert found == "e4m3 tensorwise False"

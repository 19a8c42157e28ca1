"""Transformer Engine's attention, fusions and FP8, where Megatron-Core has imported it.

Not yet run on a GPU: written against the source of Megatron-Core 0.16.1, and tested with a stand-in
for its modules. The overlap of tensor-parallel messages is in `user_buffers`.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_distill.errors import ConfigError
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.attention import TorchAttention
from megatron_distill.models.attention_kernels.rule import AttentionRule
from megatron_distill.models.execution import Execution
from megatron_distill.models.layer_kinds import LayerKinds
from megatron_distill.models.user_buffers import BufferShape
from megatron_distill.runtime.layout import Layout
from megatron_distill.runtime.segments import Segments

_FP8_MULTIPLE = 16  # of the widths of a matrix
_FP8_CAPABILITY = (8, 9)
# Of fused attention over packed documents, with gradients: the widest heads by compute capability,
# and what their width is a multiple of (`nvte_get_fused_attn_backend` of 2.11, cuDNN from 9.6 on).
_WIDEST_HEADS = {9: 256, 10: 128}
_HEAD_MULTIPLE = 8


def fused_config(config: TransformerConfig) -> TransformerConfig:
    """Return the configuration of layers: weight gradients are added to fp32 by their products.

    For layers only: the embedding and the output head are Megatron-Core's own modules, which need
    Apex for this. Tokens are ordered by expert in one kernel where the installed release has it.
    """
    fused = copy.copy(config)
    fused.gradient_accumulation_fusion = True
    if config.num_moe_experts is not None:
        fused.moe_grouped_gemm = True
        fused.moe_permute_fusion = _has("transformer.moe.moe_utils", "fused_permute_with_probs")
    return fused


def fused_rope_config(config: TransformerConfig) -> TransformerConfig | None:
    """Return the configuration of an attention with fused rotary positions, None without them.

    The kernel takes one sample's angles [s, 1, 1, r]: it fits micro-batches of one sample, whose
    angles restart with each document all the same.
    """
    if not _has("models.common.embeddings.rope_utils", "fused_apply_rotary_pos_emb"):
        return None
    fused = copy.copy(config)
    fused.apply_rope_fusion = True
    return fused


def _has(module: str, name: str) -> bool:
    found = importlib.import_module(f"megatron.core.{module}")
    return getattr(found, name, None) is not None


def engine_attends(
    architecture: Architecture, config: TransformerConfig, device: torch.device
) -> bool:
    """Return whether Transformer Engine's attention computes a model's layers.

    It has no soft cap. Its context parallelism divides each document among the ranks, and the
    loader's divides the sequence, so that `TorchAttention` computes those runs. Elsewhere it would
    fall back silently to an attention whose scores are in memory. cuDNN's kernels for packed
    documents exist on data-centre Hopper and Blackwell, for some head sizes, and without dropout in
    a window.
    """
    is_short = config.params_dtype in (torch.bfloat16, torch.float16)
    if not is_short or architecture.attention_softcap is not None:
        return False
    has_window = architecture.sliding_window is not None
    if config.context_parallel_size > 1 or (has_window and architecture.attention_dropout):
        return False
    widest = _WIDEST_HEADS.get(device_capability(device)[0], 0)
    return architecture.head_size <= widest and architecture.head_size % _HEAD_MULTIPLE == 0


def device_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


class EngineAttention(TorchAttention):
    """Transformer Engine's attention over packed documents (THD), in place of torch's kernels.

    The documents' cumulative lengths are those of the loader; nothing waits for the device.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, kinds: LayerKinds, **named: Any
    ) -> None:
        super().__init__(config, layer_number, **named)
        from megatron.core.extensions import transformer_engine

        window = kinds.window_of(layer_number - 1)
        config = copy.copy(config)
        config.window_size = None if window is None else (window - 1, 0)
        config.window_attn_skip_freq = None
        self.engine = transformer_engine.TEDotProductAttention(config, layer_number, **named)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: AttentionRule
    ) -> Tensor:
        """Return [s, b, n, d]; `rule` is that of the engine's own configuration."""
        assert rule.softcap is None
        assert rule.dropout or not (self.training and self.rule.dropout), "the engine would drop"
        (packed,) = segments.packed
        documents = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=packed.query_ends,
            cu_seqlens_kv=packed.key_ends,
            max_seqlen_q=packed.longest_query,
            max_seqlen_kv=packed.longest_key,
        )
        rows = (part.transpose(0, 1).flatten(0, 1) for part in (query, key, value))
        attended = self.engine(*rows, None, AttnMaskType.causal, packed_seq_params=documents)
        samples = query.shape[1]
        heads = attended.reshape(samples, -1, *query.shape[2:])
        return heads.transpose(0, 1)


def check_fp8(
    architecture: Architecture, layout: Layout, execution: Execution, *, engine_runs: bool
) -> None:
    """Raise ConfigError where the FP8 of `execution` cannot be computed for a model."""
    fp8 = execution.fp8
    if fp8 is None:
        return
    setting = f"{fp8.key} = {fp8.format!r}"
    if not engine_runs:
        raise ConfigError(
            f"{setting}: FP8 needs Transformer Engine on a CUDA device, and it is missing or off; "
            f"install megatron-distill[gpu], see docs/running.md, or set {fp8.key}=null"
        )
    capability = device_capability(execution.device)
    if capability < _FP8_CAPABILITY:
        raise ConfigError(
            f"{setting}: FP8 needs a GPU of compute capability {_in_words(_FP8_CAPABILITY)} or "
            f"higher, and this one has {_in_words(capability)}; set {fp8.key}=null"
        )
    for name, width in _widths(architecture, layout):
        if width % _FP8_MULTIPLE:
            raise ConfigError(
                f"{setting}: the model's {name} is {width} on a rank; FP8 needs multiples of "
                f"{_FP8_MULTIPLE}: set {fp8.key}=null or lower parallel.tensor"
            )


def _in_words(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def overlap_shape(
    architecture: Architecture, layout: Layout, execution: Execution, *, engine_runs: bool
) -> BufferShape | None:
    """Return the shape of a model's user buffers; None without overlap or tensor parallelism.

    Raises ConfigError where Transformer Engine is missing.
    """
    overlap = execution.tensor_overlap
    if overlap is None or layout.tensor == 1:
        return None
    if not engine_runs:
        raise ConfigError(
            "runtime.tp_comm_overlap = true: needs Transformer Engine on a CUDA device, and it is "
            "missing or off; install megatron-distill[gpu], see docs/running.md, or set "
            "runtime.tp_comm_overlap=false"
        )
    assert layout.sequence, "without sequence parallelism there is nothing to gather"
    return BufferShape(
        overlap.samples * overlap.length // layout.context,
        architecture.hidden_size,
        layout.tensor,
        is_fp8=execution.fp8 is not None,
    )


def _widths(architecture: Architecture, layout: Layout) -> list[tuple[str, int]]:
    """Return the widths of a rank's matrices by their names."""
    tensor, moe = layout.tensor, architecture.moe
    heads = architecture.num_attention_heads
    projected = (heads + 2 * architecture.num_kv_heads) * architecture.head_size
    widths = [
        ("hidden_size", architecture.hidden_size),
        ("width of the attention", heads * architecture.head_size // tensor),
        ("width of queries, keys and values", projected // tensor),
    ]
    if moe is None or moe.dense_layers:
        widths.append(("ffn_hidden_size", architecture.ffn_hidden_size // tensor))
    if moe is not None:
        share = 1 if layout.expert > 1 else tensor
        widths.append(("moe.ffn_hidden_size", moe.ffn_hidden_size // share))
        if moe.shared_ffn_hidden_size is not None:
            widths.append(("moe.shared_ffn_hidden_size", moe.shared_ffn_hidden_size // tensor))
    return widths

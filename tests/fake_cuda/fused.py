"""A training on the fused paths of Transformer Engine, whose kernels only look at their inputs.

Here: attention over packed documents, rotary positions, weight gradients added to the buffer,
grouped experts, the order of their tokens, contexts of FP8, Adam, overlapped messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_distill.config import load_config
from tests.fake_cuda import train
from tests.fake_cuda.opened import Opened, open_world


def main(rank: int, world: int, path: str, overrides: Sequence[str]) -> None:
    """Train as `train` does, with layers that overlap messages if the configuration asks for it."""
    overlaps = load_config(path, overrides).runtime.tp_comm_overlap

    with ExitStack() as stack:

        def opened(rank: int, world: int) -> Opened:
            found = open_world(rank, world)
            from tests.distributed.models.test_parameters import transformer_engine_layers
            from tests.distributed.models.test_tensor_overlap import overlapping_layers
            from tests.e2e.devices.test_transformer_engine_seams import fused_adam

            calls = found.attention
            if overlaps:
                _count_messages(stack.enter_context(overlapping_layers()), calls)
            else:
                stack.enter_context(transformer_engine_layers())
                _stand_in_experts(calls)
            stack.enter_context(fused_adam())
            _stand_in_attention(calls)
            _stand_in_gradients(calls)
            _stand_in_fp8(calls)
            return found

        stack.enter_context(patch.object(train, "open_world", opened))
        train.main(rank, world, path, overrides)


def _on_device(*tensors: Tensor) -> None:
    assert {one.device.type for one in tensors} == {"cuda"}


def _count_messages(engine: Any, calls: Counter[str]) -> None:
    """Count the messages that have a user buffer, by their product."""
    look = engine.look

    def noted(name: str, sent: Tensor, *, ranks: int) -> None:
        calls[name] += 1
        look(name, sent, ranks=ranks)

    engine.look = noted


def _stand_in_gradients(calls: Counter[str]) -> None:
    """Let products add their weight's gradient to its buffer, as fused ones do."""
    from megatron.core.tensor_parallel import layers as products

    from megatron_distill.models import layers, transformer_engine

    def added(rows: Tensor, gradient: Tensor, total: Tensor) -> None:
        _on_device(rows, gradient, total)
        assert total.dtype is torch.float32
        calls["gradient"] += 1
        total.add_(gradient.t() @ rows)

    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=added)
    patch.object(products, "fused_weight_gradient_mlp_cuda", kernels, create=True).start()
    patch.object(products, "_grad_accum_fusion_available", True).start()
    patch.object(layers, "fused_config", transformer_engine.fused_config).start()


def _stand_in_fp8(calls: Counter[str]) -> None:
    """Count the layers that run in a context of FP8."""
    from megatron.core.transformer import transformer_block

    from megatron_distill.models import gpt

    @contextmanager
    def in_fp8(config: Any, layer: int = -1, is_init: bool = False) -> Iterator[None]:
        assert config.fp8
        assert layer >= 0
        calls["fp8"] += not is_init
        yield

    patch.object(transformer_block, "get_fp8_context", in_fp8).start()
    patch.object(gpt, "transformer_engine_runs", lambda _: True).start()


def _stand_in_experts(calls: Counter[str]) -> None:
    """Put grouped products in their place, and the kernels that order tokens by expert."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    from megatron_distill.models import gpt
    from tests.distributed.models.test_parameters import transformer_engine_provider

    class Grouped(torch.nn.Module):
        """Products of an expert each, of rows whose numbers the host knows."""

        def __init__(self, experts: int, columns: int, rows: int, *, config: Any, **_: Any) -> None:
            super().__init__()
            device = torch.cuda.current_device()
            for expert in range(experts):
                values = torch.empty(rows, columns, dtype=config.params_dtype, device=device)
                weight = torch.nn.Parameter(values)
                weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
                self.register_parameter(f"weight{expert}", weight)

        def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, None]:
            _on_device(rows)
            assert all(type(count) is int for count in counts)
            calls["grouped"] += 1
            products = [F.linear(rows, weight) for weight in self.parameters()]
            return torch.stack(products).sum(0), None

    def ordered(
        tokens: Tensor, probs: Tensor, routing: Tensor, *, num_out_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        _on_device(tokens, probs, routing)
        calls["order"] += 1
        copies = num_out_tokens // len(tokens)
        return tokens.repeat(copies, 1), probs.sum(1).repeat(copies), routing.int()

    def summed(rows: Tensor, routing: Tensor, *, restore_shape: Any, **_: Any) -> Tensor:
        _on_device(rows, routing)
        return rows.unflatten(0, (-1, restore_shape[0])).sum(0)

    def sorted_chunks(rows: Tensor, *others: Tensor) -> Any:
        _on_device(rows, *others)
        *probs, _, _ = others  # sizes, order
        return (rows * 1, probs[0] * 1) if probs else rows * 1

    modules = (TEGroupedMLP, MLPSubmodules(linear_fc1=Grouped, linear_fc2=Grouped))
    own = {"grouped_mlp_modules": lambda *_, **__: modules}
    provider = type("Provider", (transformer_engine_provider(),), own)
    patch.object(gpt_layer_specs, "TESpecProvider", provider).start()
    for name, kernel in (
        ("HAVE_TE", True),
        ("fused_permute_with_probs", ordered),
        ("fused_unpermute", summed),
        ("fused_sort_chunks_by_index_with_probs", sorted_chunks),
        ("fused_sort_chunks_by_index", sorted_chunks),
    ):
        patch.object(moe_utils, name, kernel, create=True).start()
    # Weights have no values here, and grouped ones no description.
    patch.object(gpt, "initialise", lambda *_, **__: None).start()


def _stand_in_attention(calls: Counter[str]) -> None:
    """Put attention and rotary positions of the engine's arguments in its place."""
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.models.common.embeddings import rope_utils

    class PackedAttention(torch.nn.Module):
        """Of the shape of attention over packed documents."""

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any
        ) -> Tensor:
            packed = packed_seq_params
            for ends in (packed.cu_seqlens_q, packed.cu_seqlens_kv):
                assert (ends.device.type, ends.dtype) == ("cuda", torch.int32)
            assert isinstance(packed.max_seqlen_q, int)
            assert isinstance(packed.max_seqlen_kv, int)
            calls["thd"] += 1
            groups = query.shape[1] // key.shape[1]
            return (query + (key + value).repeat_interleave(groups, 1)).flatten(1)

    def rotated(t: Tensor, freqs: Tensor, *, interleaved: bool) -> Tensor:
        """Rotate [s, b, n, d] in the kernel's way, by angles on the device."""
        assert not interleaved
        assert (freqs.device.type, freqs.dtype) == ("cuda", torch.float32)
        assert freqs.is_contiguous()
        calls["rope"] += 1
        size = freqs.shape[-1]
        return torch.cat([(t[..., :size] * freqs.cos()).to(t.dtype), t[..., size:]], -1)

    patch.object(extension, "TEDotProductAttention", PackedAttention).start()
    patch.object(rope_utils, "fused_apply_rotary_pos_emb", rotated).start()

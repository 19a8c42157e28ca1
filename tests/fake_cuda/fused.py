"""A training on the fused paths of Transformer Engine, whose kernels only look at their inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.fake_cuda import train
from tests.fake_cuda.opened import Opened, open_world


def main(rank: int, world: int, path: str, overrides: Sequence[str]) -> None:
    """Train as `train` does."""

    with ExitStack() as stack:

        def opened(rank: int, world: int) -> Opened:
            found = open_world(rank, world)
            from tests.distributed.models.test_parameters import transformer_engine_layers

            stack.enter_context(transformer_engine_layers())
            _stand_in(found.attention)
            return found

        stack.enter_context(patch.object(train, "open_world", opened))
        train.main(rank, world, path, overrides)


def _stand_in(calls: Counter[str]) -> None:
    """Put modules of the engine's names and arguments in its place, and count their calls."""
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

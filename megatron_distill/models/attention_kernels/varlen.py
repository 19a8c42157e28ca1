"""Attention on CUDA in 16 bits: torch's flash kernel over packed documents.

`torch.nn.attention.varlen.varlen_attn` takes cumulative lengths of queries and keys. It aligns the
causal triangle of a document at the bottom right. So a context rank's piece is one call: its
queries, with the keys of their documents up to the piece's end. In the kernel grouped heads read
shared keys, and the sliding window skips the blocks outside. The backward pass is the kernel's own.
Cumulative lengths were copied with the micro-batch: nothing waits for the device.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_distill.models.attention_kernels.rule import AttentionRule
from megatron_distill.runtime.segments import PackedPiece, Segments

# The kernel's limits on the head size.
_LARGEST_HEAD, _HEAD_MULTIPLE = 256, 8


def takes(query: Tensor, rule: AttentionRule) -> bool:
    """Whether the kernel computes this rule on these queries."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and rule.softcap is None
        and not rule.dropout
        and query.shape[-1] <= _LARGEST_HEAD
        and query.shape[-1] % _HEAD_MULTIPLE == 0
        and {"scale", "window_size"} <= arguments()
    )


@cache
def arguments() -> frozenset[str]:
    """Return the names of the kernel's arguments; none where this torch has no such kernel.

    torch 2.10 has it without scale and window. Before `enable_gqa` grouped heads needed no word.
    """
    if find_spec("torch.nn.attention.varlen") is None:
        return frozenset()
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def attend(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: AttentionRule
) -> Tensor:
    """Attend on CUDA, without soft cap or dropout.

    query [s, b, n, d]; key and value [S, b, g, d], of the whole sequence in its order, bf16 or
    fp16. Returns [s, b, n, d].
    """
    from torch.nn.attention.varlen import varlen_attn

    samples = query.shape[1]
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in arguments() else {}
    found = []
    for packed in segments.packed:
        attended = varlen_attn(
            query[packed.piece.queries].transpose(0, 1).flatten(0, 1),
            _keys(key, packed),
            _keys(value, packed),
            packed.query_ends,
            packed.key_ends,
            packed.longest_query,
            packed.longest_key,
            scale=rule.scale,
            window_size=_window(rule.window_of(packed.longest_key)),
            **grouped,
        )
        assert isinstance(attended, Tensor)  # no log-sum-exp was asked for
        found.append(attended.unflatten(0, (samples, -1)).transpose(0, 1))
    return found[0] if len(found) == 1 else torch.cat(found)


def _window(window: int | None) -> tuple[int, int]:
    """Return the keys before and after a query's own that it sees; -1: all of them."""
    return (-1 if window is None else window - 1, 0)


def _keys(keys: Tensor, packed: PackedPiece) -> Tensor:
    """Return the keys [documents' keys, g, d] that a piece sees, sample by sample."""
    stop = packed.piece.stop
    if len(set(packed.first_keys)) == 1:
        return keys[packed.first_keys[0] : stop].transpose(0, 1).flatten(0, 1)
    parts = [keys[first:stop, sample] for sample, first in enumerate(packed.first_keys)]
    return torch.cat(parts)

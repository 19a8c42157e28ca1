"""Attention by its definition: a masked softmax over all keys, in the dtype of its inputs.

Also the contract of `torch.nn.attention.varlen.varlen_attn`, from its documentation.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible_keys(document_ids_bS: Tensor, query_index_s: Tensor, window: int | None) -> Tensor:
    """Return [b, s, S], true where a query sees a key: one document, not later, not too far."""
    keys_S = torch.arange(document_ids_bS.shape[1])
    near_sS = keys_S <= query_index_s[:, None]
    if window is not None:
        near_sS = near_sS & (keys_S > query_index_s[:, None] - window)
    own_bs = document_ids_bS[:, query_index_s]
    return (document_ids_bS[:, None, :] == own_bs[:, :, None]) & near_sS


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible_bsS: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Attend: query [s, b, n, d], key and value [S, b, g, d]; returns [s, b, n, d]."""
    repeats = query.shape[2] // key.shape[2]
    queries = query.permute(1, 2, 0, 3)
    keys, values = (x.permute(1, 2, 0, 3).repeat_interleave(repeats, 1) for x in (key, value))
    scores = queries @ keys.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    chances = scores.masked_fill(~visible_bsS.unsqueeze(1), float("-inf")).softmax(-1)
    return (chances @ values).permute(2, 0, 1, 3)


def documented_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Attend within each packed sequence, its last query at its last key.

    query [T_q, n, d], key and value [T_k, g, d]; (left, 0) lets a query see `left` keys before its
    own, all of them for -1.
    """
    left, right = window_size
    assert right == 0
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert int(cu_seq_q[-1]) == query.shape[0]
    assert int(cu_seq_k[-1]) == key.shape[0] == value.shape[0]
    assert int(cu_seq_q.diff().max()) == max_q
    assert int(cu_seq_k.diff().max()) == max_k
    found = []
    for q, k, v in zip(
        query.split(cu_seq_q.diff().tolist()),
        key.split(cu_seq_k.diff().tolist()),
        value.split(cu_seq_k.diff().tolist()),
        strict=True,
    ):
        own = torch.arange(len(q)) + len(k) - len(q)
        visible = visible_keys(torch.zeros(1, len(k)), own, None if left == -1 else left + 1)
        found.append(
            masked_attention(*(x.unsqueeze(1) for x in (q, k, v)), visible, scale=scale)[:, 0]
        )
    return torch.cat(found)

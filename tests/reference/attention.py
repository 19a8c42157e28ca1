"""Attention by its definition: a masked softmax over all keys, in the dtype of its inputs.

Also the contract of `torch.nn.attention.varlen.varlen_attn`, from its documentation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


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


def blockwise_gradients(
    mask: BlockMask,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gradient: Tensor,
    *,
    scale: float,
    softcap: float | None,
) -> list[Tensor]:
    """Return the gradients of soft-capped attention from a mask's lists of blocks.

    FlashAttention-2, arXiv 2307.08691, algorithm 2. Keys and values get theirs from the lists of
    query blocks of each key block, queries theirs from the lists of key blocks of each query block.
    Shapes as in `masked_attention`; `gradient` [s, b, n, d] is that of the result.
    """
    assert softcap is not None
    repeats = query.shape[2] // key.shape[2]
    q, dout = (x.permute(1, 2, 0, 3) for x in (query, gradient))
    k, v = (x.permute(1, 2, 0, 3).repeat_interleave(repeats, 1) for x in (key, value))
    capped = softcap * torch.tanh(q @ k.mT * scale / softcap)
    slopes = 1 - (capped / softcap) ** 2
    queries, keys = q.shape[2], k.shape[2]
    numbers = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    visible = torch.stack([_seen(mask, sample, *numbers) for sample in range(q.shape[0])])
    log_sums = capped.masked_fill(~visible[:, None], float("-inf")).logsumexp(-1, keepdim=True)
    chances = torch.exp(
        capped - log_sums
    )  # of pairs that are not visible too: lists leave these out
    out = (chances * visible[:, None]) @ v
    inner = (out * dout).sum(-1, keepdim=True)
    pulls = chances * (dout @ v.mT - inner) * slopes * scale
    by_query = _listed(mask.kv_num_blocks, mask.kv_indices, queries, keys)
    by_query_whole = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, queries, keys)
    by_key = _listed(mask.q_num_blocks, mask.q_indices, keys, queries).mT
    by_key_whole = _listed(mask.full_q_num_blocks, mask.full_q_indices, keys, queries).mT
    of_queries = ((by_query & visible) | by_query_whole)[:, None]
    of_keys = ((by_key & visible) | by_key_whole)[:, None]
    dq = (pulls * of_queries) @ k
    dk = (pulls * of_keys).mT @ q
    dv = (chances * of_keys).mT @ dout
    dk, dv = (x.unflatten(1, (-1, repeats)).sum(2) for x in (dk, dv))
    return [x.permute(2, 0, 1, 3) for x in (dq, dk, dv)]


def _seen(mask: BlockMask, sample: int, queries: Tensor, keys: Tensor) -> Tensor:
    zero = torch.tensor(0)
    return mask.mask_mod(torch.tensor(sample), zero, queries, keys)


def _listed(counts: Tensor | None, numbers: Tensor | None, rows: int, columns: int) -> Tensor:
    """Return which pairs are in the listed blocks of 128 x 128, bool [b, rows, columns]."""
    found = torch.zeros(counts.shape[0], rows, columns, dtype=torch.bool)
    for sample, row in torch.cartesian_prod(*map(torch.arange, (counts.shape[0], counts.shape[2]))):
        for number in numbers[sample, 0, row, : counts[sample, 0, row]].tolist():
            block = found[sample, 128 * row : 128 * (row + 1)]
            block[:, 128 * number : 128 * (number + 1)] = True
    return found

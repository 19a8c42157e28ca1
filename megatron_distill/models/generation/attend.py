"""Attention of new positions over a cache: one per row, several per row, or whole first rows.

Shapes: N new positions of all rows, one row after another. b rows, g key-value heads of this rank,
r query heads for each, d head size. S most new positions of a row, m = r S, K keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, ParamSpec, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_distill.models.attention import TorchAttention
from megatron_distill.models.attention_kernels.blocked import BLOCK_BYTES
from megatron_distill.models.attention_kernels.rule import AttentionRule
from megatron_distill.models.generation.cache import (
    Cache,
    LayerCache,
    aligned,
    as_mask,
    integers,
    multiplies_all_heads,
)
from megatron_distill.runtime.segments import Segments

__all__ = [
    "Append",
    "Core",
    "Extend",
    "FirstRows",
    "Keys",
    "Step",
    "attend_to",
    "reading",
    "step_for",
]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_SHORT = 128  # positions of rows that a CPU pads to one length
# Of so many scores products of all heads at once cost less than torch's fused attention.
_FEW_SCORES = 2**20
_ANY_LENGTH: Final = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def reading(request: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return a request without gradients, in which torch's fused attention is not cuDNN's.

    cuDNN, torch's first choice on some GPUs, builds a plan for each number of keys and keeps all of
    them: a tenth of a second and more, in every step of a text.
    """
    return torch.inference_mode()(sdpa_kernel(_ANY_LENGTH)(request))


@dataclass(frozen=True)
class Core:
    """A layer's attention: its module, and its rule without dropout."""

    module: TorchAttention
    rule: AttentionRule

    @classmethod
    def of(cls, module: TorchAttention) -> Core:
        """Take the window that the layer has set."""
        return cls(module, replace(module.rule, window=module.window, dropout=0.0))


class Step(Protocol):
    """New positions of the rows of a cache, layer by layer; `finish` makes them old ones."""

    positions_N: Tensor  # int64, on the device

    def attend(self, layer: int, core: Core, query: Tensor, pair: Tensor) -> Tensor:
        """Store keys with their values [N, g, 2, d], and attend with query [N, g, r, d].

        Returns the shape of the query. `layer`: of this rank, in the order of the cache.
        """
        ...

    def finish(self) -> None:
        """Count the new positions as stored, after all layers."""
        ...


@dataclass(frozen=True)
class Keys:
    """A part of the keys and values, [b, g, K, d] or [1, g, K, d] for all rows alike.

    visible: bool, broadcast to [b, 1, m, K], or what is added to the scores; None: all.
    """

    keys: Tensor
    values: Tensor
    visible: Tensor | None


def attend_once(
    query: Tensor, keys: Tensor, values: Tensor, *, added: Tensor | None, scale: float
) -> Tensor:
    """Return attention of one position, query [b, g, r, d], over keys and values [b g, K, d].

    Each head of each row is a row of its own. The result then has the order in which the next
    product reads it, without a copy. added: to the scores, [b g, 1, 1, K]; [b g, 1, K] where all
    heads are in one product. The scores are in memory there, and are few.
    """
    rows, groups, repeats, size = query.shape
    if not multiplies_all_heads(query.dtype, query.device):
        query_R1rd = query.reshape(rows * groups, 1, repeats, size)
        found = F.scaled_dot_product_attention(
            query_R1rd, keys[:, None], values[:, None], attn_mask=added, scale=scale
        )
        return found.reshape(query.shape)
    base = query.new_zeros(1, 1, 1) if added is None else added
    query_Rrd = query.reshape(rows * groups, repeats, size)
    scores = torch.baddbmm(base, query_Rrd, keys.mT, alpha=scale)
    return torch.bmm(scores.softmax(-1), values).reshape(query.shape)


def attend_to(query: Tensor, parts: Sequence[Keys], rule: AttentionRule) -> Tensor:
    """Return softmax attention [b, g, m, d] of query [b, g, m, d] over all parts together.

    Exact; scores are in fp32. A query that sees no key gives numbers without meaning.
    """
    if len(parts) == 1 and rule.softcap is None:
        (part,) = parts
        return F.scaled_dot_product_attention(
            query, part.keys, part.values, attn_mask=part.visible, scale=rule.scale
        )
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = [_scores(query.to(dtype), part, rule) for part in parts]
    weights = torch.softmax(scores[0] if len(scores) == 1 else torch.cat(scores, -1), -1)
    found: Tensor | None = None
    for part, share in zip(
        parts, weights.split([score.shape[-1] for score in scores], -1), strict=True
    ):
        values = _across_rows(share, part.values.to(dtype), transposed=False)
        found = values if found is None else found + values
    assert found is not None
    return found.to(query.dtype)


def _scores(query: Tensor, part: Keys, rule: AttentionRule) -> Tensor:
    scores = _across_rows(query * rule.scale, part.keys.to(query.dtype), transposed=True)
    if rule.softcap is not None:
        scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    if part.visible is not None:
        scores = scores.masked_fill_(~part.visible, float("-inf"))
    return scores


def _across_rows(left: Tensor, right: Tensor, *, transposed: bool) -> Tensor:
    """Return left [b, g, m, x] times right [b, g, ...], or [1, g, ...] as one product per head."""
    if transposed:
        right = right.transpose(-1, -2)
    rows, _, queries, _ = left.shape
    if right.shape[0] == rows:
        return torch.matmul(left, right)
    one = torch.matmul(left.transpose(0, 1).flatten(1, 2), right[0])  # [g, b m, ...]
    return one.unflatten(1, (rows, queries)).transpose(0, 1).contiguous()


class Append:
    """One new position for each row, and `padding` positions that count as none."""

    def __init__(self, cache: Cache, padding: int = 0) -> None:
        self.cache, self.padding = cache, padding
        self.first = max(cache.starts)
        positions_b = cache.length + cache.first_position - cache.starts_b
        self.positions_N = F.pad(positions_b, (0, padding)) if padding else positions_b
        self._masks: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._of_prefix: dict[tuple[int, int], Tensor] = {}

    def attend(self, layer: int, core: Core, query: Tensor, pair: Tensor) -> Tensor:
        """See `Step`."""
        if self.padding:
            rows = slice(0, self.cache.rows)
            found = self._attend(layer, core.rule, query[rows], pair[rows])
            return F.pad(found, (0, 0) * 3 + (0, self.padding))
        return self._attend(layer, core.rule, query, pair)

    def _attend(self, layer: int, rule: AttentionRule, query: Tensor, pair: Tensor) -> Tensor:
        store = self.cache.layers[layer]
        stored = store.append(pair, self.cache.length)
        if self.cache.prefix is not None or rule.softcap is not None:
            visible = self._visible(store.slots, 1, torch.bool)
            parts = [Keys(store.keys[:, :, :stored], store.values[:, :, :stored], visible)]
            if self.cache.prefix is not None:
                parts += self._prefix(layer, rule.window)
            return attend_to(query, parts, rule)
        return attend_once(
            query,
            store.flat_keys.narrow(1, 0, stored),
            store.flat_values.narrow(1, 0, stored),
            added=self._visible(store.slots, query.shape[1], query.dtype),
            scale=rule.scale,
        )

    def _visible(self, slots: int, copies: int, dtype: torch.dtype) -> Tensor | None:
        """Return the mask of a store's slots as `attend_once` takes it, of those in use; None: all.

        copies: as in `Cache.mask`.
        """
        length = self.cache.length
        if max(0, length + 1 - slots) >= self.first:
            return None
        kind = slots, copies, dtype
        if kind not in self._masks:
            if length < slots:
                self._masks[kind] = self.cache.mask(*kind)[..., : length + 1]
            else:
                index = torch.arange(slots, device=self.positions_N.device)
                held = length - (length - index) % slots  # the last slot that is stored there
                starts = self.cache.starts_b.repeat_interleave(copies)[:, None]
                self._masks[kind] = as_mask(held >= starts, dtype)
            if multiplies_all_heads(dtype, self.positions_N.device):
                self._masks[kind] = self._masks[kind].squeeze(1)
        return self._masks[kind]

    def _prefix(self, layer: int, window: int | None) -> list[Keys]:
        prefix = self.cache.prefix
        assert prefix is not None
        keys, values = prefix.layers[layer].unbind(2)
        if window is None:
            return [Keys(keys, values, None)]
        earliest = prefix.length + self.cache.length - self.first
        if earliest - window >= prefix.length - 1:
            return []  # the window is past the prefix in every row
        kind = window, keys.shape[2]
        if kind not in self._of_prefix:
            places = torch.arange(prefix.length - kind[1], prefix.length, device=keys.device)
            seen = places > (self.positions_N[: self.cache.rows] - window)[:, None]
            self._of_prefix[kind] = seen[:, None, None]
        return [Keys(keys, values, self._of_prefix[kind])]

    def finish(self) -> None:
        """See `Step`."""
        self.cache.length += 1


class _NewPositions:
    """Several new positions per row: their rows, slots and positions."""

    def __init__(self, cache: Cache, counts: Sequence[int], padding: int) -> None:
        """Lay out `counts` positions of each row, and `padding` positions that count as none."""
        assert len(counts) == cache.rows, (len(counts), cache.rows)
        self.cache, self.padding = cache, padding
        self.most = max(counts, default=0)
        device = cache.starts_b.device
        self.shifts = [self.most - count for count in counts]
        self.starts = [
            start + shift for start, shift in zip(cache.starts, self.shifts, strict=True)
        ]
        rows = [row for row, count in enumerate(counts) for _ in range(count)]
        self.columns = [column for shift in self.shifts for column in range(shift, self.most)]
        self.rows_N = integers(rows, device)
        self.columns_N = integers(self.columns, device)
        self.shifts_b = integers(self.shifts, device)
        self.starts_b = cache.starts_b + self.shifts_b
        positions_N = cache.length + self.columns_N - self.starts_b[self.rows_N]
        self.positions_N = F.pad(positions_N + cache.first_position, (0, padding))

    @property
    def new(self) -> slice:
        """The positions that are not padding."""
        return slice(0, self.rows_N.shape[0])

    def finish(self) -> None:
        """See `Step`."""
        self.cache.length += self.most
        self.cache.move(self.starts, self.starts_b)


class FirstRows(_NewPositions):
    """The first positions of all rows, without a prefix.

    The rows are documents of one packed sequence, with attention as in training; or a CPU pads
    short ones to one length.
    """

    def __init__(self, cache: Cache, counts: Sequence[int], padding: int = 0) -> None:
        assert cache.length == 0
        assert cache.prefix is None
        super().__init__(cache, counts, padding)
        bounds = [0]
        for count in (*counts, padding):
            if count:
                bounds.append(bounds[-1] + count)
        self.segments = Segments((tuple(bounds),)).to(cache.starts_b.device)
        self._stored: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._causal: dict[tuple[int, torch.dtype], Tensor] = {}

    def attend(self, layer: int, core: Core, query: Tensor, pair: Tensor) -> Tensor:
        """See `Step`."""
        store = self.cache.layers[layer]
        if store.slots:
            self._store(store, pair)
        if self._is_one_call(query, core.rule):
            return self._by_one_call(query, pair, core.rule.scale)
        key, value = pair[:, None].unbind(3)
        heads = query.flatten(1, 2)[:, None]
        attended = core.module.attend(heads, key, value, self.segments, core.rule)
        return attended[:, 0].view_as(query)

    def _is_one_call(self, query: Tensor, rule: AttentionRule) -> bool:
        """Return whether padding costs a CPU less than calls for rows of each length."""
        if query.device.type != "cpu" or rule.softcap is not None or self.most > _SHORT:
            return False
        padded = self.cache.rows * self.most
        return rule.window_of(self.most) is None and padded <= 2 * len(self.columns)

    def _by_one_call(self, query: Tensor, pair: Tensor, scale: float) -> Tensor:
        """Attend with each row at the first of S places, which no earlier one sees."""
        groups, repeats, size = query.shape[1:]
        places_N = self.columns_N - self.shifts_b[self.rows_N]
        heads = query.new_zeros(self.cache.rows, groups, self.most, repeats, size)
        pairs = query.new_zeros(self.cache.rows, groups, self.most, 2, size)
        heads[self.rows_N, :, places_N] = query[self.new]
        pairs[self.rows_N, :, places_N] = pair[self.new]
        keys, values = pairs.flatten(0, 1).unbind(2)
        found = self._attended(heads.flatten(0, 1), keys, values, scale)
        attended = torch.zeros_like(query)
        attended[self.new] = found.unflatten(0, (-1, groups))[self.rows_N, :, places_N]
        return attended

    def _attended(self, heads: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Return causal attention [b g, S, r, d] of such queries over keys [b g, S, d]."""
        rows, length, repeats, _ = heads.shape
        is_small = rows * repeats * length**2 <= _FEW_SCORES
        if not is_small or not multiplies_all_heads(heads.dtype, heads.device):
            by_head = heads.transpose(1, 2)
            key, value = (one[:, None].expand_as(by_head) for one in (keys, values))
            found = F.scaled_dot_product_attention(by_head, key, value, is_causal=True, scale=scale)
            return found.transpose(1, 2)
        kind = repeats, heads.dtype
        if kind not in self._causal:
            later = heads.new_full((length, length), -math.inf).triu(1)
            self._causal[kind] = later.repeat_interleave(repeats, 0)[None]
        scores = torch.baddbmm(self._causal[kind], heads.flatten(1, 2), keys.mT, alpha=scale)
        return torch.bmm(scores.softmax(-1), values).view_as(heads)

    def _store(self, store: LayerCache, pair: Tensor) -> None:
        if store.slots not in self._stored:
            first = self.most - store.slots
            places = [place for place, column in enumerate(self.columns) if column >= first]
            chosen = integers(places, self.columns_N.device)
            slots = self.columns_N[chosen] % store.slots
            self._stored[store.slots] = chosen, self.rows_N[chosen], slots
        chosen, rows, slots = self._stored[store.slots]
        store.write(rows, slots, pair[chosen])


class Extend(_NewPositions):
    """Some new positions for each row, after stored ones or a prefix, or as the first."""

    def __init__(self, cache: Cache, counts: Sequence[int], padding: int = 0) -> None:
        super().__init__(cache, counts, padding)
        self._visible: dict[tuple[int | None, int], Tensor] = {}
        self._masks: dict[tuple[int | None, int, int], Tensor] = {}
        self._places: dict[int, Tensor] = {}

    def attend(self, layer: int, core: Core, query: Tensor, pair: Tensor) -> Tensor:
        """See `Step`."""
        store, new, rule = self.cache.layers[layer], self.new, core.rule
        prefix = None if self.cache.prefix is None else self.cache.prefix.layers[layer]
        joined = self._joined(prefix, store, pair[new])
        keys, values = joined.unbind(2)
        groups, repeats, size = query.shape[1:]
        # [b, g, r, S, d]; the places before a row's first new position stay zero.
        padded = query.new_zeros(self.cache.rows, groups, repeats * self.most, size)
        padded = padded.unflatten(2, (repeats, self.most))
        padded[self.rows_N, :, :, self.columns_N] = query[new]
        # Without a soft cap the largest tensor is the mask, which all heads share.
        heads = repeats if rule.softcap is None else groups * repeats
        per_query = 4 * self.cache.rows * heads * keys.shape[2]
        length = max(1, BLOCK_BYTES // max(1, per_query))
        attended = torch.cat(
            [
                self._block(padded[:, :, :, start : start + length], start, keys, values, rule)
                for start in range(0, self.most, length)
            ],
            dim=3,
        )
        earlier = 0 if prefix is None else prefix.shape[3]
        store.replace(joined[:, :, :, earlier:], self.cache.length + self.most)
        found = torch.zeros_like(query)
        found[new] = attended[self.rows_N, :, :, self.columns_N]
        return found

    def _joined(self, prefix: Tensor | None, old: LayerCache, new: Tensor) -> Tensor:
        """Return all keys and values of each row, [b, g, 2, K, d], with rows ending together.

        prefix: [1, g, 2, p, d], copied to each row: then one fused attention has all keys, without
        scores in memory. old: with t slots in use; new: [N, g, 2, d]. K = p + t + S.
        `layer_bytes_per_row` counts this copy.
        """
        rows, groups, slots, size = old.keys.shape
        stored, first = min(self.cache.length, slots), 0 if prefix is None else prefix.shape[3]
        joined = new.new_zeros(rows, groups, 2, first + stored + self.most, size)
        own = joined[:, :, :, first:]
        if prefix is not None:
            joined[:, :, :, :first] = prefix
        are_moved = any(self.shifts) or self.cache.length > slots
        for part, into in zip(old.parts, old.of_parts(own), strict=True):
            if stored and are_moved:
                torch.gather(part, 3, self._slots(slots).expand_as(into), out=into)
            elif stored:
                into[:, :, :, :stored] = part[:, :, :, :stored]
        own[self.rows_N, :, :, stored + self.columns_N] = new
        return joined

    def _slots(self, slots: int) -> Tensor:
        """Return the slot of each old key of a row, [b, 1, 1, t + S, 1]; S are any."""
        if slots not in self._places:
            stored, device = min(self.cache.length, slots), self.rows_N.device
            places = torch.arange(stored + self.most, device=device) - self.shifts_b[:, None]
            places = places.clamp_(0, stored - 1).add_(self.cache.length - stored)
            self._places[slots] = places.remainder_(slots)[:, None, None, :, None]
        return self._places[slots]

    def _block(
        self, query: Tensor, start: int, keys: Tensor, values: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Return the attention of a block of columns from `start` on, [b, g, r, q, d]."""
        rows, groups, repeats, count, size = query.shape
        kind = rule.window, keys.shape[2], start
        if kind not in self._masks:
            columns = slice(start, start + count)
            seen = _for_heads(self._seen(rule.window, keys.shape[2])[:, columns], repeats)
            if rule.softcap is None:
                added = query.new_zeros(*seen.shape[:-1], aligned(seen.shape[-1]))
                seen = added[..., : seen.shape[-1]].masked_fill_(~seen, -math.inf)
            if count < self.most:  # one block at a time
                self._masks.clear()
            self._masks[kind] = seen
        flat = query.reshape(rows, groups, repeats * count, size)
        found = attend_to(flat, [Keys(keys, values, self._masks[kind])], rule)
        return found.view(rows, groups, repeats, count, size)

    def _seen(self, window: int | None, keys: int) -> Tensor:
        """Return which of all keys each new position sees, bool [b, S, K]."""
        prefix = self.cache.prefix
        if prefix is None:
            return self._own(window, keys)
        earlier = prefix.length if window is None else min(window, prefix.length)
        own = self._own(window, keys - earlier)
        seen = self._of_prefix(window, earlier)
        if seen is None:
            seen = own.new_ones(1, 1, 1).expand(*own.shape[:2], earlier)
        return torch.cat([seen, own], 2)

    def _own(self, window: int | None, keys: int) -> Tensor:
        """Return which stored and new keys each new position sees, bool [b, S, K]."""
        kind = window, keys
        if kind not in self._visible:
            device, end = self.rows_N.device, self.cache.length + self.most
            slots = torch.arange(end - keys, end, device=device)
            own = torch.arange(self.cache.length, end, device=device)[:, None]
            seen = slots <= own
            if window is not None:
                seen &= slots > own - window
            self._visible[kind] = seen & (slots >= self.starts_b[:, None])[:, None]
        return self._visible[kind]

    def _of_prefix(self, window: int | None, keys: int) -> Tensor | None:
        """Return which keys of the prefix each new position sees, bool [b, S, K]; None: all."""
        prefix = self.cache.prefix
        assert prefix is not None
        if window is None:
            return None
        columns = torch.arange(self.most, device=self.rows_N.device) + self.cache.length
        positions = prefix.length + columns - self.starts_b[:, None]
        places = torch.arange(prefix.length - keys, prefix.length, device=self.rows_N.device)
        return places > (positions - window)[..., None]


def _for_heads(visible: Tensor, repeats: int) -> Tensor:
    """Return [b, 1, r q, K] from [b, q, K]."""
    return visible[:, None].expand(-1, repeats, -1, -1).flatten(1, 2)[:, None]


def step_for(cache: Cache, counts: Sequence[int], padding: int = 0) -> Step:
    """Return the step of `counts` new positions per row, and of `padding` that count as none."""
    if cache.length == 0 and cache.prefix is None:
        return FirstRows(cache, counts, padding)
    return Extend(cache, counts, padding)

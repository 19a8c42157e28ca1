"""Stored entries: ids drawn from the teacher with replacement.

They are the same on every run and for every split. The uniform numbers of a position are a function
of (seed, sample id, position) alone. They are Philox in counter mode, whose raw output is fixed by
its definition. Cumulative probabilities are integers: the order of summation, over columns or
ranks, does not change them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_distill.ops.frozen_head import OutputChunk
from megatron_distill.ops.topk import gather_ranks
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import accumulation_dtype
from megatron_distill.signals import Sampled, Support
from megatron_distill.store.codecs import decode_ids, encode_ids, id_planes, padded_rows
from megatron_distill.store.records import (
    IS_RAGGED,
    ArraySpec,
    EncodedEntries,
    EntrySettings,
    Floats,
    Header,
    Integers,
    PositionScalars,
    SampleRecord,
    Sections,
    Selection,
    SelectionPlace,
    count_dtype,
    used_mask,
)

__all__ = ["DrawnEntries", "draw_at", "draw_ids", "sampled_signal", "uniforms"]


_WORDS_PER_BLOCK: Final = 4
_UNIFORM_BITS: Final = 53
_MASS_BITS: Final = 48
_BLOCK_NUMBERS: Final = 1 << 24
_CACHED_NUMBERS: Final = 1 << 17
_SLACK: Final = 1e-3


def uniforms(*, seed: int, sample_id: int, first: int, positions: int, draws: int) -> Tensor:
    """Numbers in [0, 1): fp64 ``[positions, draws]`` for positions from `first` of a sample."""
    assert draws >= 1
    blocks = -(-draws // _WORDS_PER_BLOCK)
    generator = np.random.Philox(key=seed, counter=[first * blocks, 0, 0, sample_id])
    words = generator.random_raw(positions * blocks * _WORDS_PER_BLOCK)
    found = (words >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64) * 2.0**-_UNIFORM_BITS
    return torch.from_numpy(found.reshape(positions, -1)[:, :draws].copy())


def draw_ids(
    log_probs: Tensor,
    draws: int,
    *,
    seed: int,
    sample_id: int,
    first: int = 0,
    shard: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw ids of N consecutive positions from `first`, each from the position's distribution.

    Shapes: log-probs ``[N, V]`` over this rank's real columns (without a shard: the whole
    vocabulary). Returns ids ``[N, M]`` int32, ascending, each once, and counts ``[N, M]`` int32,
    of sum M. Both are 0 after the last id. The counts' mean is M times the distribution (an id of a
    probability below 2^-48 is not drawn). Every rank gets the same result, for any split.

    Collective: that of `draw_at`.

    Raises:
        ValueError: a row is not a distribution; on all ranks.
    """
    fractions = uniforms(
        seed=seed, sample_id=sample_id, first=first, positions=log_probs.shape[0], draws=draws
    )
    return draw_at(log_probs, fractions, shard, group)


def draw_at(
    log_probs: Tensor,
    fractions: Tensor,
    shard: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw ids of N rows with uniform numbers ``[N, M]`` of each; otherwise as `draw_ids`.

    Collective: over ``group`` per block of rows one all-gather of 8 bytes per row, and one of 8
    bytes per draw. None where it is None.

    Raises:
        ValueError: a row is not a distribution, or the columns are not the shard's.
    """
    count, width = log_probs.shape
    shard = shard or VocabShard(width, 0, width)
    if width != shard.real_width:
        raise ValueError(f"log_probs have {width} columns; the shard has {shard.real_width}")
    ids = torch.zeros(count, fractions.shape[1], dtype=torch.int32)
    counts = torch.zeros_like(ids)
    on_host = log_probs.device.type == "cpu"
    # By the whole vocabulary's size, so that all ranks have the same blocks.
    rows = max(1, (_CACHED_NUMBERS if on_host else _BLOCK_NUMBERS) // shard.size)
    for start in range(0, count, rows):
        place = slice(start, min(start + rows, count))
        part = fractions[place].to(log_probs.device)
        drawn = _draw(log_probs[place], part, shard, group).sort(dim=1).values.cpu()
        _count(drawn, ids[place], counts[place])
    return ids, counts


def _draw(
    log_probs: Tensor, fractions: Tensor, shard: VocabShard, group: dist.ProcessGroup | None
) -> Tensor:
    """Ids ``[n, M]`` int64, one for each uniform number."""
    # Scaling by a power of two is exact in fp32, and so is the resulting integer.
    edges = log_probs.float().exp().mul_(2.0**_MASS_BITS).long().cumsum(1)
    own = edges[:, -1] if edges.shape[1] else edges.new_zeros(len(edges))
    totals = gather_ranks(own, group)
    whole = totals.sum(0)
    if not ((whole.double() * 2.0**-_MASS_BITS - 1).abs() < _SLACK).all():
        raise ValueError("log_probs contain a row whose probabilities do not sum to one")
    rank = 0 if group is None else dist.get_rank(group)
    aims = (fractions * whole.double().unsqueeze(1)).long() - totals[:rank].sum(0).unsqueeze(1)
    if edges.shape[1] == 0:
        return gather_ranks(torch.full_like(aims, -1), group).amax(0)
    # The first edge beyond the aim. An id without mass has its predecessor's edge and is never
    # chosen.
    found = torch.searchsorted(edges, aims, right=True) + shard.start
    is_own = (aims >= 0) & (aims < own.unsqueeze(1))
    return gather_ranks(torch.where(is_own, found, -1), group).amax(0)


def _count(drawn: Tensor, ids: Tensor, counts: Tensor) -> None:
    """Write the distinct ids of sorted rows, and their counts."""
    is_new = torch.ones_like(drawn, dtype=torch.bool)
    is_new[:, 1:] = drawn[:, 1:] != drawn[:, :-1]
    column = is_new.cumsum(1) - 1
    ids.scatter_(1, column, drawn.int())
    counts.scatter_add_(1, column, torch.ones_like(ids))


_MOST_DRAWS = 65535


@dataclass(frozen=True, eq=False)
class DrawnEntries:
    """Ids drawn from the teacher with replacement, ascending, with their counts.

    Attributes:
        ids_SM: int32; 0 after the last distinct id.
        counts_SM: int32, each row's sum is the number of draws M; 0 after the last distinct id.
    """

    ids_SM: Integers
    counts_SM: Integers

    is_ranked: ClassVar[bool] = False
    needs_seed: ClassVar[bool] = True
    adjective: ClassVar[str] = "sampled"
    metrics: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def largest_k(cls, vocab_size: int) -> int:  # noqa: ARG003
        """Draws whose counts are stored in two bytes."""
        return _MOST_DRAWS

    @classmethod
    def bytes_per_position(cls, settings: EntrySettings) -> float:
        """See `Entries`."""
        of_count = np.dtype(count_dtype(settings.k)).itemsize
        return of_count + settings.k * (2 + id_planes(settings.vocab_size) / 8 + of_count)

    @classmethod
    def blank(cls, settings: EntrySettings) -> DrawnEntries:
        """Every draw is id 0."""
        ids = np.zeros((settings.sequence_length, settings.k), np.int32)
        counts = np.zeros_like(ids)
        counts[:, 0] = settings.k
        return cls(ids, counts)

    @classmethod
    def selection(cls, settings: EntrySettings, place: SelectionPlace) -> Selection:
        """Draws that depend on the seed, the sample id and the position alone.

        Collective: that of `draw_at` over the place's group, per chunk.
        """
        assert settings.sampling_seed is not None
        fractions = [
            uniforms(
                seed=settings.sampling_seed,
                sample_id=max(0, sample_id),  # negative ids are not stored
                first=0,
                positions=settings.sequence_length,
                draws=settings.k,
            )[place.index_s]
            for sample_id in place.sample_ids
        ]
        return partial(_select_drawn, fractions=torch.cat(fractions), place=place)

    @classmethod
    def of_columns(
        cls,
        integers_SI: Integers,
        floats_SF: Floats,  # noqa: ARG003
        settings: EntrySettings,
        *,
        log_sum_exp_TS: Floats | None,  # noqa: ARG003
    ) -> DrawnEntries:
        """See `Entries`."""
        return cls(
            np.ascontiguousarray(integers_SI[:, : settings.k]),
            np.ascontiguousarray(integers_SI[:, settings.k :]),
        )

    @classmethod
    def decode(
        cls,
        sections: Sections,
        header: Header,
        scalars: PositionScalars | None,  # noqa: ARG003
    ) -> DrawnEntries:
        """See `Entries`."""
        dtype = count_dtype(header.k)
        distinct = sections.take(dtype, header.positions).astype(np.int32)
        counts = sections.take(dtype, header.entries).astype(np.int32)
        ids = decode_ids(sections.take, header.entries, header.planes)
        mask, shape = used_mask(distinct, header.k), (header.positions, header.k)
        return cls(padded_rows(ids, shape, mask), padded_rows(counts, shape, mask))

    @classmethod
    def signal(
        cls,
        records: Sequence[SampleRecord],
        *,
        k: int | None = None,  # noqa: ARG003
        temperature: float = 1.0,  # noqa: ARG003
        support: Support = "tail",  # noqa: ARG003
    ) -> Sampled:
        """The draws of b samples, one sample after another: int64 ids and counts ``[b S, M]``.

        They serve one kind of term, so that its parameters change nothing.
        """
        drawn = [_drawn_of(record) for record in records]
        ids = np.concatenate([one.ids_SM for one in drawn]).astype(np.int64)
        counts = np.concatenate([one.counts_SM for one in drawn]).astype(np.int64)
        return Sampled(torch.from_numpy(ids), torch.from_numpy(counts))

    def encode(self, settings: EntrySettings) -> EncodedEntries:
        """See `Entries`."""
        drawn = self.counts_SM > 0
        ids, counts = self.ids_SM[drawn], self.counts_SM[drawn]
        dtype = count_dtype(settings.k)
        sections = [drawn.sum(1).astype(dtype), counts.astype(dtype)]
        sections += encode_ids(ids, id_planes(settings.vocab_size))
        return EncodedEntries(IS_RAGGED, ids.size, sections)

    def arrays(self, settings: EntrySettings) -> Mapping[str, ArraySpec]:
        """See `Entries`."""
        shape = (settings.sequence_length, settings.k)
        return {
            "ids_SM": ArraySpec(self.ids_SM, shape, "int32"),
            "counts_SM": ArraySpec(self.counts_SM, shape, "int32"),
        }

    def settings_problems(self, settings: EntrySettings) -> Iterator[str]:  # noqa: ARG002
        """None: the arrays are all."""
        yield from ()

    def value_problems(self, settings: EntrySettings) -> Iterator[str]:
        """See `Entries`."""
        if self.counts_SM.min() < 0 or (self.counts_SM.sum(1) != settings.k).any():
            yield f"the counts of a position do not sum to {settings.k} draws"

    def ids(self) -> tuple[Integers, NDArray[np.bool_]]:
        """See `Entries`."""
        return self.ids_SM, self.counts_SM > 0

    def id_counts(self) -> Integers:
        """Distinct ids."""
        distinct: Integers = (self.counts_SM > 0).sum(1, dtype=np.int32)
        return distinct

    def mass(self, trained_S: NDArray[np.bool_]) -> float:  # noqa: ARG002
        """Zero: the probability of the draws is unknown."""
        return 0.0

    def first(self, k: int, scalars: PositionScalars | None) -> DrawnEntries:  # noqa: ARG002
        """All draws: they have no rank."""
        return self

    def at(self, rows_n: NDArray[np.int64]) -> DrawnEntries:
        """See `Entries`."""
        return DrawnEntries(self.ids_SM[rows_n], self.counts_SM[rows_n])


sampled_signal = DrawnEntries.signal


def _drawn_of(record: SampleRecord) -> DrawnEntries:
    assert isinstance(record.entries, DrawnEntries), "the record has no draws"
    return record.entries


def _select_drawn(
    chunk: OutputChunk, log_sum_exp: Tensor, *, fractions: Tensor, place: SelectionPlace
) -> tuple[Tensor, Tensor]:
    """Ids and counts ``[n, 2 M]``, and no floats."""
    dtype = accumulation_dtype(chunk.raw.dtype)
    log_probs = place.rule.apply_(chunk.raw.to(dtype, copy=True))
    log_probs.sub_(log_sum_exp[0].to(dtype).unsqueeze(1))
    ids, counts = draw_at(log_probs, fractions[chunk.rows.cpu()], place.shard, place.group)
    drawn = torch.cat([ids, counts], 1).to(log_probs.device)
    return drawn, log_probs.new_empty(len(drawn), 0, dtype=torch.float32)

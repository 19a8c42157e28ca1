"""Stored entries: ids drawn from the teacher with replacement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_distill.ops.frozen_head import OutputChunk
from megatron_distill.ops.workspace import accumulation_dtype
from megatron_distill.signals import Sampled, Support
from megatron_distill.store.codecs import decode_ids, encode_ids, id_planes, spread
from megatron_distill.store.records import (
    ArraySpec,
    EncodedEntries,
    EntrySettings,
    Floats,
    Integers,
    PositionScalars,
    SampleRecord,
    Selection,
    SelectionPlace,
    used_mask,
)
from megatron_distill.store.sampling import draw_at, uniforms
from megatron_distill.store.sections import IS_RAGGED, Header, Sections, count_dtype

__all__ = ["DrawnEntries", "sampled_signal"]

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
        return partial(_draw, fractions=torch.cat(fractions), place=place)

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
        return cls(spread(ids, shape, mask), spread(counts, shape, mask))

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


sampled_signal = DrawnEntries.signal


def _drawn_of(record: SampleRecord) -> DrawnEntries:
    assert isinstance(record.entries, DrawnEntries), "the record has no draws"
    return record.entries


def _draw(
    chunk: OutputChunk, log_sum_exp: Tensor, *, fractions: Tensor, place: SelectionPlace
) -> tuple[Tensor, Tensor]:
    """Ids and counts ``[n, 2 M]``, and no floats."""
    dtype = accumulation_dtype(chunk.raw.dtype)
    log_probs = place.rule.apply_(chunk.raw.to(dtype, copy=True))
    log_probs.sub_(log_sum_exp[0].to(dtype).unsqueeze(1))
    ids, counts = draw_at(log_probs, fractions[chunk.rows.cpu()], place.shard, place.group)
    drawn = torch.cat([ids, counts], 1).to(log_probs.device)
    return drawn, log_probs.new_empty(len(drawn), 0, dtype=torch.float32)

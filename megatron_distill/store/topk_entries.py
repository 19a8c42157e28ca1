"""Stored entries: a teacher's most probable ids of each position, with a tail."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_distill.errors import StoreError
from megatron_distill.ops.frozen_head import OutputChunk
from megatron_distill.ops.topk import select
from megatron_distill.signals import Support, TopK
from megatron_distill.store.codecs import (
    CODEC_NAMES,
    CODECS,
    decode_ids,
    encode_ids,
    id_planes,
    normalise,
    padded_rows,
)
from megatron_distill.store.records import (
    HAS_TAIL,
    IS_RAGGED,
    Array,
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
    clamped,
    count_dtype,
    used_mask,
)

__all__ = ["TopKEntries", "cut_to_mass", "top_k_signal"]

# Distance from one of fp32 sums of some hundred thousand probabilities.
_MASS_SLACK = 1e-3


@dataclass(frozen=True, eq=False)
class TopKEntries:
    """Top-k ids of S positions, most probable first, ties by the lowest id.

    Attributes:
        ids_SK: int32; 0 beyond `n_kept_S`.
        log_probs_SK: fp32, normalised over the whole vocabulary (over the K ids where there is no
            tail), descending; -inf beyond `n_kept_S`.
        log_tail_S: fp32 log of the mass of all further ids, -inf if it is zero; None if unknown.
        n_kept_S: int32 in 1..K where rows are of unequal length, else None.
        temperatures: T further temperatures.
        log_sum_exp_TS: fp32 log-sum-exp of the logits divided by each temperature.
        log_tail_TS: fp32 log of the mass of all further ids at each temperature.
    """

    ids_SK: Integers
    log_probs_SK: Floats
    log_tail_S: Floats | None
    n_kept_S: Integers | None = None
    temperatures: tuple[float, ...] = ()
    log_sum_exp_TS: Floats | None = None
    log_tail_TS: Floats | None = None

    is_ranked: ClassVar[bool] = True
    needs_seed: ClassVar[bool] = False
    adjective: ClassVar[str] = "top-k"
    metrics: ClassVar[tuple[str, ...]] = ("top1_agreement", "topk_mass")

    @classmethod
    def largest_k(cls, vocab_size: int) -> int:
        """The whole vocabulary."""
        return vocab_size

    @classmethod
    def bytes_per_position(cls, settings: EntrySettings) -> float:
        """See `Entries`."""
        scalar = np.dtype(CODECS[settings.codec].scalar).itemsize
        size = 4.0 if settings.codec == "u8" else 0.0
        size += scalar if settings.is_complete else 0
        size += np.dtype(count_dtype(settings.k)).itemsize if settings.top_p is not None else 0
        size += len(settings.temperatures) * (4 + scalar)
        of_value = {"f32": 4, "f16": 2, "u8": 1}[settings.codec]
        return size + settings.k * (2 + id_planes(settings.vocab_size) / 8 + of_value)

    @classmethod
    def blank(cls, settings: EntrySettings) -> TopKEntries:
        """All probability on id 0."""
        positions, temperatures = settings.sequence_length, settings.temperatures
        log_probs = np.full((positions, settings.k), -np.inf, np.float32)
        log_probs[:, 0] = 0.0
        tail = np.full(positions, -np.inf, np.float32)
        further: dict[str, Any] = {}
        if temperatures:
            further = {
                "temperatures": temperatures,
                "log_sum_exp_TS": np.zeros((len(temperatures), positions), np.float32),
                "log_tail_TS": np.tile(tail, (len(temperatures), 1)),
            }
        ids = np.zeros((positions, settings.k), np.int32)
        return cls(ids, log_probs, tail if settings.is_complete else None, **further)

    @classmethod
    def selection(cls, settings: EntrySettings, place: SelectionPlace) -> Selection:
        """Values bitwise equal to the objective's top-k of a live teacher.

        Collective: that of `select` over the place's group, per chunk.
        """
        return partial(_select, settings=settings, place=place)

    @classmethod
    def of_columns(
        cls,
        integers_SI: Integers,
        floats_SF: Floats,
        settings: EntrySettings,
        *,
        log_sum_exp_TS: Floats | None,
    ) -> TopKEntries:
        """See `Entries`."""
        tails = np.ascontiguousarray(floats_SF[:, : 1 + len(settings.temperatures)].T)
        return cls(
            ids_SK=np.ascontiguousarray(integers_SI),
            log_probs_SK=np.ascontiguousarray(floats_SF[:, -settings.k :]),
            log_tail_S=tails[0],
            temperatures=settings.temperatures,
            log_sum_exp_TS=log_sum_exp_TS,
            log_tail_TS=tails[1:] if settings.temperatures else None,
        )

    @classmethod
    def decode(
        cls, sections: Sections, header: Header, scalars: PositionScalars | None
    ) -> TopKEntries:
        """Probabilities of a lossy codec are renormalised with their tail, at every temperature."""
        positions, codec = header.positions, CODECS[CODEC_NAMES[header.codec]]
        shape, mask, n_kept, tail = (positions, header.k), None, None, None
        if header.is_ragged:
            n_kept = sections.take(count_dtype(header.k), positions).astype(np.int32)
            mask = used_mask(n_kept, header.k)
        if header.flags & HAS_TAIL:
            tail = sections.take(codec.scalar, positions).astype(np.float32)
        temperatures: Sequence[float] = ()
        sums_TS = tails_TS = None
        if header.temperatures:
            cells = header.temperatures * positions
            temperatures = sections.take("<f8", header.temperatures).tolist()
            sums_TS = sections.take("<f4", cells).astype(np.float32).reshape(-1, positions)
            tails_TS = sections.take(codec.scalar, cells).astype(np.float32).reshape(-1, positions)
        values = codec.decode(sections.take, shape, mask, header.entries)
        if mask is not None:
            values[~mask] = -np.inf
        if not codec.is_exact:
            shift = normalise(values, tail)
            values -= shift[:, None]
            tail = None if tail is None else tail - shift
            if scalars is not None and sums_TS is not None and tails_TS is not None:
                logits = values + scalars.log_sum_exp_S[:, None]
                for row, temperature in enumerate(temperatures):
                    at_temperature = logits / np.float32(temperature) - sums_TS[row][:, None]
                    shift = normalise(at_temperature, tails_TS[row])
                    sums_TS[row] += shift
                    tails_TS[row] -= shift
        ids = padded_rows(decode_ids(sections.take, header.entries, header.planes), shape, mask)
        return cls(ids, values, tail, n_kept, tuple(temperatures), sums_TS, tails_TS)

    @classmethod
    def signal(
        cls,
        records: Sequence[SampleRecord],
        *,
        k: int | None = None,
        temperature: float = 1.0,
        support: Support = "tail",
    ) -> TopK:
        """The top-k of b samples at a temperature, one sample after another.

        Shapes: ids int64 and log-probs fp32 ``[b S, K]``, log tails fp32 ``[b S]``, on the CPU. For
        support renormalized any temperature is possible, and log-probs are normalised over the K
        ids.

        Raises:
            StoreError: the records lack the values for this support or this temperature.
        """
        parts = []
        for record in records:
            entries = _top_k_of(record)
            if k is not None:
                entries = entries.first(k, record.scalars)
            parts.append(_at(entries, record, temperature, support))
        ids = np.concatenate([part[0] for part in parts]).astype(np.int64)
        log_probs = np.concatenate([part[1] for part in parts])
        tails = np.concatenate([part[2] for part in parts])
        return TopK(
            torch.from_numpy(ids), torch.from_numpy(log_probs), torch.from_numpy(tails), temperature
        )

    def encode(self, settings: EntrySettings) -> EncodedEntries:
        """See `Entries`."""
        codec, flags, mask = CODECS[settings.codec], 0, None
        sections: list[Array] = []
        if self.n_kept_S is not None:
            flags |= IS_RAGGED
            mask = used_mask(self.n_kept_S, settings.k)
            sections.append(self.n_kept_S.astype(count_dtype(settings.k)))
        if self.log_tail_S is not None:
            flags |= HAS_TAIL
            sections.append(clamped(self.log_tail_S, codec.scalar))
        if self.log_sum_exp_TS is not None and self.log_tail_TS is not None:
            sections += [
                np.asarray(self.temperatures, "<f8"),
                self.log_sum_exp_TS.astype("<f4"),
                clamped(self.log_tail_TS, codec.scalar),
            ]
        ids = self.ids_SK.reshape(-1) if mask is None else self.ids_SK[mask]
        sections += codec.encode(self.log_probs_SK, mask)
        sections += encode_ids(ids, id_planes(settings.vocab_size))
        return EncodedEntries(flags, ids.size, sections)

    def arrays(self, settings: EntrySettings) -> Mapping[str, ArraySpec]:
        """See `Entries`."""
        positions, k = settings.sequence_length, settings.k
        found = {
            "ids_SK": ArraySpec(self.ids_SK, (positions, k), "int32"),
            "log_probs_SK": ArraySpec(self.log_probs_SK, (positions, k), "float32"),
        }
        if settings.is_complete:
            found["log_tail_S"] = ArraySpec(self.log_tail_S, (positions,), "float32")
        if self.n_kept_S is not None:
            found["n_kept_S"] = ArraySpec(self.n_kept_S, (positions,), "int32")
        if settings.temperatures:
            cells = (len(settings.temperatures), positions)
            found["log_sum_exp_TS"] = ArraySpec(self.log_sum_exp_TS, cells, "float32")
            found["log_tail_TS"] = ArraySpec(self.log_tail_TS, cells, "float32")
        return found

    def settings_problems(self, settings: EntrySettings) -> Iterator[str]:
        """See `Entries`."""
        if tuple(self.temperatures) != settings.temperatures:
            yield f"temperatures are {self.temperatures}, the plan's {settings.temperatures}"

    def value_problems(self, settings: EntrySettings) -> Iterator[str]:  # noqa: ARG002
        """See `Entries`."""
        values, mask = self.log_probs_SK, None
        if self.n_kept_S is not None:
            width = values.shape[1]
            if self.n_kept_S.min() < 1 or self.n_kept_S.max() > width:
                yield f"n_kept_S is not between 1 and {width}"
                return
            mask = used_mask(self.n_kept_S, width)
            values = np.where(mask, values, values.min(1, initial=0.0, where=mask)[:, None])
        wrong = ~np.isfinite(values).all(1)
        if wrong.any():
            yield f"log-probabilities are not finite at position {wrong.argmax()}"
            return
        wrong = (values[:, 1:] > values[:, :-1]).any(1)
        if wrong.any():
            yield f"log-probabilities increase at position {wrong.argmax()}"
        yield from self._mass_problems()

    def _mass_problems(self) -> Iterator[str]:
        mass = np.exp(self.log_probs_SK).sum(1)
        for name, tails in (("log_tail_S", self.log_tail_S), ("log_tail_TS", self.log_tail_TS)):
            if tails is not None and not (tails <= math.log1p(_MASS_SLACK)).all():
                yield f"{name} is not the logarithm of a probability"
        if self.log_tail_S is not None:
            mass = mass + np.exp(self.log_tail_S)
        wrong = ~(np.abs(mass - 1) < _MASS_SLACK)
        if wrong.any():
            yield (
                f"probabilities and tail sum up to {mass[wrong][0]:.6g} at position "
                f"{wrong.argmax()}"
            )
        if self.log_sum_exp_TS is not None and not np.isfinite(self.log_sum_exp_TS).all():
            yield "log_sum_exp_TS is not finite"

    def ids(self) -> tuple[Integers, NDArray[np.bool_]]:
        """See `Entries`."""
        return self.ids_SK, np.isfinite(self.log_probs_SK)

    def id_counts(self) -> Integers:
        """See `Entries`."""
        positions, width = self.ids_SK.shape
        return np.full(positions, width, np.int32) if self.n_kept_S is None else self.n_kept_S

    def mass(self, trained_S: NDArray[np.bool_]) -> float:
        """See `Entries`."""
        return float(np.exp(self.log_probs_SK[trained_S], dtype=np.float64).sum())

    def first(self, k: int, scalars: PositionScalars | None) -> TopKEntries:
        """The first k ids; the mass of dropped ones goes to the tail, at every temperature.

        Without a tail the result is normalised over its ids.
        """
        if k >= self.ids_SK.shape[1]:
            return self
        shorter = self._with_dropped(lambda values: values[:, k:], scalars)
        log_probs = self.log_probs_SK[:, :k]
        if self.log_tail_S is None:
            log_probs = log_probs - np.logaddexp.reduce(log_probs, axis=1, keepdims=True)
        return replace(
            shorter,
            ids_SK=np.ascontiguousarray(self.ids_SK[:, :k]),
            log_probs_SK=np.ascontiguousarray(log_probs),
            n_kept_S=None if self.n_kept_S is None else np.minimum(self.n_kept_S, k),
        )

    def at(self, rows_n: NDArray[np.int64]) -> TopKEntries:
        """See `Entries`."""
        sums, tails = self.log_sum_exp_TS, self.log_tail_TS
        return replace(
            self,
            ids_SK=self.ids_SK[rows_n],
            log_probs_SK=self.log_probs_SK[rows_n],
            log_tail_S=None if self.log_tail_S is None else self.log_tail_S[rows_n],
            n_kept_S=None if self.n_kept_S is None else self.n_kept_S[rows_n],
            log_sum_exp_TS=None if sums is None else sums[:, rows_n],
            log_tail_TS=None if tails is None else tails[:, rows_n],
        )

    def head(self, mass: float, scalars: PositionScalars | None) -> TopKEntries:
        """The shortest head of each position whose mass is at least `mass`, or all of it.

        At least one id stays; the mass of dropped ids goes to the tail, at every temperature.
        """
        assert 0 < mass < 1, "a mass is between 0 and 1"
        assert self.log_tail_S is not None, "without a tail a mass is not known"
        before = np.cumsum(np.exp(self.log_probs_SK, dtype=np.float64), axis=1)
        # An id stays if the ids before it do not reach the mass.
        stays = np.ones(before.shape, np.bool_)
        stays[:, 1:] = before[:, :-1] < mass
        if self.n_kept_S is not None:
            stays &= used_mask(self.n_kept_S, before.shape[1])
        shorter = self._with_dropped(lambda values: np.where(stays, -np.inf, values), scalars)
        return replace(
            shorter,
            ids_SK=np.where(stays, self.ids_SK, np.int32(0)),
            log_probs_SK=np.where(stays, self.log_probs_SK, np.float32(-np.inf)),
            n_kept_S=stays.sum(1, dtype=np.int32),
        )

    def _with_dropped(
        self,
        dropped: Callable[[NDArray[Any]], NDArray[Any]],
        scalars: PositionScalars | None,
    ) -> TopKEntries:
        """The entries, with the masses of `dropped(log_probs)` [S, *] added to the tails."""
        if self.log_tail_S is None:
            return self
        tail = _joined(self.log_tail_S, dropped(self.log_probs_SK))
        if not self.temperatures:
            return replace(self, log_tail_S=tail)
        assert scalars is not None
        assert self.log_sum_exp_TS is not None
        assert self.log_tail_TS is not None
        logits = self.log_probs_SK.astype(np.float64) + scalars.log_sum_exp_S[:, None]
        tails = [
            _joined(
                self.log_tail_TS[row],
                dropped(logits / temperature - self.log_sum_exp_TS[row][:, None]),
            )
            for row, temperature in enumerate(self.temperatures)
        ]
        return replace(self, log_tail_S=tail, log_tail_TS=np.stack(tails))


top_k_signal = TopKEntries.signal


def cut_to_mass(record: SampleRecord, mass: float) -> SampleRecord:
    """The record of a top-k with `TopKEntries.head` of its entries."""
    return replace(record, entries=_top_k_of(record).head(mass, record.scalars))


def _top_k_of(record: SampleRecord) -> TopKEntries:
    assert isinstance(record.entries, TopKEntries), "the record has no top-k"
    return record.entries


def _joined(log_tail_S: Floats, dropped: NDArray[Any]) -> Floats:
    """log(e^tail + sum e^dropped) of each row; -inf where the mass is zero.

    The same operations as for a live teacher's top-k in `TopK.first`, for equal bits.
    """
    parts = np.concatenate([dropped.astype(np.float32, copy=False), log_tail_S[:, None]], axis=1)
    joined: Floats = torch.from_numpy(parts).logsumexp(1).numpy()
    return joined


def _at(
    entries: TopKEntries, record: SampleRecord, temperature: float, support: Support
) -> tuple[Integers, Floats, Floats]:
    if support == "renormalized":
        return _renormalised(entries, temperature)
    if entries.log_tail_S is None:
        raise StoreError(
            f"sample {record.sample_id}: the store has no log_tail (its source has only k "
            f"logits), so support {support} is undefined; use support: renormalized"
        )
    if temperature == 1.0:
        return entries.ids_SK, entries.log_probs_SK, entries.log_tail_S
    if temperature not in entries.temperatures:
        raise StoreError(
            f"sample {record.sample_id}: not captured at temperature {temperature:g}; change the "
            "temperature, or capture a store with it"
        )
    assert record.scalars is not None
    assert entries.log_sum_exp_TS is not None
    assert entries.log_tail_TS is not None
    row = entries.temperatures.index(temperature)
    # In fp64, because both terms are far larger than their difference.
    logits = entries.log_probs_SK.astype(np.float64) + record.scalars.log_sum_exp_S[:, None]
    log_probs = logits / temperature - entries.log_sum_exp_TS[row][:, None]
    return entries.ids_SK, log_probs.astype(np.float32), entries.log_tail_TS[row]


def _renormalised(entries: TopKEntries, temperature: float) -> tuple[Integers, Floats, Floats]:
    scaled: NDArray[np.float64] = entries.log_probs_SK.astype(np.float64) / temperature
    log_probs = scaled - np.logaddexp.reduce(scaled, axis=1, keepdims=True)
    no_tail = np.full(len(scaled), -np.inf, np.float32)
    return entries.ids_SK, log_probs.astype(np.float32), no_tail


def _select(
    chunk: OutputChunk,
    log_sum_exp: Tensor,  # noqa: ARG001
    *,
    settings: EntrySettings,
    place: SelectionPlace,
) -> tuple[Tensor, Tensor]:
    """Ids ``[n, K]``; log tails at each temperature and log-probabilities ``[n, 1 + T + K]``."""
    top_k = select(
        chunk.raw,
        place.rule,
        place.shard,
        place.group,
        k=settings.k,
        temperatures=(1.0, *settings.temperatures),
    )
    tails = torch.stack([one.log_tail.float() for one in top_k], 1)
    return top_k[0].ids.int(), torch.cat([tails, top_k[0].log_probs], 1)

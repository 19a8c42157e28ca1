"""The record of one training sample: its tokens, and the teacher's distribution after each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = [
    "DrawnEntries",
    "Entries",
    "Floats",
    "Integers",
    "PositionScalars",
    "SampleRecord",
    "SampleTokens",
    "TopKEntries",
    "cut_to_k",
    "cut_to_mass",
    "kept_mask",
    "trained_positions",
]

Floats: TypeAlias = NDArray[np.float32]
Integers: TypeAlias = NDArray[np.int32]


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


@dataclass(frozen=True, eq=False)
class DrawnEntries:
    """Ids drawn from the teacher with replacement, ascending, with their counts.

    Attributes:
        ids_SM: int32; 0 after the last distinct id.
        counts_SM: int32, each row's sum is the number of draws M; 0 after the last distinct id.
    """

    ids_SM: Integers
    counts_SM: Integers


Entries: TypeAlias = TopKEntries | DrawnEntries


@dataclass(frozen=True, eq=False)
class PositionScalars:
    """Three numbers per position, fp32 in nats.

    Attributes:
        log_sum_exp_S: of the teacher's logits, which are `log_prob + log_sum_exp`.
        entropy_S: of the teacher's whole distribution.
        label_log_prob_S: the teacher's log-probability of the next token.
    """

    log_sum_exp_S: Floats
    entropy_S: Floats
    label_log_prob_S: Floats


@dataclass(frozen=True, eq=False)
class SampleTokens:
    """The tokens of a record, without the teacher's values; see `SampleRecord`."""

    tokens_S1: Integers
    document_ids_S1: Integers
    flags_S1: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class SampleRecord:
    """S + 1 tokens with documents and flags from the corpus, and S positions of the teacher.

    Entry i of a per-position array is about token i + 1 given the tokens up to i.

    Attributes:
        sample_id: number of the sample, from 0.
        tokens_S1: int32.
        document_ids_S1: int32, counted from 0 inside the sample, -1 on padding.
        flags_S1: uint8, whether a token is trained as a label: bit 0 by cross-entropy, bit 1 by
            distillation.
        entries: ids and their probabilities or counts.
        scalars: None if the source of the store lacks them.
    """

    sample_id: int
    tokens_S1: Integers
    document_ids_S1: Integers
    flags_S1: NDArray[np.uint8]
    entries: Entries
    scalars: PositionScalars | None

    @property
    def top_k(self) -> TopKEntries:
        """The entries, which are a top-k."""
        assert isinstance(self.entries, TopKEntries), "the record holds draws"
        return self.entries

    @property
    def draws(self) -> DrawnEntries:
        """The entries, which are draws."""
        assert isinstance(self.entries, DrawnEntries), "the record holds a top-k"
        return self.entries


def trained_positions(record: SampleRecord) -> NDArray[np.bool_]:
    """Positions [S] that are not padding and whose label is trained."""
    documents = record.document_ids_S1
    real = (documents[:-1] >= 0) & (documents[1:] >= 0)
    trained: NDArray[np.bool_] = real & (record.flags_S1[1:] != 0)
    return trained


def kept_mask(n_kept_S: Integers, k: int) -> NDArray[np.bool_]:
    """Mask of the stored ids among K columns: bool [S, K]."""
    mask: NDArray[np.bool_] = np.arange(k) < n_kept_S[:, None]
    return mask


def cut_to_k(record: SampleRecord, k: int) -> SampleRecord:
    """The record with the first k ids of each position; the mass of dropped ids goes to the tail.

    Exact at every temperature of the record. A record without a tail is normalised over its ids;
    the result, over the first k.
    """
    entries = record.top_k
    width = entries.ids_SK.shape[1]
    if k >= width:
        return record
    n_kept = None if entries.n_kept_S is None else np.minimum(entries.n_kept_S, k)
    shorter = _with_tails(record, lambda values: values[:, k:])
    log_probs = entries.log_probs_SK[:, :k]
    if entries.log_tail_S is None:
        log_probs = log_probs - np.logaddexp.reduce(log_probs, axis=1, keepdims=True)
    return replace(
        record,
        entries=replace(
            shorter,
            ids_SK=np.ascontiguousarray(entries.ids_SK[:, :k]),
            log_probs_SK=np.ascontiguousarray(log_probs),
            n_kept_S=n_kept,
        ),
    )


def cut_to_mass(record: SampleRecord, mass: float) -> SampleRecord:
    """The record with the shortest head of each position whose mass is at least `mass` (or all).

    At least one id stays; the mass of dropped ids goes to the tail, at every temperature.
    """
    assert 0 < mass < 1, "a mass is between 0 and 1"
    entries = record.top_k
    assert entries.log_tail_S is not None, "without a tail a mass is not known"
    before = np.cumsum(np.exp(entries.log_probs_SK, dtype=np.float64), axis=1)
    # An id stays if the ids before it do not reach the mass.
    stays = np.ones(before.shape, np.bool_)
    stays[:, 1:] = before[:, :-1] < mass
    if entries.n_kept_S is not None:
        stays &= kept_mask(entries.n_kept_S, before.shape[1])
    shorter = _with_tails(record, lambda values: np.where(stays, -np.inf, values))
    return replace(
        record,
        entries=replace(
            shorter,
            ids_SK=np.where(stays, entries.ids_SK, np.int32(0)),
            log_probs_SK=np.where(stays, entries.log_probs_SK, np.float32(-np.inf)),
            n_kept_S=stays.sum(1, dtype=np.int32),
        ),
    )


def _with_tails(
    record: SampleRecord, dropped: Callable[[NDArray[Any]], NDArray[Any]]
) -> TopKEntries:
    """The entries, with the masses of `dropped(log_probs)` [S, *] added to the tails."""
    entries = record.top_k
    if entries.log_tail_S is None:
        return entries
    tail = _joined(entries.log_tail_S, dropped(entries.log_probs_SK))
    if not entries.temperatures:
        return replace(entries, log_tail_S=tail)
    assert record.scalars is not None
    assert entries.log_sum_exp_TS is not None
    assert entries.log_tail_TS is not None
    logits = entries.log_probs_SK.astype(np.float64) + record.scalars.log_sum_exp_S[:, None]
    tails = [
        _joined(
            entries.log_tail_TS[row],
            dropped(logits / temperature - entries.log_sum_exp_TS[row][:, None]),
        )
        for row, temperature in enumerate(entries.temperatures)
    ]
    return replace(entries, log_tail_S=tail, log_tail_TS=np.stack(tails))


def _joined(log_tail_S: Floats, dropped: NDArray[Any]) -> Floats:
    """log(e^tail + sum e^dropped) of each row; -inf where the mass is zero.

    The same operations as for a live teacher's top-k in `TopK.first`, for equal bits.
    """
    parts = np.concatenate([dropped.astype(np.float32, copy=False), log_tail_S[:, None]], axis=1)
    joined: Floats = torch.from_numpy(parts).logsumexp(1).numpy()
    return joined

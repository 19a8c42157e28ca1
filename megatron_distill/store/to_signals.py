"""Conversion of records to signals for the losses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_distill.errors import StoreError
from megatron_distill.signals import Sampled, Support, TopK
from megatron_distill.store.records import Floats, Integers, SampleRecord, TopKEntries

__all__ = ["sampled_signal", "top_k_signal"]


def top_k_signal(
    records: Sequence[SampleRecord], *, temperature: float = 1.0, support: Support = "tail"
) -> TopK:
    """The top-k of b samples at a temperature, one sample after another.

    Shapes: ids int64 and log-probs fp32 ``[b S, K]``, log tails fp32 ``[b S]``, on the CPU. For
    support renormalized any temperature is possible, and log-probs are normalised over the K ids.

    Raises:
        StoreError: the records lack the values for this support or this temperature.
    """
    parts = [_at(record, temperature, support) for record in records]
    ids = np.concatenate([part[0] for part in parts]).astype(np.int64)
    log_probs = np.concatenate([part[1] for part in parts])
    tails = np.concatenate([part[2] for part in parts])
    return TopK(
        torch.from_numpy(ids), torch.from_numpy(log_probs), torch.from_numpy(tails), temperature
    )


def sampled_signal(records: Sequence[SampleRecord]) -> Sampled:
    """The draws of b samples, one sample after another: int64 ids and counts ``[b S, M]``."""
    ids = np.concatenate([record.draws.ids_SM for record in records]).astype(np.int64)
    counts = np.concatenate([record.draws.counts_SM for record in records]).astype(np.int64)
    return Sampled(torch.from_numpy(ids), torch.from_numpy(counts))


def _at(
    record: SampleRecord, temperature: float, support: Support
) -> tuple[Integers, Floats, Floats]:
    entries = record.top_k
    if support == "renormalized":
        return _over_kept(entries, temperature)
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


def _over_kept(entries: TopKEntries, temperature: float) -> tuple[Integers, Floats, Floats]:
    scaled: NDArray[np.float64] = entries.log_probs_SK.astype(np.float64) / temperature
    log_probs = scaled - np.logaddexp.reduce(scaled, axis=1, keepdims=True)
    nothing = np.full(len(scaled), -np.inf, np.float32)
    return entries.ids_SK, log_probs.astype(np.float32), nothing

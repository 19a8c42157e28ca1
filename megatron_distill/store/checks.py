"""Checks of a record before it is stored, and in verification."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from megatron_distill.store.plan import CaptureSettings
from megatron_distill.store.records import (
    DrawnEntries,
    SampleRecord,
    TopKEntries,
    kept_mask,
)

__all__ = ["repeated_ids", "shape_problems", "value_problems"]

_FLAGS = 3
# Distance from one of fp32 sums of some hundred thousand probabilities.
_MASS_SLACK = 1e-3


def shape_problems(record: SampleRecord, settings: CaptureSettings) -> Iterator[str]:
    """Arrays whose shape or dtype does not fit the settings."""
    positions, k = settings.sequence_length, settings.k
    expected: dict[str, tuple[object, tuple[int, ...], str]] = {
        "tokens_S1": (record.tokens_S1, (positions + 1,), "int32"),
        "document_ids_S1": (record.document_ids_S1, (positions + 1,), "int32"),
        "flags_S1": (record.flags_S1, (positions + 1,), "uint8"),
    }
    entries, knows = record.entries, settings.normalised_over == "vocabulary"
    if isinstance(entries, DrawnEntries) != (settings.mode == "sampled"):
        yield f"contains {type(entries).__name__}; the mode of the plan is {settings.mode}"
        return
    if isinstance(entries, TopKEntries):
        expected["ids_SK"] = (entries.ids_SK, (positions, k), "int32")
        expected["log_probs_SK"] = (entries.log_probs_SK, (positions, k), "float32")
        if knows:
            expected["log_tail_S"] = (entries.log_tail_S, (positions,), "float32")
        if entries.n_kept_S is not None:
            expected["n_kept_S"] = (entries.n_kept_S, (positions,), "int32")
        if tuple(entries.temperatures) != settings.temperatures:
            yield f"temperatures are {entries.temperatures}, the plan's {settings.temperatures}"
        if settings.temperatures:
            cells = (len(settings.temperatures), positions)
            expected["log_sum_exp_TS"] = (entries.log_sum_exp_TS, cells, "float32")
            expected["log_tail_TS"] = (entries.log_tail_TS, cells, "float32")
    else:
        expected["ids_SM"] = (entries.ids_SM, (positions, k), "int32")
        expected["counts_SM"] = (entries.counts_SM, (positions, k), "int32")
    if (record.scalars is not None) != knows:
        has = "has no" if knows else "has"
        yield f"{has} scalars; the plan is normalised over {settings.normalised_over}"
    if record.scalars is not None:
        for name, values in vars(record.scalars).items():
            expected[name] = (values, (positions,), "float32")
    for name, (values, shape, dtype) in expected.items():
        found = (getattr(values, "shape", None), str(getattr(values, "dtype", None)))
        if found != (shape, dtype):
            yield f"{name} is {found[1]} of shape {found[0]}; the plan asks for {dtype} {shape}"


def value_problems(record: SampleRecord, settings: CaptureSettings) -> Iterator[str]:
    """Values that no teacher can produce; the shapes must be right."""
    tokens, entries = record.tokens_S1, record.entries
    if tokens.min() < 0 or tokens.max() >= settings.vocab_size:
        yield f"a token is outside of the vocabulary of {settings.vocab_size}"
    if record.document_ids_S1.min() < -1:
        yield "a document id is below -1"
    if record.flags_S1.max() > _FLAGS:
        yield f"a flag is above {_FLAGS}"
    ids = entries.ids_SK if isinstance(entries, TopKEntries) else entries.ids_SM
    if ids.min() < 0 or ids.max() >= settings.vocab_size:
        yield f"an id is outside of the vocabulary of {settings.vocab_size}"
    if isinstance(entries, TopKEntries):
        yield from _top_k_problems(entries)
    else:
        counts = entries.counts_SM
        if counts.min() < 0 or (counts.sum(1) != settings.k).any():
            yield f"the counts of a position do not sum to {settings.k} draws"
    if record.scalars is not None:
        for name, values in vars(record.scalars).items():
            if not np.isfinite(values).all():
                yield f"{name} is not finite at position {_first(~np.isfinite(values))}"


def _top_k_problems(entries: TopKEntries) -> Iterator[str]:
    values, mask = entries.log_probs_SK, None
    if entries.n_kept_S is not None:
        width = values.shape[1]
        if entries.n_kept_S.min() < 1 or entries.n_kept_S.max() > width:
            yield f"n_kept_S is not between 1 and {width}"
            return
        mask = kept_mask(entries.n_kept_S, width)
        values = np.where(mask, values, values.min(1, initial=0.0, where=mask)[:, None])
    wrong = ~np.isfinite(values).all(1)
    if wrong.any():
        yield f"log-probabilities are not finite at position {_first(wrong)}"
        return
    wrong = (values[:, 1:] > values[:, :-1]).any(1)
    if wrong.any():
        yield f"log-probabilities increase at position {_first(wrong)}"
    mass = np.exp(entries.log_probs_SK).sum(1)
    for name, tails in (("log_tail_S", entries.log_tail_S), ("log_tail_TS", entries.log_tail_TS)):
        if tails is not None and not (tails <= math.log1p(_MASS_SLACK)).all():
            yield f"{name} is not the logarithm of a probability"
    if entries.log_tail_S is not None:
        mass = mass + np.exp(entries.log_tail_S)
    wrong = ~(np.abs(mass - 1) < _MASS_SLACK)
    if wrong.any():
        yield f"probabilities and tail sum up to {mass[wrong][0]:.6g} at position {_first(wrong)}"
    if entries.log_sum_exp_TS is not None and not np.isfinite(entries.log_sum_exp_TS).all():
        yield "log_sum_exp_TS is not finite"


def repeated_ids(record: SampleRecord) -> Iterator[str]:
    """Ids that occur twice at a position."""
    entries = record.entries
    if isinstance(entries, TopKEntries):
        ids, named = entries.ids_SK, np.isfinite(entries.log_probs_SK)
    else:
        ids, named = entries.ids_SM, entries.counts_SM > 0
    # Unused entries get distinct numbers below every id.
    ordered = np.sort(np.where(named, ids, -1 - np.arange(ids.shape[1], dtype=np.int32)), axis=1)
    wrong = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    if wrong.any():
        yield f"an id is named twice at position {_first(wrong)}"


def _first(wrong: object) -> int:
    return int(np.flatnonzero(np.asarray(wrong))[0])

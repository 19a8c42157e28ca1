"""Checks of a record before it is stored, and in verification."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_distill.store.plan import CaptureSettings
from megatron_distill.store.records import ArraySpec, SampleRecord

__all__ = ["repeated_ids", "shape_problems", "value_problems"]

_FLAGS = 3


def shape_problems(record: SampleRecord, settings: CaptureSettings) -> Iterator[str]:
    """Arrays whose shape or dtype does not fit the settings."""
    positions = settings.sequence_length
    expected = {
        "tokens_S1": ArraySpec(record.tokens_S1, (positions + 1,), "int32"),
        "document_ids_S1": ArraySpec(record.document_ids_S1, (positions + 1,), "int32"),
        "flags_S1": ArraySpec(record.flags_S1, (positions + 1,), "uint8"),
    }
    entries = record.entries
    if type(entries) is not settings.kind:
        yield f"contains {type(entries).__name__}; the mode of the plan is {settings.mode}"
        return
    yield from entries.settings_problems(settings)
    expected |= entries.arrays(settings)
    knows = settings.is_complete
    if (record.scalars is not None) != knows:
        has = "has no" if knows else "has"
        yield f"{has} scalars; the plan is normalised over {settings.normalised_over}"
    if record.scalars is not None:
        for name, values in vars(record.scalars).items():
            expected[name] = ArraySpec(values, (positions,), "float32")
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
    ids, _ = entries.ids()
    if ids.min() < 0 or ids.max() >= settings.vocab_size:
        yield f"an id is outside of the vocabulary of {settings.vocab_size}"
    yield from entries.value_problems(settings)
    if record.scalars is not None:
        for name, values in vars(record.scalars).items():
            if not np.isfinite(values).all():
                yield f"{name} is not finite at position {_first(~np.isfinite(values))}"


def repeated_ids(record: SampleRecord) -> Iterator[str]:
    """Ids that occur twice at a position."""
    ids, used = record.entries.ids()
    # Unused entries get distinct numbers below every id.
    ordered = np.sort(np.where(used, ids, -1 - np.arange(ids.shape[1], dtype=np.int32)), axis=1)
    wrong = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    if wrong.any():
        yield f"an id is named twice at position {_first(wrong)}"


def _first(wrong: object) -> int:
    return int(np.flatnonzero(np.asarray(wrong))[0])

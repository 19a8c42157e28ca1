"""Every kind of entries: a blank record fits the plan, survives packing, and gives a signal."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from megatron_distill.config.schema.run import StoreConfig
from megatron_distill.store import KINDS, PositionScalars, SampleRecord, pack, unpack
from megatron_distill.store.binary import largest_record_bytes
from megatron_distill.store.manifest import Totals
from megatron_distill.store.plan import CaptureSettings
from megatron_distill.store.writer import repeated_ids, shape_problems
from tests.support.store_samples import settings, tokens_of


def blank(wanted: CaptureSettings) -> SampleRecord:
    scalars = PositionScalars(*(np.zeros(wanted.sequence_length, np.float32) for _ in range(3)))
    entries = wanted.kind.blank(wanted)
    return SampleRecord(5, **tokens_of(5, wanted), entries=entries, scalars=scalars)


@pytest.mark.parametrize("k", [1, 300])
@pytest.mark.parametrize("mode", KINDS)
def test_a_blank_record_fits_the_plan_and_comes_back_from_its_bytes(mode: str, k: int) -> None:
    seed = 1 if KINDS[mode].needs_seed else None
    wanted = settings(mode=mode, k=k, sequence_length=17, sampling_seed=seed, codec="f32")
    record = blank(wanted)
    assert list(shape_problems(record, wanted)) == []
    packed = pack(record, wanted, bytes(8))
    assert len(packed) <= largest_record_bytes(wanted) + 17 * 8  # sections end on 8 bytes
    found = unpack(packed)
    assert type(found.entries) is KINDS[mode]
    expected = record.entries.arrays(wanted)
    for name, stored in found.entries.arrays(wanted).items():
        np.testing.assert_array_equal(stored.values, expected[name].values)
    signal = wanted.kind.signal([found, found])
    assert signal.tokens == 2 * 17
    assert signal.ids.shape == (2 * 17, k)


@pytest.mark.parametrize("mode", KINDS)
def test_counts_and_repetitions_follow_the_ids_that_are_used(mode: str) -> None:
    seed = 1 if KINDS[mode].needs_seed else None
    wanted = settings(mode=mode, k=3, sampling_seed=seed)
    record = blank(wanted)
    ids, used = record.entries.ids()
    assert used.sum() == wanted.sequence_length, "a blank has one used id at each position"
    assert list(repeated_ids(record)) == [], "unused ids are all 0 and no repetition"
    counts = record.entries.id_counts()
    totals = Totals.of_record(record)
    assert sum(totals.kept_histogram) == totals.positions
    assert totals.positions < len(counts) == len(ids)


def test_the_schema_has_the_modes_of_the_table() -> None:
    assert get_args(StoreConfig.model_fields["mode"].annotation) == tuple(KINDS)

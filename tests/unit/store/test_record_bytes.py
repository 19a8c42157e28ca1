"""A record's size before there is one, against the records themselves; records cut to rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_distill.store import cut_to_mass, cut_to_rows, pack, unpack
from megatron_distill.store.binary import (
    largest_record_bytes,
    usual_samples_per_shard,
)
from tests.support.store_samples import made_up, settings
from tests.unit.store.test_signals import captured

UID = b"12345678"


@pytest.mark.parametrize(
    ("codec", "vocab_size", "k"),
    [("f32", 300, 8), ("f16", 131_073, 70), ("u8", 131_073, 8), ("u8", 300, 70)],
)
def test_a_full_record_has_the_predicted_bytes(codec: str, vocab_size: int, k: int) -> None:
    wanted = settings(codec=codec, vocab_size=vocab_size, k=k, sequence_length=512)
    found = len(pack(made_up(1, wanted), wanted, UID))
    assert found == pytest.approx(largest_record_bytes(wanted), rel=0.02)


@pytest.mark.parametrize("codec", ["f32", "u8"])
def test_temperatures_count(codec: str) -> None:
    wanted = settings(
        codec=codec, k=40, vocab_size=500, sequence_length=600, temperatures=(0.5, 2.0)
    )
    found = len(pack(captured(wanted)[0], wanted, UID))
    assert found == pytest.approx(largest_record_bytes(wanted), rel=0.02)


def test_draws_have_at_most_the_predicted_bytes() -> None:
    wanted = settings(mode="sampled", sampling_seed=1, k=50, sequence_length=512)
    sizes = [len(pack(made_up(sample, wanted), wanted, UID)) for sample in range(50)]
    most = largest_record_bytes(wanted)
    assert max(sizes) == pytest.approx(most, rel=0.02)
    assert min(sizes) < most / 4


@pytest.mark.parametrize(
    ("samples", "shards"), [(1, 1), (15, 15), (16, 16), (100, 17), (2000, 16), (10_000_000, None)]
)
def test_there_are_sixteen_shards_or_more(samples: int, shards: int | None) -> None:
    wanted = settings(k=64, sequence_length=4096)
    per_shard = usual_samples_per_shard(wanted, samples)
    assert per_shard >= 1
    if shards is not None:
        assert -(-samples // per_shard) == shards
    else:
        assert per_shard * largest_record_bytes(wanted) == pytest.approx(256e6, rel=0.01)


@pytest.mark.parametrize("kind", ["f32", "f16", "u8", "top_p", "draws", "kept"])
def test_a_cut_record_has_the_bits_of_the_whole_one(kind: str) -> None:
    changes: dict[str, dict[str, object]] = {
        "top_p": {"top_p": 0.8},
        "draws": {"mode": "sampled", "sampling_seed": 1},
    }
    codec = {"codec": kind} if kind in ("f32", "f16") else {}
    wanted = settings(**codec, **changes.get(kind, {}))
    if kind in ("f32", "u8"):
        wanted = settings(codec=kind, k=40, vocab_size=500, temperatures=(0.5, 2.0))
        record = captured(wanted)[0]
    else:
        record = made_up(3, wanted)
    if kind == "top_p":
        record = cut_to_mass(record, 0.8)
    if kind == "kept":
        wanted = settings(normalised_over="kept")
        record = replace(record, entries=replace(record.entries, log_tail_S=None), scalars=None)
    packed, rows = pack(record, wanted, UID), np.array([0, 3, 4, 11])
    whole, found = unpack(packed), unpack(cut_to_rows(packed, rows, wanted))
    assert found.tokens_S1.tolist() == [record.tokens_S1[0], *record.tokens_S1[rows + 1]]
    assert found.document_ids_S1[1:].tolist() == record.document_ids_S1[rows + 1].tolist()
    parts = [(whole.entries, found.entries)]
    if kind != "kept":
        parts.append((whole.scalars, found.scalars))
    compared = 0
    for one, other in parts:
        for name, values in vars(one).items():
            if isinstance(values, np.ndarray):
                expected = values[:, rows] if name.endswith("_TS") else values[rows]
                np.testing.assert_array_equal(getattr(other, name), expected, err_msg=name)
                compared += 1
    assert compared >= (2 if kind == "kept" else 5)

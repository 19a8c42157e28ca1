"""Codecs of records: bounds, extreme rows, prefixes, and the bytes that a plan expects."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_distill.errors import StoreError
from megatron_distill.store import (
    SampleRecord,
    TopKEntries,
    cut_to_k,
    cut_to_mass,
    cut_to_rows,
    measure_codec,
    pack,
    unpack,
)
from megatron_distill.store.binary import (
    largest_record_bytes,
    require_record,
    usual_samples_per_shard,
)
from megatron_distill.store.codecs import decode_ids, encode_ids, id_planes
from tests.support.store_samples import made_up, power_law, settings, student_tokens
from tests.unit.store.test_signals import captured

UID = b"12345678"
VOCABULARIES = (32_000, 65_536, 65_537, 131_072, 131_073, 151_936, 262_144)
PLANES = {32_000: 0, 65_536: 0, 65_537: 1, 131_072: 1, 131_073: 2, 151_936: 2, 262_144: 2}
# Mean and 99th percentile of the KL in nats, on rows of a power law with k = 64.
BOUNDS = {"f32": (1e-9, 1e-8), "f16": (1e-6, 1e-5), "u8": (2e-4, 1e-3)}


def equal(one: SampleRecord, other: SampleRecord) -> None:
    """Every array of two records, to the bit."""
    assert one.sample_id == other.sample_id
    pairs = [(one, other), (one.entries, other.entries), (one.scalars, other.scalars)]
    for left, right in pairs:
        assert type(left) is type(right)
        for name, values in vars(left).items() if left is not None else ():
            if isinstance(values, np.ndarray):
                found = getattr(right, name)
                assert (found.dtype, found.shape) == (values.dtype, values.shape), name
                assert found.tobytes() == values.tobytes(), name


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_ids_of_every_vocabulary_come_back(vocab_size: int) -> None:
    planes = id_planes(vocab_size)
    assert planes == PLANES[vocab_size]
    edges = [0, 1, 65_535, 65_536, 131_071, 131_072, vocab_size - 1]
    ids = np.array([i for i in edges if i < vocab_size] * 3, np.int32)
    arrays = encode_ids(ids, planes)
    assert sum(array.nbytes for array in arrays) == 2 * ids.size + planes * -(-ids.size // 8)
    stored = iter(arrays)
    found = decode_ids(lambda dtype, count: next(stored)[:count], ids.size, planes)
    assert found.tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("vocab_size", "codec"),
    [(32_000, "u8"), (65_537, "f16"), (131_073, "f32"), (131_073, "u8"), (262_144, "f32")],
)
def test_a_record_comes_back(vocab_size: int, codec: str) -> None:
    wanted = settings(vocab_size=vocab_size, codec=codec, k=13)
    record = made_up(5, wanted)
    found = unpack(pack(record, wanted, UID))
    if codec == "f32":
        equal(found, record)
    assert found.entries.ids_SK.max() == vocab_size - 1
    assert found.entries.ids_SK.tobytes() == record.entries.ids_SK.tobytes()
    for name in ("tokens_S1", "document_ids_S1", "flags_S1"):
        assert getattr(found, name).tobytes() == getattr(record, name).tobytes()
    assert found.scalars.log_sum_exp_S.tobytes() == record.scalars.log_sum_exp_S.tobytes()
    for name in ("entropy_S", "label_log_prob_S"):
        error = np.abs(getattr(found.scalars, name) - getattr(record.scalars, name))
        assert (error <= 2**-10 * np.abs(getattr(record.scalars, name))).all()
    assert (np.diff(found.entries.log_probs_SK) <= 0).all()


@pytest.mark.parametrize("codec", ["f16", "u8"])
def test_decoded_probabilities_and_tail_sum_to_one(codec: str) -> None:
    wanted = settings(codec=codec, k=64, sequence_length=500)
    entries = unpack(pack(made_up(1, wanted), wanted, UID)).entries
    mass = np.exp(entries.log_probs_SK, dtype=np.float64).sum(1)
    mass += np.exp(entries.log_tail_S, dtype=np.float64)
    assert np.abs(mass - 1).max() < 2e-6


@pytest.mark.parametrize("codec", ["f32", "f16", "u8"])
def test_a_codec_keeps_within_its_bound(codec: str) -> None:
    rng = np.random.default_rng(0)
    values = power_law(rng, 2000, 64)
    ids = np.tile(np.arange(64, dtype=np.int32), (2000, 1))
    error = measure_codec(codec, ids, values[:, :64], values[:, 64], vocab_size=128_256)
    mean, p99 = BOUNDS[codec]
    assert -1e-12 < error.mean < mean
    assert error.p99 < p99
    if codec == "u8":
        assert error.bytes_per_token < 220


@pytest.mark.parametrize("codec", ["f32", "f16", "u8"])
def test_extreme_rows(codec: str) -> None:
    wanted = settings(codec=codec, k=3, sequence_length=4)
    values = np.array(
        [[0.0, -200.0, -1e5], [-1.0986123] * 3, [-1e-7, -17, -88], [-11.7, -11.7, -11.7]],
        np.float32,
    )
    tail = np.array([-np.inf, -np.inf, -80.0, np.log1p(-3 * np.exp(-11.7))], np.float32)
    record = made_up(0, wanted)
    entries = TopKEntries(np.tile(np.arange(3, dtype=np.int32), (4, 1)), values, tail)
    found = unpack(pack(replace(record, entries=entries), wanted, UID)).entries
    assert np.isfinite(found.log_probs_SK).all()
    assert (np.diff(found.log_probs_SK) <= 0).all()
    assert found.log_tail_S.tolist()[:2] == [-np.inf, -np.inf]
    error = np.abs(np.exp(found.log_probs_SK, dtype=np.float64) - np.exp(values, dtype=np.float64))
    assert error.max() < 2e-4
    assert np.abs(np.exp(found.log_tail_S) - np.exp(tail)).max() < 2e-4


def ragged(record: SampleRecord, mass: float) -> SampleRecord:
    found = cut_to_mass(record, mass)
    n_kept = found.entries.n_kept_S
    assert 1 <= n_kept.min() < n_kept.max()
    return found


@pytest.mark.parametrize(("codec", "k"), [("f32", 20), ("f16", 300), ("u8", 20), ("u8", 300)])
def test_rows_of_unequal_length_come_back(codec: str, k: int) -> None:
    wanted = settings(codec=codec, k=k, top_p=0.9, sequence_length=200)
    record = ragged(made_up(2, wanted), 0.9)
    packed = pack(record, wanted, UID)
    assert len(packed) < len(pack(made_up(2, wanted), wanted, UID))
    found = unpack(packed)
    if codec == "f32":
        equal(found, record)
    assert found.entries.ids_SK.tobytes() == record.entries.ids_SK.tobytes()
    assert found.entries.n_kept_S.tolist() == record.entries.n_kept_S.tolist()
    kept = np.isfinite(record.entries.log_probs_SK)
    assert (np.isfinite(found.entries.log_probs_SK) == kept).all()
    error = np.exp(found.entries.log_probs_SK) - np.exp(record.entries.log_probs_SK)
    assert np.abs(error).max() < 0.02


def test_a_cut_by_mass_keeps_the_shortest_head_that_reaches_it() -> None:
    wanted = settings(codec="f32", k=30, sequence_length=100)
    whole, cut = made_up(4, wanted).entries, ragged(made_up(4, wanted), 0.8).entries
    p = np.exp(whole.log_probs_SK, dtype=np.float64)
    for row, n in enumerate(cut.n_kept_S.tolist()):
        assert p[row, : n - 1].sum() < 0.8
        assert p[row, :n].sum() >= 0.8 or n == 30
    mass = np.exp(cut.log_probs_SK).sum(1) + np.exp(cut.log_tail_S)
    assert np.abs(mass - 1).max() < 1e-5


@pytest.mark.parametrize(
    ("codec", "top_p"), [("f32", None), ("f32", 0.9), ("f16", None), ("u8", 0.9)]
)
def test_a_smaller_k_is_a_prefix_and_the_tail_gets_the_rest(
    codec: str, top_p: float | None
) -> None:
    wanted = settings(codec=codec, k=40, top_p=top_p, sequence_length=100)
    record = made_up(6, wanted) if top_p is None else ragged(made_up(6, wanted), 0.9)
    packed = pack(record, wanted, UID)
    whole = unpack(packed).entries
    for k in (1, 2, 17, 39):
        part = unpack(packed, k).entries
        assert part.ids_SK.tobytes() == np.ascontiguousarray(whole.ids_SK[:, :k]).tobytes()
        assert (part.log_probs_SK == whole.log_probs_SK[:, :k]).all()
        dropped = np.exp(whole.log_probs_SK[:, k:], dtype=np.float64).sum(1)
        tail = np.exp(whole.log_tail_S, dtype=np.float64) + dropped
        np.testing.assert_allclose(np.exp(part.log_tail_S, dtype=np.float64), tail, rtol=2e-6)
        if top_p is not None:
            assert part.n_kept_S.tolist() == np.minimum(whole.n_kept_S, k).tolist()
    again = cut_to_k(unpack(packed, 17), 5).entries
    np.testing.assert_allclose(again.log_tail_S, unpack(packed, 5).entries.log_tail_S, rtol=1e-5)
    assert unpack(packed, 40).entries.log_probs_SK.tobytes() == whole.log_probs_SK.tobytes()


def test_a_prefix_keeps_a_tiny_dropped_mass() -> None:
    wanted = settings(codec="f32", k=4, sequence_length=2)
    values = np.array([[0.0, -100.0, -200.0, -1e4]] * 2, np.float32)
    entries = TopKEntries(
        np.tile(np.arange(4, dtype=np.int32), (2, 1)),
        values,
        np.array([-np.inf, -150.0], np.float32),
    )
    record = replace(made_up(0, wanted), entries=entries)
    tails = cut_to_k(record, 1).entries.log_tail_S
    np.testing.assert_allclose(tails, [-100.0, -100.0], rtol=1e-6)
    tails = cut_to_k(record, 2).entries.log_tail_S
    np.testing.assert_allclose(tails, [-200.0, -150.0], rtol=1e-6)


@pytest.mark.parametrize("codec", ["f32", "f16", "u8"])
def test_decoded_records_can_be_stored_again(codec: str) -> None:
    wanted = settings(codec=codec, k=20, sequence_length=50)
    once = unpack(pack(made_up(8, wanted), wanted, UID))
    twice = unpack(pack(once, wanted, UID))
    difference = np.exp(once.entries.log_probs_SK) - np.exp(twice.entries.log_probs_SK)
    assert np.abs(difference).max() < {"f32": 1e-9, "f16": 1e-3, "u8": 4e-3}[codec]


@pytest.mark.parametrize("sample_id", [2, 5])
def test_a_record_with_a_student_s_tokens_comes_back(sample_id: int) -> None:
    wanted = settings(codec="f32", student_length=23)
    student = student_tokens(sample_id, wanted)
    record = replace(made_up(sample_id, wanted), student=student)
    packed = pack(record, wanted, UID)
    assert len(packed) <= largest_record_bytes(wanted) + 200  # documents and padding of sections
    require_record(packed, capture_uid=UID, sample_id=sample_id, settings=wanted)
    found = unpack(packed)
    equal(found, replace(record, student=None))
    for name, values in vars(student).items():
        kept = getattr(found.student, name)
        assert (kept.dtype, kept.tolist()) == (values.dtype, values.tolist()), name
    # Neither of the two kinds of records is taken for the other.
    for settings_, content in (
        (settings(codec="f32"), packed),
        (wanted, pack(replace(record, student=None), wanted, UID)),
    ):
        with pytest.raises(StoreError, match="does not match the plan"):
            require_record(content, settings=settings_)


def test_chunks_out_of_order_are_refused() -> None:
    wanted = settings(student_length=23)
    student = student_tokens(1, wanted)
    turned = replace(student, chunks_W1=student.chunks_W1[::-1].copy())
    with pytest.raises(StoreError, match="not numbered from 0 in the order"):
        pack(replace(made_up(1, wanted), student=turned), wanted, UID)


RECORD_UID = b"12345678"


@pytest.mark.parametrize(
    ("codec", "vocab_size", "k"),
    [("f32", 300, 8), ("f16", 131_073, 70), ("u8", 131_073, 8), ("u8", 300, 70)],
)
def test_a_full_record_has_the_predicted_bytes(codec: str, vocab_size: int, k: int) -> None:
    wanted = settings(codec=codec, vocab_size=vocab_size, k=k, sequence_length=512)
    found = len(pack(made_up(1, wanted), wanted, RECORD_UID))
    assert found == pytest.approx(largest_record_bytes(wanted), rel=0.02)


@pytest.mark.parametrize("codec", ["f32", "u8"])
def test_temperatures_count(codec: str) -> None:
    wanted = settings(
        codec=codec, k=40, vocab_size=500, sequence_length=600, temperatures=(0.5, 2.0)
    )
    found = len(pack(captured(wanted)[0], wanted, RECORD_UID))
    assert found == pytest.approx(largest_record_bytes(wanted), rel=0.02)


def test_draws_have_at_most_the_predicted_bytes() -> None:
    wanted = settings(mode="sampled", sampling_seed=1, k=50, sequence_length=512)
    sizes = [len(pack(made_up(sample, wanted), wanted, RECORD_UID)) for sample in range(50)]
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
    packed, rows = pack(record, wanted, RECORD_UID), np.array([0, 3, 4, 11])
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

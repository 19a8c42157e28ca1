"""MaxText's saved logits become a store that knows what it lacks."""

from __future__ import annotations

import pickle
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from megatron_distill.errors import StoreError
from megatron_distill.store import (
    Identity,
    Manifest,
    StoreReader,
    convert_maxtext,
    maxtext,
    top_k_signal,
    verify,
)
from megatron_distill.store.maxtext import WireError, read_example
from tests.support.store_maxtext_files import example, sequence, write
from tests.support.store_samples import contents

IDENTITY = Identity("sha256:t", "sha256:k", "unknown")


def convert(folder: Path, files: list[Path], **changes: object) -> Manifest:
    plain = {"vocab_size": 1000, "identity": IDENTITY, "codec": "f32", "samples_per_shard": 2}
    return convert_maxtext(files, folder, **(plain | changes))  # type: ignore[arg-type]


def saved(tmp_path: Path, counts: tuple[int, ...] = (2, 3)) -> list[Path]:
    files, number = [], 0
    for part, count in enumerate(counts):
        messages = [example(sequence(number + i), is_packed=part == 0) for i in range(count)]
        name = f"teacher_top_k_part_{part:05d}_host_000.array_record"
        files.append(write(tmp_path / name, messages))
        number += count
    return files


@pytest.mark.parametrize("is_packed", [True, False])
def test_the_wire_format_is_read(is_packed: bool) -> None:
    integers = [0, 1, 127, 128, 16_383, 16_384, 262_143, (1 << 63) - 1, -1, -(1 << 63)]
    floats = [0.0, -1.5, 3.25, float(np.float32(1e-30))]
    found = read_example(
        example({"i": integers, "f": floats, "b": b"text", "none": []}, is_packed=is_packed)
    )
    assert found["i"].tolist() == integers
    assert found["i"].dtype == np.int64
    assert found["f"].tolist() == floats
    assert found["f"].dtype == np.float32
    assert "b" not in found
    assert len(found.get("none", [])) == 0


def test_a_message_that_breaks_off_anywhere_is_refused_or_shorter() -> None:
    content = example(sequence(0))
    whole = read_example(content)
    for length in range(len(content)):
        with pytest.raises(WireError):
            read_example(content[:length])
    assert set(whole) == set(sequence(0))


def test_bytes_at_random_never_fail_otherwise() -> None:
    rng = np.random.default_rng(0)
    content = example(sequence(0))
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        for place in rng.integers(0, len(content), 3).tolist():
            damaged[place] ^= int(rng.integers(1, 256))
        try:
            read_example(bytes(damaged))
        except WireError:
            refused += 1
    assert refused > 30


def test_sequences_become_samples(tmp_path: Path) -> None:
    manifest = convert(tmp_path / "store", saved(tmp_path))
    assert verify(tmp_path / "store").problems == ()
    assert (manifest.plan.samples, manifest.plan.settings.sequence_length) == (5, 11)
    with StoreReader.open(tmp_path / "store", teacher="sha256:t", vocab_size=1000) as reader:
        for record in reader.read(range(5)):
            source = sequence(record.sample_id)
            assert record.tokens_S1.tolist() == source["inputs"]
            assert record.document_ids_S1.tolist() == [0] * 5 + [1] * 5 + [-1] * 2
            trained = [bool(segment) for segment in source["targets_segmentation"][:-1]]
            assert (record.flags_S1[1:] > 0).tolist() == trained
            logits = np.array(source["top_k_logits"], np.float32).reshape(12, 5)[:11]
            exact = logits - np.logaddexp.reduce(logits.astype(np.float64), 1, keepdims=True)
            np.testing.assert_allclose(record.entries.log_probs_SK, exact, atol=1e-6)
            ids = np.array(source["top_k_indices"]).reshape(12, 5)[:11]
            assert (record.entries.ids_SK == ids).all()
            assert record.scalars is None
            part = reader.read([record.sample_id], k=2)[0].entries
            np.testing.assert_allclose(np.exp(part.log_probs_SK).sum(1), 1.0, rtol=1e-5)


def test_the_store_names_its_missing_fields(tmp_path: Path) -> None:
    convert(tmp_path / "store", saved(tmp_path))
    with StoreReader.open(tmp_path / "store") as reader:
        assert reader.settings.lacks == ("log_tail", "log_sum_exp", "entropy", "label_log_prob")
        reader.require(support="renormalized", temperatures=[2.0])
        for support in ("tail", "raw"):
            with pytest.raises(StoreError, match=f"cannot serve support {support} .it lacks log_"):
                reader.require(support=support)  # type: ignore[arg-type]
            with pytest.raises(StoreError, match="has no log_tail"):
                top_k_signal(reader.read([0]), support=support)  # type: ignore[arg-type]
        signal = top_k_signal(reader.read([0, 1]), support="renormalized", temperature=2.0)
        assert signal.ids.shape == (22, 5)


@pytest.mark.parametrize(
    ("dropped", "documents"),
    [
        (("inputs_segmentation", "targets_segmentation"), [0] * 5 + [1] * 5 + [2, 3]),
        (("inputs_segmentation", "targets_segmentation", "inputs_position"), [0] * 12),
    ],
)
def test_without_segments_documents_come_from_positions_or_are_one(
    tmp_path: Path, dropped: tuple[str, ...], documents: list[int]
) -> None:
    features = {name: values for name, values in sequence(0).items() if name not in dropped}
    file = write(tmp_path / "a.array_record", [example(features)])
    convert(tmp_path / "store", [file])
    (record,) = StoreReader.open(tmp_path / "store").read([0])
    assert record.document_ids_S1.tolist() == documents
    assert (record.flags_S1 == 3).all()


def test_unsorted_logits_are_put_in_order(tmp_path: Path) -> None:
    features = sequence(0, length=3, k=4) | {
        "top_k_logits": [1.0, 3.0, 3.0, 2.0] * 3,
        "top_k_indices": [7, 9, 8, 1] * 3,
    }
    plain = {name: features[name] for name in ("inputs", "top_k_logits", "top_k_indices")}
    convert(tmp_path / "store", [write(tmp_path / "a.array_record", [example(plain)])])
    (record,) = StoreReader.open(tmp_path / "store").read([0])
    assert record.entries.ids_SK.tolist() == [[8, 9, 1, 7]] * 2


def refused() -> dict[str, list[bytes]]:
    good, other = example(sequence(0)), example(sequence(1, k=4))
    ragged = sequence(0) | {"top_k_logits": [1.0] * 7}
    far = sequence(0) | {"top_k_indices": [(1 << 32) + 5] * 60}
    nan = sequence(0) | {"top_k_logits": [float("nan")] * 60}
    return {
        "record 0: a Python pickle (MaxText until May": [pickle.dumps({"a": 1})],
        "record 0: a batch as safetensors": [(20).to_bytes(8, "little") + b'{"tokens":{}}' * 3],
        "record 1: not a tf.train.Example": [good, good[:-5]],
        "record 0: has no feature top_k_logits, only inputs": [example({"inputs": [1, 2]})],
        "record 1: 12 tokens with 4 logits each, the first sequence has 12 with 5": [good, other],
        "record 0: 7 logits and 60 ids do not divide": [example(ragged)],
        "a token is outside of the vocabulary of 1000": [example(sequence(0, vocab_size=3000))],
        "an id is outside of the vocabulary of 1000": [example(far)],
        "not finite at position 0": [example(nan)],
        "contains no sequence": [],
    }


@pytest.mark.parametrize("text", list(refused()))
def test_files_of_another_version_are_refused(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "a.array_record", refused()[text])
    with pytest.raises(StoreError) as caught:
        convert(tmp_path / "store", [file])
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_and_damaged_ones_are_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"absent\.array_record: missing"):
        convert(tmp_path / "store", [tmp_path / "absent.array_record"])
    (tmp_path / "cut.array_record").write_bytes(saved(tmp_path)[0].read_bytes()[:70_000])
    with pytest.raises(StoreError, match=r"cut\.array_record: cut off, not closed"):
        convert(tmp_path / "store", [tmp_path / "cut.array_record"])


def test_an_interrupted_conversion_is_gone_on_with(tmp_path: Path) -> None:
    files = saved(tmp_path)
    convert(tmp_path / "one", files)
    results = [np.zeros(12, np.uint8)] * 3 + [KeyboardInterrupt]
    with patch.object(maxtext, "_flags", side_effect=results), pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "broken", files)
    assert len(list((tmp_path / "broken/shards").iterdir())) == 2
    for path in (tmp_path / "broken/shards").iterdir():
        path.unlink()
    convert(tmp_path / "broken", files)
    assert contents(tmp_path / "one") == contents(tmp_path / "broken")

"""Reading believes nothing: every damage is a StoreError that names the shard and the sample."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest

from megatron_distill.errors import StoreError
from megatron_distill.store import StoreReader, StoreSet, pack, unpack, verify
from megatron_distill.store.binary import RecordFileWriter
from megatron_distill.store.plan import sealed
from tests.support.store_samples import begin, made_up, settings, write_store

SHARD = "shards/logits-000001.array_record"
UID = b"12345678"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_store(tmp_path / "store", settings())
    return tmp_path / "store"


def read_all(folder: Path) -> list[bytes]:
    with StoreReader.open(folder) as reader:
        return [reader.packed(sample_id) for sample_id in range(reader.samples)]


def refusal(folder: Path) -> str:
    with pytest.raises(StoreError) as caught:
        read_all(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def repair(folder: Path) -> str:
    """The remedy in the message."""
    return f"run `megatron-distill store repair {folder}`, then the capture again"


def test_300_flipped_bits_of_a_record_are_all_found() -> None:
    packed = pack(made_up(1, settings()), settings(), UID)
    rng = np.random.default_rng(0)
    for bit in rng.choice(8 * len(packed), 300, replace=False).tolist():
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreError, match="damaged"):
            unpack(bytes(damaged))


@pytest.mark.parametrize("length", [0, 1, 7, 127, 128, 129, 400, -9, -8, -1])
def test_a_record_that_is_cut_off_is_found(length: int) -> None:
    packed = pack(made_up(1, settings()), settings(), UID)
    with pytest.raises(StoreError, match="damaged|cut off"):
        unpack(packed[:length])


def test_300_flipped_bits_of_a_shard_are_all_found_or_harmless(store: Path) -> None:
    path, intact = store / SHARD, read_all(store)
    original = path.read_bytes()
    # Where the file is not the container's padding.
    busy = np.flatnonzero(np.frombuffer(original, np.uint8))
    rng = np.random.default_rng(1)
    found = harmless = 0
    for place in rng.choice(busy, 300).tolist():
        damaged = bytearray(original)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            with StoreReader.open(store) as reader:
                assert [reader.packed(sample_id) for sample_id in range(4, 8)] == intact[4:8]
        except StoreError as error:
            found += str(path) in str(error)
        else:
            harmless += 1
    assert found + harmless == 300
    assert found > 200, "most bytes of a shard are records"


@pytest.mark.slow
def test_300_flipped_bits_anywhere_are_all_found_by_verify(store: Path) -> None:
    original = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    names = sorted(original)
    rng = np.random.default_rng(2)
    for trial in range(300):
        path = names[trial % len(names)]
        damaged = bytearray(original[path])
        damaged[int(rng.integers(len(damaged)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        if path.name == "plan.json":
            with pytest.raises(StoreError, match=r"plan\.json: "):
                verify(store)
        else:
            assert verify(store).problems, f"{path} was damaged unnoticed"
        path.write_bytes(original[path])
    assert verify(store).problems == ()


def test_a_shard_cut_off_at_any_length_is_found(store: Path) -> None:
    path = store / SHARD
    original = path.read_bytes()
    for length in (0, 1, 100, 5000, 65_535, 65_536, 65_600, 131_000, len(original) - 1):
        path.write_bytes(original[:length])
        assert f"{path}: {length} bytes instead of {len(original)}" in refusal(store)
        if length <= 65_536:
            # The size as it was, as a file system may leave it after a crash.
            path.write_bytes(original[:length].ljust(len(original), b"\0"))
            assert f"{path}: cut off, not closed" in refusal(store)


def test_a_missing_shard_is_named(store: Path) -> None:
    (store / SHARD).unlink()
    assert refusal(store) == f"{store / SHARD}: missing (sample 4); {repair(store)}"


def test_swapped_shards_are_found(store: Path) -> None:
    first, second = store / "shards/logits-000000.array_record", store / SHARD
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    assert f"{first}: sample 0: contains sample 4: shards or records are swapped" in refusal(store)


def test_a_duplicated_shard_is_found(store: Path) -> None:
    second = store / SHARD
    shutil.copyfile(store / "shards/logits-000000.array_record", second)
    assert f"{second}: sample 4: contains sample 0" in refusal(store)
    shutil.copyfile(store / "shards/logits-000000.json", second.with_suffix(".json"))
    texts = [problem.text for problem in verify(store).problems]
    assert any("describes shard 0; its name is that of shard 1" in text for text in texts)


@pytest.mark.parametrize("name", [SHARD, "shards/logits-000001.json", "manifest.json", "plan.json"])
def test_a_file_of_another_store_is_found(tmp_path: Path, store: Path, name: str) -> None:
    write_store(tmp_path / "other", settings(), teacher="sha256:dd")
    shutil.copyfile(tmp_path / "other" / name, store / name)
    if name == SHARD:
        assert f"{store / SHARD}: sample 4: belongs to another store (capture " in refusal(store)
    elif name.endswith("1.json"):
        assert f"{store / name}: belongs to another store (capture " in refusal(store)
        texts = [problem.text for problem in verify(store).problems]
        assert any("belongs to another store" in text for text in texts)
    else:
        assert "manifest.json: belongs to another store" in refusal(store)


def rewrite_record(store: Path, change: object) -> Path:
    """Write the second shard anew, its second record changed."""
    path = store / SHARD
    contents = read_all(store)[4:8]
    contents[1] = change(contents[1])  # type: ignore[operator]
    writer = RecordFileWriter(path, named=path)
    for content in contents:
        writer.write(content)
    writer.close()
    return path


def with_version(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[8] = 3
    changed[124:128] = zlib.crc32(changed[:124]).to_bytes(4, "little")
    return bytes(changed)


def with_token(content: bytes) -> bytes:
    """Another token, and both checksums made to fit."""
    changed = bytearray(content)
    runs = int.from_bytes(changed[28:32], "little")
    changed[128 + 2 * (4 * runs + -4 * runs % 8)] ^= 1
    changed[80:84] = zlib.crc32(changed[128:]).to_bytes(4, "little")
    changed[124:128] = zlib.crc32(changed[:124]).to_bytes(4, "little")
    return bytes(changed)


def test_a_record_of_another_version_is_found(store: Path) -> None:
    path = rewrite_record(store, with_version)
    assert f"{path}: sample 5: version 3 of the record format" in refusal(store)


def test_tokens_that_do_not_match_their_digest_are_found(store: Path) -> None:
    path = rewrite_record(store, with_token)
    assert f"{path}: sample 5: damaged: the tokens do not match" in refusal(store)


def test_a_record_of_other_settings_is_found(store: Path) -> None:
    uid = begin(store, settings()).plan.uid
    other = settings(k=7)
    path = rewrite_record(store, lambda _: pack(made_up(5, other), other, uid))
    assert f"{path}: sample 5: damaged: the header does not match the plan" in refusal(store)


def test_a_shard_with_too_few_records_is_found(store: Path) -> None:
    path = store / SHARD
    writer = RecordFileWriter(path, named=path)
    writer.write(b"x")
    writer.close()
    assert f"{path}: 1 record instead of 4" in refusal(store)


@pytest.mark.parametrize("name", ["plan.json", "manifest.json"])
def test_a_file_of_another_version_is_refused(store: Path, name: str) -> None:
    value = json.loads((store / name).read_text())
    value["version"] = 2
    del value["seal"]
    (store / name).write_bytes(sealed(value))
    assert f"{store / name}: version 2 of the store's format; this release reads" in refusal(store)


@pytest.mark.parametrize("name", ["plan.json", "manifest.json"])
def test_an_edited_or_broken_file_is_refused(store: Path, name: str) -> None:
    path = store / name
    text = path.read_text()
    path.write_text(text.replace('"k": 8', '"k": 9'))
    assert f"{path}: damaged, its content does not match its seal" in refusal(store)
    path.write_text(text[: len(text) // 2])
    assert f"{path}: damaged, not valid JSON" in refusal(store)
    path.write_text(text.replace("  ", "   "))
    assert f"{path}: damaged, its content does not match its seal" in refusal(store)
    path.write_text(text.replace("[", "[NaN,", 1))
    assert f"{path}: damaged" in refusal(store)


def test_a_sealed_plan_of_wrong_values_is_refused(store: Path) -> None:
    path = store / "plan.json"
    whole = json.loads(path.read_text())
    del whole["seal"]
    capture = whole["capture"]
    for changes, reported in (
        (
            {"capture": capture | {"codec": "u4"}},
            "not in the format of this release (capture settings",
        ),
        ({"capture": capture | {"k": "8"}}, "not in the format of this release ("),
        ({"capture": {}}, "not in the format of this release ('temperatures')"),
        ({"samples": 0}, "not in the format of this release (samples is 0"),
        ({"note": 1}, "contains fields of a later release"),
    ):
        path.write_bytes(sealed(whole | changes))
        assert f"{path}: {reported}" in refusal(store)
    for name in ("manifest.json", "shards/logits-000000.json"):
        other = json.loads((store / name).read_text())
        (store / name).write_bytes(
            sealed({n: other[n] for n in ("format", "version", "capture_uid")})
        )
    path.write_bytes(sealed(whole))
    texts = [problem.text for problem in verify(store).problems]
    assert sum("not in the format of this release" in text for text in texts) == 2
    path.write_bytes(sealed({"format": "something else"}))
    assert f"{path}: not a file of a megatron-distill teacher store" in refusal(store)


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ({"teacher": "x"}, "its teacher is sha256:aa, this run's x; name the teacher it was"),
        ({"tokenizer": "x"}, "its tokenizer is sha256:bb, this run's x; use its tokenizer"),
        ({"dataset": "x"}, "its dataset is sha256:cc, this run's x; use the data"),
        ({"vocab_size": 32_000}, "its vocab_size is 131073, this run's 32000; use its tokenizer"),
        ({"sequence_length": 8}, "its sequence_length is 16, this run's 8; set the sequence"),
    ],
)
def test_a_store_of_another_identity_is_refused(
    store: Path, expected: dict[str, object], text: str
) -> None:
    with pytest.raises(StoreError) as caught:
        StoreReader.open(store, **expected)  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{store}: {text}")
    StoreReader.open(
        store, teacher="sha256:aa", tokenizer="sha256:bb", dataset="sha256:cc", vocab_size=131_073
    )


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "of another shard", "resealed"])
def test_a_damaged_sidecar_is_found_when_a_store_is_opened(store: Path, damage: str) -> None:
    path = store / "shards/logits-000002.json"
    content = path.read_bytes()
    value = json.loads(content)
    del value["seal"]
    if damage == "gone":
        path.unlink()
    else:
        changed = {
            "flipped": content.replace(b'"count": ', b'"count":1', 1),
            "cut": content[:100],
            "of another shard": (store / "shards/logits-000001.json").read_bytes(),
            "resealed": sealed(value | {"sha256": "0" * 64}),
        }
        path.write_bytes(changed[damage])
    with pytest.raises(StoreError) as caught:
        StoreReader.open(store)
    assert str(caught.value).startswith(f"{path}: "), caught.value
    assert str(caught.value).endswith(repair(store)), caught.value
    path.write_bytes(content)
    assert read_all(store)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"not a teacher store \(no plan\.json\)"):
        StoreReader.open(tmp_path)
    with pytest.raises(StoreError, match="no teacher store found"):
        StoreSet.open([f"{tmp_path}/*"])


def test_capabilities_are_asked_for_beforehand(store: Path) -> None:
    with StoreReader.open(store) as reader:
        reader.require(support="tail", k=8, temperatures=[1.0])
        reader.require(support="renormalized", k=3, temperatures=[2.0])
        with pytest.raises(StoreError, match="contains 8 top-k ids per position, not a top-9"):
            reader.read([0], k=9)
        with pytest.raises(StoreError, match="top_k is 0; set it to at least 1"):
            reader.read([0], k=0)
        with pytest.raises(StoreError, match="not captured at temperature 2, only at 1;"):
            reader.require(support="tail", temperatures=[2.0])


def test_a_forked_child_opens_files_anew(store: Path) -> None:
    with StoreReader.open(store) as reader:
        expected = reader.packed(3)
        child = os.fork()
        if child == 0:
            os._exit(0 if reader.packed(3) == expected else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert reader.packed(3) == expected


def test_several_stores_are_read_as_one(tmp_path: Path) -> None:
    wanted = settings(codec="f32")
    for name, samples in (("b", 3), ("a", 5)):
        write_store(tmp_path / name, wanted, samples=samples, dataset=f"sha256:{name}")
    both = StoreSet.open([f"{tmp_path}/*"], vocab_size=131_073)
    assert both.samples == 8
    records = both.read([6, 0, 4, 5])
    assert [record.sample_id for record in records] == [6, 0, 4, 5]
    for record, local in zip(records, [1, 0, 4, 0], strict=True):
        assert (record.tokens_S1 == made_up(local, wanted).tokens_S1).all()
    assert unpack(both.packed(7)).sample_id == 2
    with pytest.raises(StoreError, match="no sample 8: the stores contain 8"):
        both.read([8])
    write_store(tmp_path / "c", settings(codec="f16"))
    with pytest.raises(StoreError, match="its capture is .*read together only stores"):
        StoreSet.open([f"{tmp_path}/*"])

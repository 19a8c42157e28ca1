"""Writing: whole shards or none, the same bytes every time, and only what was planned."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from megatron_distill.errors import StoreError
from megatron_distill.runtime.atomic_files import partial_file, partial_files
from megatron_distill.store import StoreReader, StoreWriter
from tests.support.store_samples import (
    IDENTITY,
    begin,
    contents,
    fill,
    made_up,
    settings,
    write_store,
)
from tests.unit.store.test_codecs import equal


@pytest.mark.parametrize("mode", ["top_k", "sampled"])
def test_every_sample_comes_back_by_its_id(tmp_path: Path, mode: str) -> None:
    seed = 3 if mode == "sampled" else None
    wanted = settings(codec="f32", mode=mode, sampling_seed=seed)
    write_store(tmp_path / "store", wanted)
    with StoreReader.open(tmp_path / "store") as reader:
        assert reader.samples == 10
        order = [9, 0, 5, 4, 0, 8]
        for sample_id, record in zip(order, reader.read(order), strict=True):
            equal(record, made_up(sample_id, wanted))
        with pytest.raises(StoreError, match="no sample 10; the store contains 0 to 9"):
            reader.read([10])


@pytest.mark.parametrize("codec", ["f32", "f16", "u8"])
def test_the_same_input_gives_the_same_files(tmp_path: Path, codec: str) -> None:
    wanted = settings(codec=codec)
    write_store(tmp_path / "one", wanted)
    writer = begin(tmp_path / "two", wanted)
    fill(writer, [2])
    fill(begin(tmp_path / "two", wanted), [0, 1])
    assert writer.holes() == []
    writer.finish()
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_json_files_have_one_form(tmp_path: Path) -> None:
    write_store(tmp_path, settings())
    for name in ("plan.json", "manifest.json", "shards/logits-000001.json"):
        text = (tmp_path / name).read_text("ascii")
        value = json.loads(text)
        assert text == json.dumps(value, indent=2, sort_keys=True) + "\n"
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["complete"] is True
    assert [shard["count"] for shard in manifest["shards"]] == [4, 4, 2]
    assert manifest["tokens"] == 160


def test_holes_are_uncommitted_shards(tmp_path: Path) -> None:
    writer = begin(tmp_path, settings())
    assert writer.holes() == [0, 1, 2]
    fill(writer, [1])
    before = contents(tmp_path)
    assert begin(tmp_path, settings()).holes() == [0, 2]
    with pytest.raises(StoreError, match="2 shards are missing of 3, first 0"):
        writer.finish()
    with pytest.raises(StoreError, match=r"incomplete, 1 of 3 shards and no"):
        StoreReader.open(tmp_path)
    fill(writer, [1])
    assert contents(tmp_path) == before, "a committed shard is not touched"
    fill(writer, [0])
    with pytest.raises(StoreError, match="1 shard is missing of 3, first 2"):
        writer.finish()


CHANGES = {
    "k is 8 in the store, not 7": {"wanted": settings(k=7)},
    "codec is 'u8' in the store, not 'f16'": {"wanted": settings(codec="f16")},
    "temperatures is [] in the store, not [2.0]": {"wanted": settings(temperatures=(2.0,))},
    "teacher is 'sha256:aa' in the store, not 'sha256:dd'": {"teacher": "sha256:dd"},
    "samples is 10 in the store, not 11": {"samples": 11},
    "samples_per_shard is 4 in the store, not 5": {"per_shard": 5},
}


@pytest.mark.parametrize("text", CHANGES)
def test_another_plan_is_refused_with_its_differences(tmp_path: Path, text: str) -> None:
    fill(begin(tmp_path, settings()), [0])
    before = contents(tmp_path)
    changes = dict(CHANGES[text])
    with pytest.raises(StoreError) as caught:
        begin(tmp_path, changes.pop("wanted", settings()), **changes)
    assert str(caught.value).startswith(
        f"{tmp_path}: the store was started with other settings ({text})"
    )
    assert contents(tmp_path) == before


def test_settings_of_an_identity_are_compared_one_by_one(tmp_path: Path) -> None:
    begin(tmp_path, settings())
    other = replace(IDENTITY, settings={"name": "made up", "precision": "bf16"})
    with pytest.raises(StoreError, match=r"\(precision is None in the store, not 'bf16'"):
        StoreWriter(tmp_path, settings=settings(), identity=other, samples=10, samples_per_shard=4)


def test_an_error_inside_a_shard_leaves_nothing(tmp_path: Path) -> None:
    writer = begin(tmp_path, settings())
    before = contents(tmp_path)

    def add(shard: int, *sample_ids: int, then: BaseException | None = None) -> None:
        with writer.shard(shard) as open_shard:
            for sample_id in sample_ids:
                open_shard.add(made_up(sample_id, settings()))
            if then is not None:
                raise then

    with pytest.raises(KeyboardInterrupt):
        add(0, 0, then=KeyboardInterrupt())
    with pytest.raises(StoreError, match="1 record written instead of 4"):
        add(0, 0)
    with pytest.raises(StoreError, match="sample 1: the next sample must be 0 of 4"):
        add(0, 1)
    with pytest.raises(StoreError, match="sample 10: the next sample must be 10 of 10"):
        add(2, 8, 9, 10)
    assert contents(tmp_path) == before


def wrong_records() -> dict[str, object]:
    good = made_up(0, settings())
    top_k, values = good.entries, good.entries.log_probs_SK.copy()
    values[3, 2] = np.nan
    rising = good.entries.log_probs_SK[:, ::-1].copy()
    outside = top_k.ids_SK.copy()
    outside[1, 1] = 131_073
    half = good.scalars.entropy_S.astype(np.float16)
    infinite = np.full(16, np.inf, np.float32)
    return {
        "not finite at position 3": replace(good, entries=replace(top_k, log_probs_SK=values)),
        "increase at position": replace(good, entries=replace(top_k, log_probs_SK=rising)),
        "an id is outside of the vocabulary of 131073": replace(
            good, entries=replace(top_k, ids_SK=outside)
        ),
        "sum up to": replace(good, entries=replace(top_k, log_tail_S=top_k.log_tail_S * 0)),
        "log_tail_S is None": replace(good, entries=replace(top_k, log_tail_S=None)),
        "has no scalars": replace(good, scalars=None),
        "entropy_S is float16": replace(good, scalars=replace(good.scalars, entropy_S=half)),
        "log_sum_exp_S is not finite": replace(
            good, scalars=replace(good.scalars, log_sum_exp_S=infinite)
        ),
        "a token is outside": replace(good, tokens_S1=good.tokens_S1 - 131_073),
        "tokens_S1 is int32 of shape (16,)": replace(good, tokens_S1=good.tokens_S1[1:]),
        "a flag is above 3": replace(good, flags_S1=good.flags_S1 + np.uint8(4)),
        "temperatures are (2.0,)": replace(good, entries=replace(top_k, temperatures=(2.0,))),
        "the mode of the plan is top_k": made_up(0, settings(mode="sampled", sampling_seed=1)),
    }


@pytest.mark.parametrize("text", list(wrong_records()))
def test_values_that_no_teacher_can_produce_are_refused(tmp_path: Path, text: str) -> None:
    writer = begin(tmp_path, settings())
    with pytest.raises(StoreError) as caught, writer.shard(0) as shard:
        shard.add(wrong_records()[text])
    assert text in str(caught.value)
    assert "logits-000000.array_record: sample 0: " in str(caught.value)
    assert writer.holes() == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"k": 0}, "k is 0"),
        ({"k": 131_074}, "k is 131074; it must be between 1 and the vocabulary of 131073"),
        ({"codec": "u4"}, "codec is 'u4'; it must be one of f32, f16, u8"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"temperatures": (2.0, 2.0)}, "they must ascend"),
        ({"temperatures": (1.0,)}, "positive and not 1"),
        ({"mode": "sampled"}, "sampling_seed belongs to mode: sampled"),
        ({"mode": "hybrid"}, "mode is 'hybrid'"),
        ({"normalised_over": "kept", "temperatures": (2.0,)}, "need normalised_over: vocabulary"),
        ({"sequence_length": 0}, "sequence_length is 0"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(StoreError) as caught:
        settings(**changes)
    assert text in str(caught.value)


def test_a_store_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="samples is 0"):
        begin(tmp_path, settings(), samples=0)


def test_stale_temporary_files_are_removed_and_those_in_use_are_not(tmp_path: Path) -> None:
    writer = begin(tmp_path, settings())
    target = tmp_path / "shards" / "logits-000001.array_record"
    with partial_file(target) as (partial, _):
        stale = partial.with_name(partial.name.replace("000001", "000002"))
        elsewhere = partial.with_name("logits-000000.array_record.partial-another.machine")
        for path in (stale, elsewhere):
            path.write_bytes(b"half")
        assert writer.holes() == [0, 1, 2]
        assert sorted(partial_files(target.parent)) == sorted([partial, elsewhere])
        with pytest.raises(StoreError, match="another process is writing it"):
            fill(writer, [1])
    assert partial_files(target.parent) == [elsewhere]


def test_a_path_that_cannot_be_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match=r"cannot write .*/file: .*name another folder"):
        begin(tmp_path / "file", settings())


def test_without_the_container_the_error_names_the_package(tmp_path: Path) -> None:
    writer = begin(tmp_path, settings())
    with (
        patch.dict(sys.modules, {"array_record.python": None}),
        pytest.raises(StoreError, match="pip install array-record"),
    ):
        fill(writer, [0])
    assert writer.holes() == [0, 1, 2]

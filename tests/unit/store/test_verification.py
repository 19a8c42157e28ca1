"""Verification finds damage that reading one sample cannot, and repair makes refillable holes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from megatron_distill.store import SampleRecord, StoreReader, Totals, repair, verify, writer
from tests.support.store_samples import begin, contents, fill, made_up, settings, write_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_store(tmp_path / "store", settings(codec="f32"))
    return tmp_path / "store"


def bad(kind: str, record: SampleRecord) -> SampleRecord:
    entries = record.entries
    ids, values = entries.ids_SK.copy(), entries.log_probs_SK.copy()
    if kind == "twice":
        ids[7, 3] = ids[7, 5]
    elif kind == "outside":
        ids[7, 3] = 131_074
    elif kind == "nan":
        values[7, 3] = np.nan
    else:
        values[7, 3] = values[7, 2] + 1
    return replace(record, entries=replace(entries, ids_SK=ids, log_probs_SK=values))


@pytest.mark.parametrize(
    ("kind", "reported"),
    [
        ("twice", "an id is named twice at position 7"),
        ("outside", "an id is outside of the vocabulary of 131073"),
        ("nan", "log-probabilities are not finite at position 7"),
        ("rising", "log-probabilities increase at position 7"),
    ],
)
def test_wrong_values_in_an_intact_record_are_found(
    tmp_path: Path, kind: str, reported: str
) -> None:
    # A writer that checks nothing, as one of another program might.
    with (
        patch.object(writer, "value_problems", return_value=[]),
        patch.object(Totals, "of_record", return_value=Totals(positions=1)),
    ):
        opened = begin(tmp_path, settings(codec="f32"), samples=3)
        first, second, third = (made_up(number, settings(codec="f32")) for number in range(3))
        with opened.shard(0) as shard:
            for record in (first, bad(kind, second), third):
                shard.add(record)
        opened.finish()
    report = verify(tmp_path)
    assert report.problems[0].text == reported
    assert {problem.sample_id for problem in report.problems} == {1}
    assert report.samples == 2
    assert report.bad_shards == (0,)


def test_nothing_is_wrong_with_a_good_store(store: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(store, progress=lambda done, shards: seen.append((done, shards)))
    assert (report.problems, report.missing, report.samples) == ((), (), 10)
    assert seen == [(1, 3), (2, 3), (3, 3)]
    before = contents(store)
    assert repair(store, report) == []
    assert contents(store) == before


def test_an_incomplete_store_names_its_missing_shards(tmp_path: Path) -> None:
    fill(begin(tmp_path, settings()), [1])
    report = verify(tmp_path)
    assert report.missing == (0, 2)
    assert report.samples == 4
    assert [problem.file for problem in report.problems] == ["manifest.json"]
    assert "incomplete, 1 of 3 shards and no" in report.problems[0].text


def test_one_damaged_record_does_not_hide_its_neighbours(store: Path) -> None:
    path = store / "shards/logits-000001.array_record"
    content = bytearray(path.read_bytes())
    record = StoreReader.open(store).packed(6)
    content[content.index(record) + 200] ^= 1
    path.write_bytes(content)
    report = verify(store)
    assert {problem.sample_id for problem in report.problems} == {None, 6}
    assert all(str(store) not in problem.text for problem in report.problems)
    assert report.bad_shards == (1,)


def test_bad_shards_are_moved_away_and_refilled(store: Path) -> None:
    intact = contents(store)
    shards = store / "shards"
    content = bytearray((shards / "logits-000000.array_record").read_bytes())
    content[300] ^= 4
    (shards / "logits-000000.array_record").write_bytes(content)
    (shards / "logits-000002.json").write_text("{}")
    report = verify(store)
    assert report.bad_shards == (0, 2)
    moved = [str(path.relative_to(store)) for path in repair(store, report)]
    assert moved == [
        f"quarantine/{name}"
        for name in (
            "manifest.json", "logits-000000.json", "logits-000000.array_record",
            "logits-000002.json", "logits-000002.array_record",
        )
    ]  # fmt: skip
    assert begin(store, settings(codec="f32")).holes() == [0, 2]
    write_store(store, settings(codec="f32"))
    after = contents(store)
    assert {name: text for name, text in after.items() if "quarantine" not in name} == intact
    assert verify(store).problems == ()
    (shards / "logits-000000.array_record").write_bytes(content)
    names = [path.name for path in repair(store, verify(store))]
    assert "logits-000000.array_record.2" in names, "nothing in quarantine is overwritten"


def test_a_missing_shard_and_a_missing_sidecar_become_holes(store: Path) -> None:
    (store / "shards/logits-000000.array_record").unlink()
    (store / "shards/logits-000001.json").unlink()
    report = verify(store)
    assert report.bad_shards == (0, 1)
    repair(store, report)
    assert begin(store, settings(codec="f32")).holes() == [0, 1]


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_manifest_is_made_anew_from_good_shards(store: Path, damage: str) -> None:
    path = store / "manifest.json"
    intact = path.read_bytes()
    if damage == "cut":
        path.write_bytes(intact[:200])
    else:
        path.unlink()
    report = verify(store)
    assert (report.bad_shards, report.samples) == ((), 10)
    assert len(report.problems) == 1
    repair(store, report)
    begin(store, settings(codec="f32")).finish()
    assert path.read_bytes() == intact


def test_an_interrupted_repair_is_done_by_the_next(store: Path) -> None:
    (store / "shards/logits-000001.json").write_text("{}")
    report = verify(store)
    moves = 0
    original = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        nonlocal moves
        moves += 1
        if moves == 2:
            raise KeyboardInterrupt
        return original(path, target)

    with patch.object(Path, "rename", interrupted), pytest.raises(KeyboardInterrupt):
        repair(store, report)
    report = verify(store)
    assert report.bad_shards == (1,)
    repair(store, report)
    write_store(store, settings(codec="f32"))
    assert verify(store).problems == ()

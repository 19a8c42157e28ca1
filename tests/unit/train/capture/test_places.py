"""Where a stream stood, kept on disk: found again, and refused where it is not what it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.errors import StoreError
from megatron_distill.train.capture.order import StreamPositions

UID = b"12345678"
STATES = {3: {"taken": [15], "sources": [{"given": 0.5}]}, 12: {"taken": [60], "sources": []}}


def test_states_come_back_by_shard(tmp_path: Path) -> None:
    StreamPositions(tmp_path, UID).save(STATES)
    (tmp_path / "stream-000004.json.partial-elsewhere").write_text("half")
    assert StreamPositions(tmp_path, UID).load() == STATES
    assert StreamPositions(tmp_path / "absent", UID).load() == {}


def test_a_state_of_another_store_is_refused(tmp_path: Path) -> None:
    StreamPositions(tmp_path, UID).save(STATES)
    with pytest.raises(StoreError, match="stream-000003.json: belongs to another store, 31323334"):
        StreamPositions(tmp_path, b"87654321").load()


def test_a_renamed_file_is_refused(tmp_path: Path) -> None:
    StreamPositions(tmp_path, UID).save(STATES)
    (tmp_path / "stream-000003.json").rename(tmp_path / "stream-000005.json")
    with pytest.raises(
        StoreError, match="stream-000005.json: not the content for this file name; remove it"
    ):
        StreamPositions(tmp_path, UID).load()


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    StreamPositions(tmp_path, UID).save(STATES)
    path = tmp_path / "stream-000012.json"
    path.write_text(path.read_text().replace("60", "61"))
    with pytest.raises(StoreError, match=r"stream-000012.json: damaged.*remove it, and the stream"):
        StreamPositions(tmp_path, UID).load()


def test_in_a_finished_store_no_position_is_saved(tmp_path: Path) -> None:
    StreamPositions(tmp_path / "gone", UID).save(STATES)
    assert list(tmp_path.iterdir()) == []

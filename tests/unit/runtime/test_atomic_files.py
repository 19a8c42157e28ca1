"""Files and folders that are written aside, and a file that is flushed while it is written."""

from __future__ import annotations

import errno
import io
import os
import socket
from pathlib import Path

import pytest

from megatron_distill.runtime import atomic_files
from megatron_distill.runtime.atomic_files import (
    FlushedFile,
    partial_paths,
    replace_file,
    replace_files,
    whole_folder,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def full(_: int) -> None:
    """In place of a flush, on a disk without room."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content in (b"first", b"second and longer"):
        replace_file(path, content)
        assert path.read_bytes() == content
        assert names(tmp_path) == ["a.json"]


def test_a_file_keeps_who_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    replace_file(path, b"first")
    path.chmod(0o600)
    replace_file(path, b"second")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    replace_file(path, b"first")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"second")
    assert path.read_bytes() == b"first"
    assert names(tmp_path) == ["a.json"], "an unfinished file would keep the disk full"


def test_a_folder_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "a"
    with whole_folder(folder) as partial:
        (partial / "file").write_text("x")
        assert not folder.exists()
        assert partial.parent == folder.parent
    assert names(tmp_path / "new") == ["a"]
    assert (folder / "file").read_text() == "x"


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with whole_folder(tmp_path / "a") as partial:
            (partial / "file").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == []


@pytest.mark.parametrize(("replaces", "content"), [(False, "other"), (True, "ours")])
def test_a_folder_that_came_meanwhile_stays_unless_it_is_to_be_replaced(
    replaces: bool, content: str, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    with whole_folder(folder, replaces=replaces) as partial:
        (partial / "file").write_text("ours")
        folder.mkdir()
        (folder / "file").write_text("other")
    assert (folder / "file").read_text() == content
    assert names(tmp_path) == ["a"]


def test_a_folder_that_is_in_the_way_and_not_whole_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    (folder / "other").mkdir(parents=True)
    with (
        pytest.raises(OSError, match="not empty"),
        whole_folder(folder, is_whole=lambda path: (path / "file").is_file()) as partial,
    ):
        (partial / "file").write_text("ours")
    assert names(tmp_path) == ["a"]


def test_only_leftovers_of_a_dead_process_of_this_machine_are_removed(tmp_path: Path) -> None:
    host = socket.gethostname()
    dead, alive = f"a.partial-{host}-99999999", f"a.partial-{host}-{os.getppid()}"
    elsewhere, other = "a.partial-another.machine-99999999", f"b.partial-{host}-99999999"
    for name in (dead, alive, elsewhere, other):
        (tmp_path / name).mkdir()
    with whole_folder(tmp_path / "a"):
        pass
    assert names(tmp_path) == sorted(["a", alive, elsewhere, other])


def test_the_temporary_folder_may_lie_elsewhere(tmp_path: Path) -> None:
    working = tmp_path / "working"
    with whole_folder(tmp_path / "a", beside=working) as partial:
        assert partial.parent == working
    assert names(tmp_path) == ["a", "working"]
    assert names(working) == []


def test_content_written_in_many_parts_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_files, "_FLUSH_BYTES", 1000)
    flushes: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (flushes.append(fd), real(fd))[1])
    parts = [bytes([number % 251]) * (number * 37 % 701) for number in range(200)]
    with FlushedFile(tmp_path / "a") as raw, io.BufferedWriter(raw, 64) as buffered:
        for part in parts:
            buffered.write(part)
    assert (tmp_path / "a").read_bytes() == b"".join(parts)
    assert flushes
    assert raw.closed


def test_a_failed_flush_is_raised_at_the_next_write_or_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_files, "_FLUSH_BYTES", 10)
    monkeypatch.setattr(os, "fdatasync", full)
    file = FlushedFile(tmp_path / "a")
    file.write(b"x" * 20)
    with pytest.raises(OSError, match="No space left"):
        file.close()
    assert file.closed
    other = FlushedFile(tmp_path / "b")
    other.write(b"x" * 20)
    other._flush.join()  # type: ignore[union-attr]
    with pytest.raises(OSError, match="No space left"):
        other.write(b"x" * 20)
    other.close()


def test_a_set_of_files_lacks_its_last_one_until_all_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, data = tmp_path / "a.idx", tmp_path / "a.bin"
    index.write_text("old index")
    data.write_text("old data")
    with partial_paths((index, data)) as partial:
        for path, temporary in partial.items():
            temporary.write_text(f"new {path.suffix}")
        assert data.read_text() == "old data"
        replace_files(partial)
    assert (index.read_text(), data.read_text()) == ("new .idx", "new .bin")
    rename, done = Path.replace, []

    def once(path: Path, target: Path) -> Path:
        if done:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done.append(path)
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", once)
    with partial_paths((index, data)) as partial:
        for temporary in partial.values():
            temporary.write_text("newer")
        with pytest.raises(OSError, match="Input/output"):
            replace_files(partial)
    assert index.read_text() == "newer"
    assert [path.name for path in tmp_path.iterdir()] == ["a.idx"]

"""A file that is flushed while it is written."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest

from megatron_distill.runtime import atomic_files as flushed_file
from megatron_distill.runtime.atomic_files import FlushedFile


def test_content_written_in_many_parts_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushed_file, "_FLUSH_BYTES", 1000)
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
    monkeypatch.setattr(flushed_file, "_FLUSH_BYTES", 10)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

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

"""Prepared conversations on disk: written once, found again by content, mapped into memory."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_distill.data.chat.encode import INDEX_TYPE, PreparedBlock
from megatron_distill.errors import DataError
from megatron_distill.runtime.atomic_files import whole_folder, write_flushed

VERSION: Final = 2
REPORTED_PROBLEMS: Final = 10
_MANIFEST: Final = "manifest.json"
_FILES: Final[dict[str, np.dtype[Any]]] = {
    "tokens": np.dtype("<i4"),
    "flags": np.dtype("u1"),
    "index": INDEX_TYPE,
}
# Further files for a teacher with a tokenizer of its own.
_OF_TEACHER: Final[dict[str, np.dtype[Any]]] = {
    "chunks": np.dtype("<i4"),
    "teacher_tokens": np.dtype("<i4"),
    "teacher_chunks": np.dtype("<i4"),
    "teacher_stops": np.dtype("<i8"),
}
_BLOCK_COUNTS: Final = ("rows", "ce_labels", "unclosed", "dropped", "unseen", "teacher_unseen")
_COUNTS: Final = ("conversations", "tokens", "kd_labels", "bad_rows", *_BLOCK_COUNTS)
_HASHED_BYTES: Final = 1 << 22


@dataclass(frozen=True)
class CacheManifest:
    """Metadata of a cache. `content` is a digest of all files.

    unclosed, dropped, unseen, teacher_unseen: as in `PreparedBlock`. teacher_tokens: of a teacher
    with a tokenizer of its own; None without one. unaligned: conversations that it shares no chunk
    with, and the last one.
    """

    conversations: int
    tokens: int
    ce_labels: int
    kd_labels: int
    rows: int
    bad_rows: int
    unclosed: int
    dropped: int
    problems: tuple[str, ...]
    files: tuple[str, ...]
    content: str
    teacher_tokens: int | None = None
    unaligned: int = 0
    last_unaligned: str = ""
    unseen: int = 0
    teacher_unseen: int = 0

    @property
    def sizes(self) -> dict[str, tuple[np.dtype[Any], int]]:
        """Element type and number of elements of each file."""
        counts = {"tokens": self.tokens, "flags": self.tokens, "index": self.conversations}
        found = {name: (kind, counts[name]) for name, kind in _FILES.items()}
        if self.teacher_tokens is not None:
            counts = {
                "chunks": self.tokens,
                "teacher_tokens": self.teacher_tokens,
                "teacher_chunks": self.teacher_tokens,
                "teacher_stops": self.conversations,
            }
            found |= {name: (kind, counts[name]) for name, kind in _OF_TEACHER.items()}
        return found


@dataclass(frozen=True)
class TeacherArrays:
    """The teacher's side of all conversations, and the student's chunks, as in `TeacherColumns`."""

    chunks_n: NDArray[np.int32]
    tokens_m: NDArray[np.int32]
    chunks_m: NDArray[np.int32]
    stops: NDArray[np.int64]


class PreparedConversations:
    """Conversations of one source, mapped into memory.

    tokens_n int32 and flags_n uint8 of all conversations concatenated, `index` of INDEX_TYPE.
    teacher: None where the teacher has the same tokenizer.
    """

    def __init__(self, folder: Path, manifest: CacheManifest) -> None:
        self.folder = folder
        self.manifest = manifest
        arrays = {
            name: mapped_array(folder / name, kind, length)
            for name, (kind, length) in manifest.sizes.items()
        }
        self.tokens_n: NDArray[np.int32] = arrays["tokens"]
        self.flags_n: NDArray[np.uint8] = arrays["flags"]
        self.index: NDArray[np.void] = arrays["index"]
        self.teacher: TeacherArrays | None = None
        if manifest.teacher_tokens is not None:
            self.teacher = TeacherArrays(*(arrays[name] for name in _OF_TEACHER))

    def __len__(self) -> int:
        return self.manifest.conversations

    def bounds(self, number: int) -> tuple[int, int]:
        """Where a conversation's tokens begin and end."""
        start = int(self.index[number - 1]["stop"]) if number else 0
        return start, int(self.index[number]["stop"])

    def place(self, number: int) -> str:
        """File and row of a conversation."""
        entry = self.index[number]
        return f"{self.manifest.files[int(entry['file'])]}:{int(entry['row'])}"


def mapped_array(path: Path, kind: np.dtype[Any], length: int) -> NDArray[Any]:
    """A file's elements, which are read when they are used."""
    if length == 0:
        return np.zeros(0, kind)
    return np.memmap(path, dtype=kind, mode="r", shape=(length,))


def cache_key(files: Sequence[Path], settings: Any) -> str:
    """Digest of the files' content and of the settings that determine the prepared data.

    Raises DataError: a file cannot be read.
    """
    identity = json.dumps([VERSION, settings], sort_keys=True, default=str)
    digest = hashlib.sha256(identity.encode())
    for path in files:
        try:
            about = path.stat()
            digest.update(_content_digest(path, about.st_size, about.st_mtime_ns))
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()[:24]


@lru_cache(maxsize=1 << 12)
def _content_digest(path: Path, size: int, changed: int) -> bytes:  # noqa: ARG001
    """Digest of a file's content; cached, since training and held-out samples hash the same files.

    `size` and `changed` (mtime in ns) are part of the cache's key.
    """
    own = hashlib.blake2b(digest_size=32)
    with path.open("rb") as stream:
        while data := stream.read(_HASHED_BYTES):
            own.update(data)
    return own.digest()


def open_cache(folder: Path, files: Sequence[Path]) -> PreparedConversations | None:
    """The cache that an earlier start wrote; None if it is missing or incomplete."""
    try:
        stored = json.loads((folder / _MANIFEST).read_bytes())
        manifest = CacheManifest(**{**stored, "problems": tuple(stored["problems"]), "files": ()})
        sizes = {name: (folder / name).stat().st_size for name in manifest.sizes}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    wanted = manifest.sizes.items()
    if any(sizes[name] != length * kind.itemsize for name, (kind, length) in wanted):
        return None
    # Files may have been renamed since; the key depends on their content alone.
    named = CacheManifest(**{**asdict(manifest), "files": tuple(map(str, files))})
    return PreparedConversations(folder, named)


def write_cache(
    folder: Path,
    files: Sequence[Path],
    blocks: Iterable[tuple[str, PreparedBlock]],
    *,
    refuse: Callable[[str], None],
    has_teacher: bool = False,
) -> PreparedConversations:
    """Write prepared blocks, each with its file's name; the folder appears when it is complete.

    A complete folder, which another process has written meanwhile, is returned as it is.

    has_teacher: blocks have the columns of a teacher with a tokenizer of its own. `refuse` is
    called with every bad row and may raise. A failure leaves no folder. Raises DataError: the
    folder cannot be written.
    """
    earlier = open_cache(folder, files)
    if earlier is not None:
        for message in earlier.manifest.problems:
            refuse(message)
        return earlier
    try:
        if folder.exists():
            shutil.rmtree(folder)  # it is damaged
        with whole_folder(folder, is_whole=lambda path: (path / _MANIFEST).is_file()) as partial:
            manifest = _write(partial, files, blocks, refuse, has_teacher=has_teacher)
    except OSError as error:
        raise _unwritable(folder, error) from error
    found = open_cache(folder, files)
    if found is None or found.manifest.content != manifest.content:
        raise DataError(
            f"{folder}: another process wrote different content there; remove the folder"
        )
    return found


def _write(
    partial: Path,
    files: Sequence[Path],
    blocks: Iterable[tuple[str, PreparedBlock]],
    refuse: Callable[[str], None],
    *,
    has_teacher: bool,
) -> CacheManifest:
    digest = hashlib.blake2b(digest_size=16)
    problems: list[str] = []
    counts = dict.fromkeys(_COUNTS, 0)
    teacher_tokens = unaligned = 0
    last_unaligned = ""
    kinds = _FILES | _OF_TEACHER if has_teacher else _FILES
    streams: dict[str, IO[bytes]] = {}
    try:
        for name in kinds:
            streams[name] = (partial / name).open("wb")
        for path, block in blocks:
            for row, reason in block.problems:
                message = f"{path}:{row}: {reason}"
                refuse(message)
                counts["bad_rows"] += 1
                problems += [message] if len(problems) < REPORTED_PROBLEMS else []
            parts = _parts(block, counts["tokens"], teacher_tokens)
            for name, kind in kinds.items():
                data = np.ascontiguousarray(parts[name], kind).tobytes()
                digest.update(data)
                streams[name].write(data)
            counts["conversations"] += len(block.index)
            counts["tokens"] += len(block.tokens_n)
            counts["kd_labels"] += int(block.index["trained"].sum())
            for name in _BLOCK_COUNTS:
                counts[name] += getattr(block, name)
            if block.teacher is not None:
                teacher_tokens += len(block.teacher.tokens_m)
                unaligned += len(block.teacher.unaligned)
                for row, reason in block.teacher.unaligned[-1:]:
                    last_unaligned = f"{path}:{row}: {reason}"
        for stream in streams.values():
            stream.flush()
            os.fsync(stream.fileno())
    finally:
        for stream in streams.values():
            stream.close()
    manifest = CacheManifest(
        **counts,
        problems=tuple(problems),
        files=(),
        content=digest.hexdigest(),
        teacher_tokens=teacher_tokens if has_teacher else None,
        unaligned=unaligned,
        last_unaligned=last_unaligned,
    )
    write_flushed(partial / _MANIFEST, json.dumps(asdict(manifest), indent=1).encode())
    return CacheManifest(**{**asdict(manifest), "files": tuple(map(str, files))})


def _parts(block: PreparedBlock, tokens: int, teacher_tokens: int) -> dict[str, NDArray[Any]]:
    """A block's content of each file, behind this many tokens of both sides."""
    index = block.index.copy()
    index["stop"] += tokens
    found: dict[str, NDArray[Any]] = {
        "tokens": block.tokens_n,
        "flags": block.flags_n,
        "index": index,
    }
    if block.teacher is not None:
        found |= {
            "chunks": block.teacher.chunks_n,
            "teacher_tokens": block.teacher.tokens_m,
            "teacher_chunks": block.teacher.chunks_m,
            "teacher_stops": block.teacher.stops + teacher_tokens,
        }
    return found


def _unwritable(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"{folder}: cannot be written ({error.strerror}); free disk space, or set data.cache to "
        "a folder with space"
    )

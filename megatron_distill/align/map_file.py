"""A vocabulary map as a safetensors file, checked when read, and a cache of such files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from megatron_distill.align.build_map import (
    MappedTokenizer,
    build_vocabulary_map,
    check_two_tokenizers,
)
from megatron_distill.align.vocabulary_map import VocabularyMap, VocabularySide
from megatron_distill.errors import DataError
from megatron_distill.log import get_logger
from megatron_distill.runtime.atomic_files import name_flushed, partial_file, publish, write_errors

__all__ = [
    "VERSION",
    "cached_vocabulary_map",
    "check_map_tokenizer",
    "load_map",
    "map_bytes",
    "map_from_bytes",
    "save_map",
]

VERSION: Final = 1
_RULES: Final = 2  # counts changes of the maps that two tokenizers have, for the cache
_FORMAT: Final = "megatron-distill vocabulary map"
_ARRAYS: Final = (
    "student_ids_p",
    "teacher_ids_p",
    "row_offsets",
    "row_teacher_ids_n",
    "row_weights_n",
    "evidence_V",
    "pieces_V",
)
_ADVICE: Final = "build it again with `megatron-distill data vocabulary-map build`"
_LOGGER = get_logger(__name__)


def map_bytes(vocabulary_map: VocabularyMap) -> bytes:
    """Return the content of a map's file; equal maps have equal content."""
    about = {
        "student": asdict(vocabulary_map.student),
        "teacher": asdict(vocabulary_map.teacher),
        "special_pairs": vocabulary_map.special_pairs,
    }
    arrays = {name: np.ascontiguousarray(getattr(vocabulary_map, name)) for name in _ARRAYS}
    # One value only: safetensors writes several in an order of its own.
    header = json.dumps({"format": _FORMAT, "version": VERSION, **about})
    return save(arrays, {"vocabulary_map": header})


def map_from_bytes(content: bytes, *, place: str) -> VocabularyMap:
    """Read and check the content of a map's file; `place` names it in messages.

    Raises DataError: it is not a map, is damaged, or is of another version.
    """
    about = _header(content, place)
    if about.get("version") != VERSION:
        raise DataError(
            f"{place}: is of version {about.get('version')!r}, and this program reads version "
            f"{VERSION}; {_ADVICE}"
        )
    try:
        arrays = load(content)
        parts: dict[str, Any] = {name: arrays[name] for name in _ARRAYS}
        parts |= {side: VocabularySide(**about[side]) for side in ("student", "teacher")}
        pairs = tuple((student, teacher) for student, teacher in about["special_pairs"])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{place}: is damaged ({error}); {_ADVICE}") from error
    try:
        return VocabularyMap(**parts, special_pairs=pairs)
    except DataError as error:
        raise DataError(f"{place}: {error}; {_ADVICE}") from error


def _header(content: bytes, place: str) -> Mapping[str, Any]:
    """The metadata of a map's file, from the JSON object behind its length of eight bytes."""
    length = int.from_bytes(content[:8], "little")
    try:
        about = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["vocabulary_map"])
        is_map = about["format"] == _FORMAT
    except (ValueError, KeyError, TypeError):
        is_map = False
    if not is_map:
        raise DataError(f"{place}: not a vocabulary map, or damaged; {_ADVICE}")
    found: Mapping[str, Any] = about
    return found


def save_map(vocabulary_map: VocabularyMap, path: Path) -> None:
    """Write a map's file; it appears under its name only when complete.

    Raises StoreError if it cannot be written.
    """
    publish(path, map_bytes(vocabulary_map))


def load_map(path: Path) -> VocabularyMap:
    """Read and check a map's file. Raises DataError: it is missing, damaged or no map."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {_ADVICE}") from error
    return map_from_bytes(content, place=str(path))


def check_map_tokenizer(
    found: VocabularyMap,
    side: Literal["student", "teacher"],
    tokenizer: MappedTokenizer,
    *,
    place: str,
    key: str,
) -> None:
    """Raise DataError for a map of another tokenizer.

    place: the map's file. key: the setting or option that names the tokenizer.
    """
    wanted: VocabularySide = getattr(found, side)
    if wanted.identity != tokenizer.identity:
        raise DataError(
            f"{key} = {tokenizer.name} (identity {tokenizer.identity}): {place} is a map of the "
            f"{side} {wanted.name} (identity {wanted.identity}); {_ADVICE}"
        )


def cached_vocabulary_map(
    student: MappedTokenizer,
    teacher: MappedTokenizer,
    *,
    folder: Path,
    special_pairs: Sequence[tuple[str, str]] = (),
) -> VocabularyMap:
    """Return the vocabulary map of two tokenizers, from `folder` or built and stored there.

    Of several processes on one machine one builds it, and the next ones wait and read its file.
    Raises DataError: one tokenizer on both sides, no token of equal bytes, or a pair of ordinary
    tokens. Raises StoreError: the folder cannot be written.
    """
    check_two_tokenizers(student, teacher)
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"vocabulary-map-{_key(student, teacher, special_pairs)}.safetensors"
    found = _stored(path)
    if found is not None:
        _report(found, student, teacher, "read", path)
        return found
    with partial_file(path, waits=True) as (partial, descriptor):
        found = _stored(path)  # of the process that held the lock
        if found is None:
            found = build_vocabulary_map(student, teacher, special_pairs=special_pairs)
            partial.write_bytes(map_bytes(found))
            name_flushed(partial, descriptor, path)
            _report(found, student, teacher, "built", path)
    return found


def _report(
    found: VocabularyMap,
    student: MappedTokenizer,
    teacher: MappedTokenizer,
    verb: str,
    path: Path,
) -> None:
    """Log how many tokens both have: with few of them, terms on common tokens teach little."""
    _LOGGER.info(
        "vocabulary map of %s and %s: %s exact pairs of %s and %s tokens, %s ids with a row; %s %s",
        *(student.name, teacher.name, f"{found.exact_pairs:,}"),
        *(f"{found.student.size:,}", f"{found.teacher.size:,}"),
        *(f"{int(np.count_nonzero(np.diff(found.row_offsets))):,}", verb, path),
    )


def _key(
    student: MappedTokenizer, teacher: MappedTokenizer, special_pairs: Sequence[tuple[str, str]]
) -> str:
    settings = [VERSION, _RULES, student.identity, teacher.identity, list(special_pairs)]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]


def _stored(path: Path) -> VocabularyMap | None:
    """The map of an earlier start; None if there is none or it is damaged."""
    if not path.is_file():
        return None
    try:
        return load_map(path)
    except DataError as error:
        _LOGGER.warning("building the vocabulary map again: %s", error)
        return None

"""Which of several teachers teaches which sample: by source, by a field of its rows, or drawn."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_distill.data.chat.conversations import RowBlockReader, read_blocks, rows_of
from megatron_distill.data.formats import SourceSpec, source_files
from megatron_distill.data.text.documents import RowFilter
from megatron_distill.data.text.files import fingerprint
from megatron_distill.errors import DataError
from megatron_distill.log import get_logger

__all__ = ["RoutedPart", "Routing", "routed_parts", "teacher_of_sample"]

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class Routing:
    """The teachers' names, whose order numbers them, and how the rest of the samples is drawn.

    ``weights``: shares of the teachers, in the order of names, for samples of sources without a
    teacher of their own; None: every source has one. A sample's teacher is a function of ``seed``
    and the sample's number.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    seed: int = 0

    def drawn(self, sample_id: int) -> int:
        """The number of the teacher of a sample whose source has none."""
        assert self.weights is not None, "the rules ask for weights"
        data = struct.pack("<qq", self.seed, sample_id)
        word = hashlib.blake2b(data, digest_size=7).digest()
        place = int.from_bytes(word, "little") / 2.0**56 * sum(self.weights)
        for number, weight in enumerate(self.weights):
            place -= weight
            if place < 0:
                return number
        return max(number for number, weight in enumerate(self.weights) if weight)


@dataclass(frozen=True)
class RoutedPart:
    """A source, or its rows of one teacher; ``share`` of the source's samples.

    ``teacher``: number of the teacher, None where it is drawn for each sample.
    """

    spec: SourceSpec
    share: float = 1.0
    teacher: int | None = None


def routed_parts(spec: SourceSpec, routing: Routing | None) -> list[RoutedPart]:
    """Divide a source by the teachers of its rows; a source without `teacher_field` is one part.

    With `teacher_field` the file is read once, to find the share of each teacher by characters.
    Rows of different teachers are packed apart, so that a sample has one teacher. Raises DataError:
    a row whose field is missing or names no teacher.
    """
    if routing is None:
        return [RoutedPart(spec)]
    if spec.teacher_field is None:
        number = None if spec.teacher is None else routing.names.index(spec.teacher)
        return [RoutedPart(spec, teacher=number)]
    shares = _shares_of(spec, spec.teacher_field, routing.names)
    return [
        RoutedPart(
            replace(spec, rows=RowFilter(spec.teacher_field, name)),
            shares[name],
            routing.names.index(name),
        )
        for name in routing.names
        if shares.get(name)
    ]


def teacher_of_sample(
    parts: Sequence[RoutedPart], routing: Routing | None
) -> Callable[[int, int], int] | None:
    """A function from a part's index and a sample's number to the teacher's number."""
    if routing is None:
        return None

    def number(part: int, sample_id: int) -> int:
        own = parts[part].teacher
        return routing.drawn(sample_id) if own is None else own

    return number


def _shares_of(spec: SourceSpec, field: str, names: tuple[str, ...]) -> Mapping[str, float]:
    """The share of each teacher in a source's characters, read once per process."""
    assert spec.kind.rows is not None, "the rules refuse a field of formats without rows"
    columns: tuple[str, ...] = (spec.text_key,)
    if spec.conversation is not None:
        required, optional = spec.conversation.columns
        columns = (*required, *optional)
    files = tuple(source_files(spec))
    return _counted(spec.name, files, fingerprint(files), spec.kind.rows, columns, field, names)


@lru_cache(maxsize=64)
def _counted(
    source: str,
    files: tuple[Path, ...],
    identity: str,  # noqa: ARG001 - the files' names and sizes, part of the key
    read: RowBlockReader,
    columns: tuple[str, ...],
    field: str,
    names: tuple[str, ...],
) -> Mapping[str, float]:
    characters = dict.fromkeys(names, 0)
    for block in read_blocks(files, read=read, required=(), optional=(*columns, field)):
        for number, row in rows_of(block):
            if isinstance(row, str):
                continue  # its reader refuses or skips it
            name = _name_in(row, field, names, source, f"{block.path}:{number}")
            characters[name] += sum(len(str(row[key])) for key in columns if row.get(key))
    total = sum(characters.values())
    shares = {name: count / total for name, count in characters.items()} if total else {}
    words = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    _LOG.info("data source %s: teachers by %r: %s", source, field, words or "no rows")
    if not shares:
        raise DataError(f"data source {source}: no row has a text; correct data.sources.paths")
    return shares


def _name_in(
    row: Mapping[str, Any], field: str, names: tuple[str, ...], source: str, place: str
) -> str:
    value = row.get(field)
    if isinstance(value, str) and value in names:
        return value
    found = f"has no {field!r}" if value is None else f"has {field} = {value!r}"
    raise DataError(
        f"data source {source}: row {place} {found}, and the teachers are {', '.join(names)}. "
        f"Correct the row, add a teacher of that name, or change teacher_field of the source"
    )

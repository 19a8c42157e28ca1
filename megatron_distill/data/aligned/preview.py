"""Preview of aligned samples: a row per chunk with the tokens of both sides, and its coverage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from megatron_distill.align import Coverage
from megatron_distill.data.preview import MARKS, PROMPT, STYLES
from megatron_distill.data.samples import NO_CHUNK, PADDING_DOCUMENT, Sample, TeacherTokens
from megatron_distill.data.tokenizers.protocol import Tokenizer

__all__ = ["PrintableTokens", "chunk_table", "coverage_lines"]

_SPACE: Final = "\u2423"
_TEACHER_ONLY: Final = "teacher"
_SIZES_WIDTH: Final = 6  # of the column of numbers of tokens
_GAP: Final = 2  # columns of the terminal between two of the table, at most


@dataclass(frozen=True)
class PrintableTokens:
    """The tokens of a tokenizer as printable text."""

    tokenizer: Tokenizer

    @cached_property
    def _bytes(self) -> list[bytes | None]:
        return self.tokenizer.token_bytes()

    def shown(self, ids: Sequence[int]) -> str:
        """Each token by itself, separated by spaces; a space in a token is written as U+2423."""
        return " ".join(self.joined([number]) for number in ids)

    def joined(self, ids: Sequence[int]) -> str:
        """Tokens one after another; bytes of no whole character are written as escapes."""
        runs = groupby(ids, key=lambda number: self._bytes[number] is None)
        parts = (self._run(list(run), is_special=is_special) for is_special, run in runs)
        return "".join(parts)

    def _run(self, ids: Sequence[int], *, is_special: bool) -> str:
        if is_special:
            return "".join(self.tokenizer.decode([number]) for number in ids)
        data = b"".join(self._bytes[number] or b"" for number in ids)
        text = data.decode(errors="backslashreplace").replace(" ", _SPACE)
        return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


@dataclass(frozen=True)
class _PreviewRow:
    """Student tokens [start, stop) and teacher tokens [teacher_start, teacher_stop)."""

    kind: str
    document: int
    student: tuple[int, int]
    teacher: tuple[int, int]
    is_chunk: bool


def chunk_table(
    sample: Sample,
    student: PrintableTokens,
    teacher: PrintableTokens,
    kinds_S1: Sequence[str],
    *,
    rows: int,
    width: int,
    has_colour: bool,
) -> Table:
    """A table of the first `rows` groups of tokens: their text, the student's and the teacher's.

    A group is a chunk, which shows its numbers of tokens, or a run of tokens outside of chunks.
    width: columns of the terminal.
    """
    of_teacher = _teacher_of(sample)
    table = Table(box=None, pad_edge=False, header_style="bold")
    most = max(1, (width - _SIZES_WIDTH) // 3 - _GAP)  # otherwise long texts leave no other column
    table.add_column("tokens", justify="right", no_wrap=True)
    for name in ("text", "student", "teacher"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=most)
    groups = _rows(sample, of_teacher, kinds_S1)
    document = PADDING_DOCUMENT
    for row in islice(groups, rows):
        if row.document != document:
            document = row.document
            table.add_row("", f"-- document {document} --", style="bold")
        own = sample.tokens_S1[slice(*row.student)].tolist()
        others = of_teacher.tokens_U1[slice(*row.teacher)].tolist()
        before, after = ("", "") if has_colour else MARKS.get(row.kind, ("", ""))
        text = student.joined(own) if own else teacher.joined(others)
        table.add_row(
            f"{len(own)}:{len(others)}" if row.is_chunk else "-",
            escape(f"{before}{text}{after}"),
            escape(student.shown(own)),
            escape(teacher.shown(others)),
            style=STYLES.get(row.kind, STYLES[PROMPT]),
        )
    remaining = sum(row.is_chunk for row in groups)
    if remaining:
        table.add_row("...", f"{remaining:,} more chunks", style="dim")
    return table


def _teacher_of(sample: Sample) -> TeacherTokens:
    assert sample.teacher is not None, "an aligned sample has the teacher's tokens"
    return sample.teacher


def _rows(sample: Sample, teacher: TeacherTokens, kinds_S1: Sequence[str]) -> Iterator[_PreviewRow]:
    """Chunks and what is between them, in the order of the text; no padding."""
    own = _groups(sample.document_ids_S1, _without_holes(teacher.student_chunks_S1), kinds_S1)
    kinds_U1 = [_TEACHER_ONLY] * len(teacher.tokens_U1)
    others = _groups(teacher.document_ids_U1, _without_holes(teacher.chunks_U1), kinds_U1)
    place = 0
    for document, chunk, kind, span in own:
        while place < len(others) and others[place][0] < document:
            yield _of_teacher(others[place], span[0])
            place += 1
        if chunk == NO_CHUNK:
            yield _PreviewRow(kind, document, span, (0, 0), is_chunk=False)
            continue
        while others[place][1] != chunk:
            yield _of_teacher(others[place], span[0])
            place += 1
        yield _PreviewRow(kind, document, span, others[place][3], is_chunk=True)
        place += 1
    for one in others[place:]:
        yield _of_teacher(one, 0)


_Group = tuple[int, int, str, tuple[int, int]]  # document, chunk, kind, tokens


def _of_teacher(group: _Group, place: int) -> _PreviewRow:
    return _PreviewRow(_TEACHER_ONLY, group[0], (place, place), group[3], is_chunk=False)


def _groups(
    documents_n: NDArray[np.int32], chunks_n: NDArray[np.int32], kinds_n: Sequence[str]
) -> list[_Group]:
    """Runs of tokens of one document and chunk; outside of chunks of one kind as well."""
    documents, chunks = documents_n.tolist(), chunks_n.tolist()

    def key(place: int) -> tuple[int, int, str]:
        kind = kinds_n[place] if chunks[place] == NO_CHUNK else ""
        return documents[place], chunks[place], kind

    found: list[_Group] = []
    for (document, chunk, _), places in groupby(range(len(documents)), key=key):
        if document != PADDING_DOCUMENT:
            inside = list(places)
            found.append((document, chunk, kinds_n[inside[0]], (inside[0], inside[-1] + 1)))
    return found


def _without_holes(chunks_n: NDArray[np.int32]) -> NDArray[np.int32]:
    """The chunks with the tokens in none that stand among the tokens of one, as an added space."""
    before_n = np.maximum.accumulate(chunks_n)
    last = np.iinfo(chunks_n.dtype).max
    after_n = np.minimum.accumulate(np.where(chunks_n == NO_CHUNK, last, chunks_n)[::-1])[::-1]
    return np.where(before_n == after_n, before_n, chunks_n)


def coverage_lines(found: Coverage) -> Iterable[str]:
    """The coverage as lines of text."""
    for name, side in (("student", found.student), ("teacher", found.teacher)):
        parts = [
            f"{_share(side.aligned_bytes, side.bytes)} of {side.bytes:,} bytes",
            f"{_share(side.aligned_tokens, side.tokens)} of {side.tokens:,} tokens",
        ]
        if name == "student":
            parts.append(f"{_share(side.aligned_labels, side.labels)} of {side.labels:,} labels")
        if side.unknown:
            parts.append(f"none of {side.unknown:,} unknown tokens")
        yield f"in chunks, {name}: {', '.join(parts)}"
    sizes = {
        "1:1": found.one_to_one,
        "1:n": found.one_to_many,
        "n:1": found.many_to_one,
        "n:m": found.many_to_many,
    }
    shares = ", ".join(f"{name} {_share(count, found.chunks)}" for name, count in sizes.items())
    yield (
        f"chunks {found.chunks:,}: {shares} (student:teacher); the largest has "
        f"{found.largest_student} tokens of the student, {found.largest_teacher} of the teacher"
    )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.1f}%"

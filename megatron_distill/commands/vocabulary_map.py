"""Build a map between the vocabularies of two tokenizers, inspect it or verify it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from megatron_distill.commands.command import Command
from megatron_distill.errors import DataError, counted
from megatron_distill.launching.option_numbers import whole_number

if TYPE_CHECKING:
    from megatron_distill.align.vocabulary_map import VocabularyMap
    from megatron_distill.data.tokenizers.open import Tokenizer

SHOWN_ROWS: Final = 10
ModelSide = Literal["student", "teacher"]
SIDES: Final[tuple[ModelSide, ...]] = ("student", "teacher")
Bytes = Sequence[bytes | None]
TableRow = tuple[str, ...]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    build = actions.add_parser("build", help="make the map of two tokenizers and print coverage")
    _add_tokenizers(build, required=True)
    build.add_argument("--output", type=Path, required=True, metavar="FILE")
    build.add_argument("--overwrite", action="store_true", help="replace an existing file")
    build.add_argument(
        "--pair",
        action="append",
        default=[],
        nargs=2,
        metavar=("STUDENT", "TEACHER"),
        help="special tokens that are one as well, beyond the roles",
    )
    _add_texts(build)
    build.set_defaults(action=_build, tokens=[], ids=[])
    inspect = actions.add_parser("inspect", help="print coverage, and rows of given tokens")
    inspect.add_argument("map", type=Path, metavar="FILE")
    inspect.add_argument("tokens", nargs="*", metavar="TOKEN", help="text of a student token")
    inspect.add_argument("--ids", nargs="+", type=whole_number("17"), default=[], metavar="ID")
    _add_tokenizers(inspect, required=False)
    _add_texts(inspect)
    inspect.set_defaults(action=_inspect)
    verify = actions.add_parser("verify", help="check a file, and that it is these tokenizers' map")
    verify.add_argument("map", type=Path, metavar="FILE")
    _add_tokenizers(verify, required=True)
    verify.set_defaults(action=_verify, text=[], tokens=[])


def _add_tokenizers(parser: argparse.ArgumentParser, *, required: bool) -> None:
    kinds = "Hugging Face folder, .model or .tiktoken file, or a tiktoken encoding"
    parser.add_argument("--student", required=required, metavar="PATH", help=kinds)
    parser.add_argument("--teacher", required=required, metavar="PATH", help=kinds)


def _add_texts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text",
        nargs="+",
        default=[],
        metavar="FILE",
        help="UTF-8 files or quoted glob patterns, whose tokens are counted",
    )


def _check(given: argparse.Namespace) -> str | None:
    if given.text and (given.student is None or given.teacher is None):
        return "--text needs --student and --teacher, which encode it"
    if given.tokens and given.student is None:
        return "a TOKEN needs --student, which has its id; or use --ids"
    return None


def _run(arguments: argparse.Namespace) -> int:
    status: int = arguments.action(arguments)
    return status


def _build(arguments: argparse.Namespace) -> int:
    from megatron_distill.align import build_vocabulary_map, save_map

    output: Path = arguments.output
    if output.exists() and not arguments.overwrite:
        raise DataError(f"--output {output}: exists; add --overwrite to replace it")
    if not output.parent.is_dir():
        raise DataError(f"--output {output}: there is no folder {output.parent}; make it first")
    texts = _texts(arguments.text)
    student = _open(arguments.student, "--student")
    teacher = _open(arguments.teacher, "--teacher")
    pairs = [(student_token, teacher_token) for student_token, teacher_token in arguments.pair]
    found = build_vocabulary_map(student, teacher, special_pairs=pairs)
    save_map(found, output)
    with suppress(BrokenPipeError):  # the pager was closed
        _print_coverage(found, output)
        _print_text_coverage(found, student, teacher, texts)
        _print_special(found, student, teacher)
        _print_largest(found, _tokens_of(student), _tokens_of(teacher))
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from megatron_distill.align import load_map
    from megatron_distill.align.map_file import check_map_tokenizer

    texts = _texts(arguments.text)
    found = load_map(arguments.map)
    opened: dict[str, Tokenizer] = {}
    for side in SIDES:
        path = getattr(arguments, side)
        if path is not None:
            opened[side] = _open(path, f"--{side}")
            check_map_tokenizer(
                found, side, opened[side], place=str(arguments.map), key=f"--{side}"
            )
    student, teacher = (_tokens_of(opened[side]) if side in opened else None for side in SIDES)
    if arguments.tokens or arguments.ids:
        ids = [*arguments.ids, *_ids_of(arguments.tokens, student, found)]
        _print_table([_row_of(found, number, student, teacher) for number in ids])
        return 0
    with suppress(BrokenPipeError):  # the pager was closed
        _print_coverage(found, arguments.map)
        if len(opened) == 2:
            _print_text_coverage(found, opened["student"], opened["teacher"], texts)
            _print_special(found, opened["student"], opened["teacher"])
        _print_largest(found, student, teacher)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from megatron_distill.align import build_vocabulary_map, load_map
    from megatron_distill.align.coverage import differing_rows
    from megatron_distill.align.map_file import check_map_tokenizer

    found = load_map(arguments.map)
    student = _open(arguments.student, "--student")
    teacher = _open(arguments.teacher, "--teacher")
    for side, tokenizer in zip(SIDES, (student, teacher), strict=True):
        check_map_tokenizer(found, side, tokenizer, place=str(arguments.map), key=f"--{side}")
    wanted = build_vocabulary_map(student, teacher, special_pairs=found.special_pairs)
    rows = differing_rows(found, wanted)
    if len(rows):
        sys.stdout.write(
            f"{arguments.map}: {counted(len(rows), 'row')} of these tokenizers differ\n"
        )
        student_bytes, teacher_bytes = _tokens_of(student), _tokens_of(teacher)
        _print_table(
            (name, *_row_of(one, int(number), student_bytes, teacher_bytes))
            for number in rows[:SHOWN_ROWS]
            for name, one in (("file", found), ("tokenizers", wanted))
        )
        return 1
    sys.stdout.write(
        f"{arguments.map}: the map of {student.name} and {teacher.name}, "
        f"{counted(found.exact_pairs, 'exact pair')}, {counted(len(found.holes), 'hole')}\n"
    )
    return 0


def _open(path: str, option: str) -> Tokenizer:
    from megatron_distill.data.tokenizers.open import load_tokenizer, open_named_encoding
    from megatron_distill.data.tokenizers.tiktoken_encodings import NAMED_ENCODINGS

    if path in NAMED_ENCODINGS and not Path(path).exists():
        return open_named_encoding(path)
    return load_tokenizer(path, named=option)


def _texts(patterns: Sequence[str]) -> list[str]:
    from megatron_distill.data.text.files import expand_paths

    texts = []
    for path in expand_paths(patterns) if patterns else ():
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"--text {path}: is not UTF-8 ({error}); give a text file") from error
    return texts


def _tokens_of(tokenizer: Tokenizer) -> Bytes:
    """The bytes of every id, also of special tokens, which are spelled out."""
    found = list(tokenizer.token_bytes())
    for text, number in tokenizer.special_ids.items():
        found[number] = text.encode()
    return found


def _ids_of(tokens: Sequence[str], student: Bytes | None, found: VocabularyMap) -> Iterator[int]:
    for text in tokens:
        assert student is not None, "the arguments are checked"
        ids = [number for number, token in enumerate(student) if token == text.encode()]
        if not ids:
            raise DataError(
                f"TOKEN {text!r}: no single token of {found.student.name} has this text"
            )
        yield from ids


def _print_coverage(found: VocabularyMap, path: Path) -> None:
    from megatron_distill.align.vocabulary_map import Evidence

    counts = found.counts()
    pairs, special = found.exact_pairs, counts[Evidence.ROLE]
    sides = (found.student, found.teacher)
    with_row = int((found.pieces_V > 0).sum())
    reached = found.teacher.size - len(found.unreached_teacher_ids)
    relaxed = len(found.common("relaxed")[0])
    _print_table(
        [
            (str(path), "student", "teacher"),
            ("tokenizer", *(side.name for side in sides)),
            ("identity", *(side.identity for side in sides)),
            ("vocabulary", *(f"{side.size:,}" for side in sides)),
            ("exact pairs", *(_share(pairs, side.size) for side in sides)),
            ("pairs of special tokens", f"{special:,}", f"{special:,}"),
            ("common, relaxed", *(_share(relaxed, side.size) for side in sides)),
            ("in projection rows", _share(with_row, found.student.size),
             _share(reached, found.teacher.size)),
            ("  by the pair's bytes", f"{counts[Evidence.SHARED]:,}", ""),
            ("  by encoding", f"{counts[Evidence.ENCODED]:,}", ""),
            ("  by fewest tokens", f"{counts[Evidence.SPELLED]:,}", ""),
            ("holes", f"{counts[Evidence.HOLE]:,}", ""),
            ("special tokens alone", f"{counts[Evidence.SPECIAL]:,}", ""),
            ("ids without a token", f"{counts[Evidence.NO_TOKEN]:,}", ""),
            ("collisions of bytes", *(f"{side.collisions:,}" for side in sides)),
        ]
    )  # fmt: skip


def _print_text_coverage(
    found: VocabularyMap, student: Tokenizer, teacher: Tokenizer, texts: Sequence[str]
) -> None:
    from megatron_distill.align.coverage import text_coverage

    if not texts:
        return
    of_text = text_coverage(found, student, teacher, texts)
    student_tokens, teacher_tokens = of_text.student_tokens, of_text.teacher_tokens
    paired = (
        _share(of_text.student_paired, student_tokens),
        _share(of_text.teacher_paired, teacher_tokens),
    )
    in_rows = (
        _share(of_text.student_in_rows, student_tokens),
        _share(of_text.teacher_in_rows, teacher_tokens),
    )
    _print_table(
        [
            (f"tokens of {of_text.bytes:,} bytes", f"{student_tokens:,}", f"{teacher_tokens:,}"),
            ("  in exact pairs", *paired),
            ("  in projection rows", *in_rows),
        ]
    )


def _print_special(found: VocabularyMap, student: Tokenizer, teacher: Tokenizer) -> None:
    """Print the pairs of special tokens, then the first ones of both sides without a partner."""
    names, of_teacher = (
        {number: repr(text) for text, number in side.special_ids.items()}
        for side in (student, teacher)
    )
    pairs = zip(found.student_ids_p.tolist(), found.teacher_ids_p.tolist(), strict=True)
    rows: list[TableRow] = [("special tokens", "student", "teacher")]
    for number, partner in pairs:
        if number in names and partner in of_teacher:
            rows.append(("  paired", names.pop(number), of_teacher.pop(partner)))
    alone = zip_longest(*(sorted(side.values()) for side in (names, of_teacher)), fillvalue="")
    rows += [("  alone", *texts) for texts in islice(alone, SHOWN_ROWS)]
    _print_table(rows)
    hidden = max(len(names), len(of_teacher)) - SHOWN_ROWS
    if hidden > 0:
        sys.stdout.write(f"  and {counted(hidden, 'further row')}\n")


def _print_largest(found: VocabularyMap, student: Bytes | None, teacher: Bytes | None) -> None:
    largest = [
        int(number)
        for number in (-found.pieces_V).argsort(kind="stable")[:SHOWN_ROWS]
        if found.pieces_V[number] > 1
    ]
    if largest:
        sys.stdout.write("largest rows\n")
        _print_table([_row_of(found, number, student, teacher) for number in largest])


def _row_of(
    found: VocabularyMap, number: int, student: Bytes | None, teacher: Bytes | None
) -> TableRow:
    """Cells of one projection row: id, bytes, evidence, pieces, teacher tokens with weights."""
    from megatron_distill.align.vocabulary_map import Evidence

    if not 0 <= number < found.student.size:
        raise DataError(
            f"--ids {number}: is outside of the student's vocabulary of {found.student.size:,}"
        )
    ids, weights = found.row(number)
    entries = ", ".join(
        f"{one}{_spelled(teacher, int(one))} {weight:.4f}"
        for one, weight in zip(ids, weights, strict=True)
    )
    evidence = Evidence(found.evidence_V[number]).name.lower().replace("_", " ")
    pieces = counted(int(found.pieces_V[number]), "piece")
    return f"{number}{_spelled(student, number)}", evidence, pieces, entries


def _spelled(tokens: Bytes | None, number: int) -> str:
    token = None if tokens is None else tokens[number]
    return "" if token is None else f" {token!r}"


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else f"{part:,}"


def _print_table(rows: Sequence[TableRow] | Iterator[TableRow]) -> None:
    rows = list(rows)
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(f"{line.rstrip()}\n")


COMMAND = Command(
    description="""Build a map between the vocabularies of two tokenizers, inspect it or verify it.

    megatron-distill data vocabulary-map build --student models/llama --teacher models/qwen \\
        --output maps/llama_qwen.safetensors --text 'data/*.txt'
    megatron-distill data vocabulary-map inspect maps/llama_qwen.safetensors --ids 201 1042
    megatron-distill data vocabulary-map inspect maps/llama_qwen.safetensors " the" \\
        --student models/llama --teacher models/qwen
    megatron-distill data vocabulary-map verify maps/llama_qwen.safetensors \\
        --student models/llama --teacher models/qwen

A training run builds its map by itself. `verify` ends with status 1 where the file is not the map
of these tokenizers.""",
    add_arguments=_add_arguments,
    check=_check,
    run=_run,
    has_actions=True,
)

"""The preview of aligned samples: a row per chunk with equal text on both sides, true figures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from megatron_distill.align import Coverage
from megatron_distill.data.aligned.coverage import StepCoverage, TokenBytes, sample_coverage
from megatron_distill.data.aligned.preview import PrintableTokens, chunk_table, coverage_lines
from megatron_distill.data.preview import BOTH, CE_ONLY, token_kinds
from megatron_distill.data.samples import NO_CHUNK, Sample
from megatron_distill.data.sources import DataOptions, TeacherReading, open_training
from megatron_distill.data.tokenizers.open import Tokenizer
from tests.support.data_fixtures import jsonl_source, write_jsonl
from tests.support.sample_configs import ARCHITECTURE
from tests.support.tokenizer_kinds import tokenizer_of
from tests.unit.data.test_preview import call_tool

TEXTS = ["plain words: plain [b]words[/b]\n", "naïve 中文 x", "def f(x):\n\treturn x ** 2\n" * 3]


def samples(folder: Path, count: int) -> tuple[list[Sample], Tokenizer, Tokenizer]:
    student, teacher = tokenizer_of("hf_bytes"), tokenizer_of("sp_bpe")
    reading = TeacherReading(teacher, 60, max_unaligned=0.01, workers=0)
    source = open_training(
        [jsonl_source(folder / "rows.jsonl", TEXTS)],
        tokenizer=student,
        options=DataOptions(70, shuffle_buffer=1, shuffle_samples=1, teacher=reading),
        seed=3,
    )
    return [source.next_sample() for _ in range(count)], student, teacher


def cells(table: Table) -> list[tuple[str, ...]]:
    return list(zip(*(column.cells for column in table.columns), strict=True))


def test_each_row_is_a_chunk_of_equal_text_and_no_token_is_missing(tmp_path: Path) -> None:
    (sample,), student, teacher = samples(tmp_path, 1)
    sides = (PrintableTokens(student), PrintableTokens(teacher))
    kinds = token_kinds(sample, isolate_documents=True)
    table = chunk_table(sample, *sides, kinds, rows=1000, width=100, has_colour=True)
    rows = cells(table)
    chunks = [row for row in rows if re.fullmatch(r"\d+:\d+", row[0])]
    assert len(chunks) == sample.teacher.chunks > 20
    for _, text, own, others in chunks:
        if text in student.special_ids:
            assert own == text
            assert others in teacher.special_ids
        elif "\\x" not in own + others:
            assert own.replace(" ", "") == others.replace(" ", "") == text
    # Every token is in a row: as many pieces as the tokens that are no padding.
    counted = [sum(len(row[side].split()) for row in rows) for side in (2, 3)]
    real = [
        int((one >= 0).sum()) for one in (sample.document_ids_S1, sample.teacher.document_ids_U1)
    ]
    assert counted == real
    assert [row[1] for row in rows if row[1].startswith("--")][0] == "-- document 0 --"
    few = chunk_table(sample, *sides, kinds, rows=3, width=60, has_colour=False)
    console = Console(width=60, record=True)
    console.print(few)
    shown = console.export_text()
    assert re.search(r"\.\.\. +\d+ more chunks", shown)
    assert max(map(len, shown.splitlines())) <= 60


@pytest.mark.parametrize("side", ["student_chunks_S1", "chunks_U1"])
def test_a_token_in_no_chunk_among_those_of_one_is_in_its_row(tmp_path: Path, side: str) -> None:
    (sample,), student, teacher = samples(tmp_path, 1)
    # Chunks 2 to 4 become one, of three or more tokens on both sides.
    large = {
        name: np.where(chunks > 2, np.maximum(chunks - 2, 2), chunks)
        for name, chunks in vars(sample.teacher).items()
        if name in ("student_chunks_S1", "chunks_U1")
    }
    whole = replace(sample, teacher=replace(sample.teacher, **large))
    holed = large[side].copy()
    holed[np.flatnonzero(holed == 2)[1]] = NO_CHUNK
    kinds = token_kinds(sample, isolate_documents=True)
    holed_sample = replace(sample, teacher=replace(sample.teacher, **{**large, side: holed}))
    sides = PrintableTokens(student), PrintableTokens(teacher)
    tables = [
        chunk_table(one, *sides, kinds, rows=1000, width=100, has_colour=False)
        for one in (whole, holed_sample)
    ]
    assert cells(tables[1]) == cells(tables[0])
    assert len(cells(tables[0])) > 20


def test_coverage_counts_the_tokens_of_the_samples(tmp_path: Path) -> None:
    found, student, teacher = samples(tmp_path, 4)
    sides = (TokenBytes(student), TokenBytes(teacher))
    total = Coverage()
    expected = dict.fromkeys(("1:1", "1:n", "n:1", "n:m"), 0)
    for sample in found:
        of_sample = sample_coverage(sample, *sides)
        kinds = token_kinds(sample, isolate_documents=True)
        assert of_sample.student.labels == sum(kind in (BOTH, CE_ONLY) for kind in kinds)
        total = total.merge(of_sample)
        for chunk in range(sample.teacher.chunks):
            own = int((sample.teacher.student_chunks_S1 == chunk).sum())
            others = int((sample.teacher.chunks_U1 == chunk).sum())
            expected[
                f"{'n' if own > 1 else 1}:{'1' if others == 1 else 'n' if own == 1 else 'm'}"
            ] += 1
    sizes = (total.one_to_one, total.one_to_many, total.many_to_one, total.many_to_many)
    assert sizes == tuple(expected.values())
    assert sum(sizes) == total.chunks
    assert min(sizes[:3]) > 0
    # All bytes but those of the first chunk of each document, and those before a cut.
    assert 0.85 < total.student.aligned_bytes / total.student.bytes < 1
    assert total.student.aligned_bytes == total.teacher.aligned_bytes
    # The log of a step has the shares of its samples together.
    figures = StepCoverage(*sides)(found)
    assert figures["student_bytes"] == total.student.aligned_bytes / total.student.bytes
    assert figures["teacher_tokens"] == total.teacher.aligned_tokens / total.teacher.tokens
    assert figures["one_to_many"] == total.one_to_many / total.chunks
    assert figures["largest_teacher"] == total.largest_teacher > 1
    assert figures["student_unknown"] == 0
    text = "\n".join(coverage_lines(total))
    assert f"chunks {total.chunks:,}: 1:1 {100 * sizes[0] / total.chunks:.1f}%" in text


@pytest.mark.slow
def test_the_tool_shows_both_tokenizations(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", TEXTS)
    for role, kind in (("student", "hf_bytes"), ("teacher", "sp_bpe")):
        tokenizer_of(kind).save(tmp_path / role)
    config = {
        "student": {"architecture": ARCHITECTURE},
        "teacher": {
            "architecture": ARCHITECTURE,
            "tokenizer": {"path": str(tmp_path / "teacher")},
            "sequence_length": 60,
        },
        "objective": {"terms": [{"alignment": "likelihood"}]},
        "data": {
            "sources": [{"format": "jsonl", "paths": str(rows)}],
            "tokenizer": {"path": str(tmp_path / "student")},
            "sequence_length": 70,
        },
        "train": {"steps": 3, "global_batch_size": 4},
    }
    found = call_tool(tmp_path, config, "--counted", "5", "--chunks", "12")
    assert found.returncode == 0, found.stderr
    assert re.search(r"tokens +text +student +teacher", found.stdout)
    assert re.search(r"\n +\d+:\d+ ", found.stdout)
    assert "more chunks" in found.stdout
    assert "sample 2" not in found.stdout
    assert re.search(r"in chunks, teacher: \d+\.\d% of [\d,]+ bytes", found.stdout)

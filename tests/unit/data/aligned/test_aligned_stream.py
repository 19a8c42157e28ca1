"""Aligned samples of real tokenizers: chunks of equal text, resume anywhere, workers, refusals."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest

from megatron_distill.data.aligned import cache as document_cache
from megatron_distill.data.aligned.documents import PairEncoder
from megatron_distill.data.aligned.rows import ChunkPlanner
from megatron_distill.data.chat.source import ConversationOptions
from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.loader import StepLoader
from megatron_distill.data.samples import NO_CHUNK, Sample
from megatron_distill.data.sources import (
    DataOptions,
    TeacherReading,
    held_out_samples,
    open_training,
)
from megatron_distill.data.tokenizers.open import END_OF_TEXT, Tokenizer
from megatron_distill.data.tokenizers.tiktoken_bpe import TiktokenRules, TiktokenTokenizer
from megatron_distill.errors import DataError
from tests.support.data_fixtures import jsonl_source
from tests.support.tokenizer_kinds import byte_level, ranks_of, tokenizer_of, training_texts

KINDS = ("hf_bytes", "sp_bpe")
TEXTS = [text[:700] for text in training_texts()[:12]] + ["naïve 中文 \N{GRINNING FACE}", "x" * 9]


@pytest.fixture(scope="module")
def tokenizers() -> tuple[Tokenizer, Tokenizer]:
    return tokenizer_of(KINDS[0]), tokenizer_of(KINDS[1])


@pytest.fixture
def spec(tmp_path: Path) -> SourceSpec:
    return jsonl_source(tmp_path / "rows.jsonl", TEXTS)


def options(teacher: Tokenizer, *, workers: int = 0, **changes: object) -> DataOptions:
    reading = TeacherReading(teacher, 40, max_unaligned=0.01, workers=workers)
    given = {"sequence_length": 48, "shuffle_buffer": 5, "shuffle_samples": 2, "teacher": reading}
    return DataOptions(**{**given, **changes})  # type: ignore[arg-type]


def same(left: Sample, right: Sample) -> bool:
    pairs = [(vars(left.teacher)[name], vars(right.teacher)[name]) for name in vars(left.teacher)]
    pairs += [(left.tokens_S1, right.tokens_S1), (left.flags_S1, right.flags_S1)]
    return all(np.array_equal(one, other) for one, other in pairs)


def test_chunks_are_the_same_text_in_both_tokenizers(
    tokenizers: tuple[Tokenizer, Tokenizer], spec: SourceSpec
) -> None:
    student, teacher = tokenizers
    source = open_training([spec], tokenizer=student, options=options(teacher), seed=3)
    bytes_of = [one.token_bytes() for one in tokenizers]
    chunks = shared = labels = 0
    for _ in range(40):
        sample = source.next_sample()
        sides = (
            (sample.teacher.student_chunks_S1, sample.tokens_S1),
            (sample.teacher.chunks_U1, sample.teacher.tokens_U1),
        )
        for chunk in range(sample.teacher.chunks):
            texts = [
                [bytes_of[side][token] for token in tokens[numbers == chunk]]
                for side, (numbers, tokens) in enumerate(sides)
            ]
            if texts[0] == [None]:  # the end of a document on both sides
                ends = [int(tokens[numbers == chunk][0]) for numbers, tokens in sides]
                assert ends == [student.eos_id, teacher.eos_id]
                continue
            left, right = (b"".join(part or b"" for part in side) for side in texts)
            assert left == right
            chunks += 1
        shared += int((sides[0][0] != NO_CHUNK).sum())
        labels += int((sample.flags_S1 > 0)[1:].sum())
    assert chunks > 100
    # Labels at the beginnings of documents are missing.
    assert shared > 0.85 * labels


@pytest.mark.parametrize("samples", [0, 1, 7])
def test_a_stream_resumes_bit_for_bit_also_with_worker_processes(
    tokenizers: tuple[Tokenizer, Tokenizer],
    spec: SourceSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    samples: int,
) -> None:
    student, teacher = tokenizers
    specs = [spec, replace(spec, weight=2.0)]
    before = set(active_children())
    whole = open_training(specs, tokenizer=student, options=options(teacher), seed=3)
    for _ in range(samples):
        whole.next_sample()
    state = json.loads(json.dumps(whole.state_dict()))
    workers = 2 if samples == 1 else 0
    given = options(teacher, workers=workers)
    if workers:
        # Some of the documents, and of the batches all of them, are in the cache.
        monkeypatch.setattr(document_cache, "SEGMENT_BYTES", 1000)
        conversations = ConversationOptions(tmp_path / "cache")
        given = replace(given, document_cache_gib=1.0, conversations=conversations)
        held_out = replace(given, validation_fraction=0.5, teacher=options(teacher).teacher)
        held_out_samples(specs, tokenizer=student, options=held_out, samples=3)
        assert list(tmp_path.glob("cache/documents-*/000000/manifest.json"))
    resumed = open_training(specs, tokenizer=student, options=given, seed=3)
    resumed.load_state_dict(state)
    for _ in range(12):
        assert same(whole.next_sample(), resumed.next_sample())
    # The number of worker processes is that of all sources together.
    assert len(set(active_children()) - before) == workers


def test_a_state_of_another_teacher_s_tokenizer_is_refused(
    tokenizers: tuple[Tokenizer, Tokenizer], spec: SourceSpec
) -> None:
    student, teacher = tokenizers
    source = open_training([spec], tokenizer=student, options=options(teacher), seed=3)
    other = open_training(
        [spec], tokenizer=student, options=options(tokenizer_of("tiktoken")), seed=3
    )
    with pytest.raises(DataError, match="teacher_tokenizer differs from the checkpoint"):
        other.load_state_dict(source.state_dict())


def test_held_out_samples_and_batches_have_both_sides(
    tokenizers: tuple[Tokenizer, Tokenizer], spec: SourceSpec
) -> None:
    student, teacher = tokenizers
    chosen = options(teacher, validation_fraction=1.0)
    held_out = held_out_samples([spec], tokenizer=student, options=chosen, samples=3)
    loader = StepLoader(
        held_out,
        sequence_length=48,
        teacher_length=40,
        global_batch_size=2,
        micro_batch_size=2,
        prefetch=0,
        planner=ChunkPlanner(tile_tokens=8, band_tokens=20),
    )
    first, last = loader.take(1), loader.take(2)
    assert first.chunks > first.pairs > 0
    assert 0 < last.chunks < first.chunks  # its second sample is a filler
    for step in (first, last):
        (batch,) = step.micro_batches
        assert batch.teacher.tokens_bs.shape == (2, 40)
        assert batch.chunk_count == step.chunks
        assert step.kd_tokens == int(batch.kd_mask_bs.sum())
        plan = batch.planned.plan
        assert len(plan.chunks) == step.chunks
        assert plan.pairs.shape[1] == step.pairs
        assert len(plan.bands) < len(plan.tiles)


def test_too_many_documents_that_cannot_be_aligned_are_an_error_with_the_row(
    tokenizers: tuple[Tokenizer, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, student = tokenizers
    texts = ["one good text", "bad Q row", "a third text", "bad Q again"]
    spec = jsonl_source(tmp_path / "rows.jsonl", texts)
    # A tokenizer that loses a character cannot be inverted.
    encode_batch = type(teacher).encode_batch
    monkeypatch.setattr(
        type(teacher),
        "encode_batch",
        lambda self, given: encode_batch(self, [text.replace("Q", "") for text in given]),
    )
    source = open_training(
        [spec], tokenizer=student, options=options(teacher, shuffle_buffer=1), seed=3
    )
    with pytest.raises(DataError) as caught:
        list(iter(source.next_sample, None))
    text = str(caught.value)
    assert text.startswith("data.max_unaligned=0.01: 2 of 4 documents of data source jsonl ")
    assert f"{tmp_path}/rows.jsonl:" in text
    assert "raise data.max_unaligned" in text


def test_texts_that_a_tokenizer_cannot_encode_are_counted_or_an_error_with_the_row(
    tokenizers: tuple[Tokenizer, Tokenizer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = TiktokenRules("[^Q]+", {END_OF_TEXT: 900})
    partial = TiktokenTokenizer(ranks_of(byte_level()), rules, name="no Q")
    texts = ["one good text", "bad Q row", "a third text, longer than the others"]
    spec = jsonl_source(tmp_path / "rows.jsonl", texts)
    given = options(partial, shuffle_buffer=1)
    teacher = replace(given, teacher=replace(given.teacher, max_unaligned=1.0))
    source = open_training([spec], tokenizer=tokenizers[0], options=teacher, seed=3)
    samples = [source.next_sample() for _ in range(3)]
    assert all(sample.teacher is not None and sample.teacher.chunks > 0 for sample in samples)
    reason = "rows.jsonl:2: no Q: its pattern '[^Q]+' leaves out characters of the text 'bad Q row'"
    assert reason in caplog.text
    source = open_training([spec], tokenizer=tokenizers[0], options=given, seed=3)
    with pytest.raises(DataError, match=r"2 of \d+ documents") as caught:
        list(iter(source.next_sample, None))
    assert reason in str(caught.value)
    # With one tokenizer every text is needed.
    source = open_training([spec], tokenizer=partial, options=replace(given, teacher=None), seed=3)
    with pytest.raises(DataError) as caught:
        list(iter(source.next_sample, None))
    assert str(caught.value).startswith(f"{tmp_path}/{reason}")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_without_one_alignable_document_is_an_error_with_any_share(
    tmp_path: Path, workers: int
) -> None:
    # Every chunk has an unknown token: no sample would ever be full.
    student, teacher = tokenizer_of("sp_nfkc"), tokenizer_of(KINDS[0])
    rows = tmp_path / "rows.jsonl"
    text = "\N{GRINNING FACE}"
    spec = jsonl_source(rows, [text * n for n in range(1, 8)])
    reading = TeacherReading(teacher, 40, max_unaligned=1.0, workers=workers)
    given = replace(options(teacher, shuffle_buffer=3), teacher=reading)
    source = open_training([spec], tokenizer=student, options=given, seed=3)
    with pytest.raises(DataError) as caught:
        source.next_sample()
    assert str(caught.value).startswith(
        f"data.max_unaligned=1: no sample can be made of data source {spec.name}: of the 7 "
        f"documents of an epoch 7 have no chunk that both tokenizers share; the last is {rows}:"
    )
    # One of the epoch's documents is enough to go on.
    with rows.open("a") as file:
        file.write(json.dumps({"text": "plain words"}) + "\n")
    source = open_training([spec], tokenizer=student, options=given, seed=3)
    assert all(one.teacher is not None for one in (source.next_sample() for _ in range(5)))


def test_chunks_with_unknown_tokens_are_in_no_loss_and_their_share_is_warned_of(
    tokenizers: tuple[Tokenizer, Tokenizer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    student, teacher = tokenizer_of("sp_nfkc"), tokenizers[0]
    text = "plain \N{GRINNING FACE} words"
    (found, nothing) = PairEncoder(student, teacher)(
        [text, "\N{GRINNING FACE}" * 2], [False, False]
    )
    is_unknown = found.student.tokens_n == student.unknown_id
    assert (found.student.chunks_n[is_unknown] == NO_CHUNK).all()
    assert (found.student.chunks_n[~is_unknown] != NO_CHUNK).any()
    assert (found.unknown.unknown, found.unknown.teacher_unknown) == (int(is_unknown.sum()), 0)
    covered = b"".join(
        teacher.token_bytes()[token] or b""
        for token in found.teacher.tokens_n[found.teacher.chunks_n != NO_CHUNK]
    )
    assert "\N{GRINNING FACE}".encode() not in covered
    assert b"words" in covered
    assert isinstance(nothing, DataError)
    assert "each of its chunks has an unknown token" in str(nothing)
    spec = jsonl_source(tmp_path / "rows.jsonl", [text])
    source = open_training([spec], tokenizer=student, options=options(teacher), seed=3)
    with caplog.at_level(logging.WARNING):
        for _ in range(60):
            source.next_sample()
    (warned,) = [one.message for one in caplog.records if "unknown tokens" in one.message]
    share = found.unknown.unknown / found.unknown.tokens
    assert f": {share:.2%} of the student's tokens and 0.00% of the teacher's" in warned

"""`data.add_bos`: the token before each document's text, with one tokenizer and with two."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from megatron_distill.data.collation import label_masks, pack_samples
from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.samples import NO_CHUNK, Sample
from megatron_distill.data.sources import (
    DataOptions,
    TeacherReading,
    all_held_out,
    open_training,
)
from megatron_distill.data.text import documents
from megatron_distill.data.text.stream import tokenized_documents
from megatron_distill.data.tokenizers.open import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from megatron_distill.errors import DataError
from tests.support.data_fixtures import jsonl_source
from tests.support.tokenizer_kinds import byte_level, tokenizer_of

TEXTS = ["def one(x):\n    return x\n", "naïve 中文 \N{GRINNING FACE}", "a third text, plain"]
BOS = "<|begin|>"


@cache
def adding() -> HuggingFaceTokenizer:
    """A byte-level BPE whose post-processor puts its begin-of-text token before a text."""
    import tokenizers
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer.from_str(byte_level().hugging_face.backend_tokenizer.to_str())
    backend.add_special_tokens([BOS])
    number = backend.token_to_id(BOS)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, number)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token="<|endoftext|>"
    )
    return HuggingFaceTokenizer(wrapped, name="byte-level BPE that begins texts")


def rows_of(tmp_path: Path) -> SourceSpec:
    return jsonl_source(tmp_path / "rows.jsonl", TEXTS)


def options(add_bos: bool | None, teacher: Tokenizer | None) -> DataOptions:
    reading = None if teacher is None else TeacherReading(teacher, 400, 0.0, workers=0)
    return DataOptions(400, validation_fraction=1.0, teacher=reading, add_bos=add_bos)


def whole(spec: SourceSpec, tokenizer: Tokenizer, chosen: DataOptions) -> Sample:
    """All documents, in one sample."""
    (sample,) = all_held_out([spec], tokenizer=tokenizer, options=chosen)
    return sample


def wanted(tokenizer: Tokenizer, begin: int | None) -> list[int]:
    before = [] if begin is None else [begin]
    rows = tokenizer.encode_batch(TEXTS)
    return [token for row in rows for token in [*before, *row.tolist(), tokenizer.eos_id]]


@pytest.mark.parametrize("has_teacher", [False, True])
@pytest.mark.parametrize("add_bos", [None, True, False])
def test_documents_begin_with_the_token_of_each_tokenizer(
    add_bos: bool | None, has_teacher: bool, tmp_path: Path
) -> None:
    # The student's files add the token; the teacher has one, and its file does not tell.
    student, teacher = adding(), tokenizer_of("sp_bpe")
    assert student.bos_id is not None
    assert teacher.bos_id is not None
    sample = whole(rows_of(tmp_path), student, options(add_bos, teacher if has_teacher else None))
    begin = None if add_bos is False else student.bos_id
    expected = wanted(student, begin)
    assert sample.tokens_S1[: len(expected)].tolist() == expected
    is_label_S = label_masks(pack_samples([sample]).marks_GS1, isolate_documents=True)[0][0].numpy()
    labels = sample.tokens_S1[1:][is_label_S].tolist()
    # Of each document without the token the first one of the text is no label.
    assert labels.count(student.bos_id) == 0
    assert len(labels) == len(wanted(student, None)) - (0 if begin else len(TEXTS))
    if not has_teacher:
        return
    of_teacher = wanted(teacher, teacher.bos_id if add_bos else None)
    assert sample.teacher.tokens_U1[: len(of_teacher)].tolist() == of_teacher
    for side, tokens, chunks in (
        (student, sample.tokens_S1, sample.teacher.student_chunks_S1),
        (teacher, sample.teacher.tokens_U1, sample.teacher.chunks_U1),
    ):
        assert (chunks[tokens == side.bos_id] == NO_CHUNK).all()
        assert (np.diff(chunks[chunks != NO_CHUNK]) >= 0).all()
    first_chunks = sample.teacher.student_chunks_S1[1:][sample.tokens_S1[:-1] == student.bos_id]
    assert len(first_chunks) == (0 if begin is None else len(TEXTS))
    if add_bos is not False:
        # A document's first label is in a chunk where the token stands before it on both sides.
        assert (first_chunks != NO_CHUNK).all() == bool(add_bos)


def test_a_long_document_has_the_token_once_and_resumes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 64)
    (tmp_path / "long.txt").write_text("".join(f"line {index:03}\n" for index in range(60)))
    spec, tokenizer = SourceSpec("text", (str(tmp_path / "long.txt"),)), adding()
    ((*parts,),) = tokenized_documents(spec, tokenizer, skip_bad=False)
    row = np.concatenate(parts)
    assert np.flatnonzero(row == tokenizer.bos_id).tolist() == [0]
    without = np.concatenate(
        [*tokenized_documents(spec, tokenizer, skip_bad=False, add_bos=False)][0]
    )
    assert row[1:].tolist() == without.tolist()
    chosen = DataOptions(24, shuffle_buffer=1, shuffle_samples=1)
    source = open_training([spec], tokenizer=tokenizer, options=chosen, seed=1)
    for _ in range(3):
        source.next_sample()
    resumed = open_training([spec], tokenizer=tokenizer, options=chosen, seed=1)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    for _ in range(20):
        assert (resumed.next_sample().tokens_S1 == source.next_sample().tokens_S1).all()


def test_a_tokenizer_without_the_token_and_a_changed_key_are_refused(tmp_path: Path) -> None:
    spec, student = rows_of(tmp_path), adding()
    with pytest.raises(DataError, match=r"data\.add_bos=true: .* has no begin-of-text token"):
        whole(spec, byte_level(), options(True, None))
    with pytest.raises(DataError, match=r"data\.add_bos=true: .* has no begin-of-text token"):
        whole(spec, student, options(True, byte_level()))
    opened = [
        open_training([spec], tokenizer=student, options=DataOptions(8, add_bos=key), seed=1)
        for key in (None, False)
    ]
    with pytest.raises(
        DataError, match=r"begin_token differs from the checkpoint .*set data\.add_bos as then"
    ):
        opened[1].load_state_dict(opened[0].state_dict())


def test_a_folder_that_adds_the_token_is_read_as_such(tmp_path: Path) -> None:
    adding().save(tmp_path / "adds")
    byte_level().save(tmp_path / "not")
    assert load_tokenizer(tmp_path / "adds").adds_bos
    assert not load_tokenizer(tmp_path / "not").adds_bos

"""Losses of texts in bits per byte, and of documents one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.samples import FULLY_TRAINED, Sample
from megatron_distill.data.sources import (
    DataOptions,
    TeacherReading,
    all_held_out,
    held_out_samples,
)
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.errors import CheckpointError, DataError
from megatron_distill.evaluation.bits_per_byte import (
    HeldOutText,
    measure_text,
    require_comparable,
)
from megatron_distill.evaluation.independent_loss import independent_loss
from tests.distributed.hugging_face_models import VOCABULARY, reference, save_model
from tests.support.data_fixtures import jsonl_source
from tests.support.tokenizer_kinds import tokenizer_of, training_texts

KINDS = ("hf_bytes", "sp_bpe")
TEXTS = [" ".join(training_texts()[start::7])[:900] for start in range(7)]
TEXTS += ["naïve 中文 \N{GRINNING FACE} and more"]
OPTIONS = DataOptions(sequence_length=64, validation_fraction=1.0)


@pytest.fixture(scope="module")
def tokenizers() -> tuple[Tokenizer, Tokenizer]:
    return tokenizer_of(KINDS[0]), tokenizer_of(KINDS[1])


@pytest.fixture
def spec(tmp_path: Path) -> SourceSpec:
    return jsonl_source(tmp_path / "rows.jsonl", TEXTS)


def samples_of(spec: SourceSpec, tokenizer: Tokenizer, options: DataOptions) -> Iterator[Sample]:
    return all_held_out([spec], tokenizer=tokenizer, options=options)


def text_of(spec: SourceSpec, tokenizer: Tokenizer, options: DataOptions) -> HeldOutText:
    samples = samples_of(spec, tokenizer, options)
    return measure_text(samples, tokenizer.token_bytes(), isolate_documents=True)


@pytest.mark.parametrize("is_aligned", [False, True], ids=["one tokenizer", "two"])
@pytest.mark.parametrize("which", [0, 1], ids=KINDS)
def test_the_labels_are_all_tokens_but_the_first_of_each_document(
    tokenizers: tuple[Tokenizer, Tokenizer], spec: SourceSpec, which: int, is_aligned: bool
) -> None:
    own, other = tokenizers[which], tokenizers[1 - which]
    reading = TeacherReading(other, 60, max_unaligned=0.0, workers=0) if is_aligned else None
    found = text_of(spec, own, replace(OPTIONS, teacher=reading))
    encoded, lengths = own.encode_batch(TEXTS), [len(one or b"") for one in own.token_bytes()]
    # The end of each document is a label without text.
    assert found.labels == sum(len(ids) for ids in encoded)
    assert found.text_bytes == sum(lengths[number] for ids in encoded for number in ids[1:])
    list_of_all = held_out_samples(
        [spec], tokenizer=own, options=replace(OPTIONS, teacher=reading), samples=found.samples
    )
    assert len(list_of_all.samples) == found.samples


def test_a_loss_of_one_nat_per_byte_is_the_same_in_both_tokenizers(
    tokenizers: tuple[Tokenizer, Tokenizer], spec: SourceSpec
) -> None:
    texts = [text_of(spec, one, OPTIONS) for one in tokenizers]
    assert texts[0].labels != texts[1].labels
    assert all(text.samples > 9 for text in texts)
    for text in texts:
        assert text.bits_per_byte(text.bytes_per_label) == pytest.approx(1 / math.log(2))


def test_uniform_bytes_take_eight_bits_each() -> None:
    assert HeldOutText(3, 70, 70).bits_per_byte(math.log(256)) == pytest.approx(8.0)
    # Labels without text, the ends of documents, cost bits as well.
    assert HeldOutText(3, 77, 70).bits_per_byte(math.log(256)) == pytest.approx(8.8)


def test_texts_without_a_label_and_unequal_texts_are_refused() -> None:
    with pytest.raises(DataError, match=r"0 held-out samples contain no text to predict"):
        measure_text([], [b"a"], isolate_documents=True)
    require_comparable(HeldOutText(9, 90, 1000), HeldOutText(8, 80, 1009))
    with pytest.raises(DataError, match=r"1,000 bytes of text for the student and 1,020"):
        require_comparable(HeldOutText(9, 90, 1000), HeldOutText(8, 80, 1020))


# Documents of a sample: three, one of them a single token, and padding.
DOCUMENTS = [0, 0, 0, 0, 1, 2, 2, 2, 2, 2, -1, -1]


def samples() -> list[Sample]:
    rng = np.random.default_rng(4)
    return [
        Sample(
            tokens_S1=rng.integers(0, VOCABULARY, len(DOCUMENTS)).astype(np.int32),
            document_ids_S1=np.array(DOCUMENTS, np.int32),
            flags_S1=np.full(len(DOCUMENTS), FULLY_TRAINED, np.uint8),
            sample_id=number,
        )
        for number in range(3)
    ]


def test_each_document_is_a_sequence_whose_first_token_is_no_label(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama3.1")
    found = independent_loss(folder, samples())
    measured = measure_text(samples(), [b"a"] * VOCABULARY, isolate_documents=True)
    assert found.labels == measured.labels == 3 * (3 + 4)
    # Label by label, the context alone given.
    model, losses = reference(folder), []
    for sample in samples():
        for start, stop in ((0, 4), (5, 10)):
            for label in range(start + 1, stop):
                context = torch.from_numpy(sample.tokens_S1[start:label].astype(np.int64))
                with torch.no_grad():
                    logits = model(input_ids=context[None]).logits[0, -1].double()
                losses.append(-float(logits.log_softmax(0)[int(sample.tokens_S1[label])]))
    assert found.nats_per_label == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert found.nats_per_label > 0.5 * math.log(VOCABULARY)


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none: transformers cannot load it"):
        independent_loss(tmp_path / "none", samples())
    folder = save_model(tmp_path / "model", "llama3.1")
    with pytest.raises(DataError, match="no label; raise data.validation_fraction"):
        independent_loss(folder, [])

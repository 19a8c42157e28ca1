"""Conversations packed into samples: windows, truncation, held-out shares, resuming, reports.

Every sequence length for one conversation under every policy; several conversations per window;
pad equal to eos; masks of packed samples through the one shift; states taken at every sample.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_distill.data.chat.source import (
    TRUNCATIONS,
    ConversationOptions,
    ConversationSource,
    cut_conversation,
    fill_windows,
)
from megatron_distill.data.collation import count_labels, label_masks, micro_batch, pack_samples
from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.samples import CE_TRAINED, FULLY_TRAINED, PADDING_DOCUMENT, Sample
from megatron_distill.data.sources import DataOptions, held_out_samples, open_training, sample_texts
from megatron_distill.errors import DataError
from megatron_distill.runtime.batch import LabelCounts
from tests.support.chat_fixtures import (
    chat_tokenizer,
    conversation_spec,
    conversations,
    template_of,
    turns,
    write_rows,
)

STYLE = "qwen3"
TOKENIZER = chat_tokenizer(STYLE)


def rows(count: int) -> list[dict[str, Any]]:
    return conversations(count, "say {}.")


def options_of(folder: Path, length: int, **changes: Any) -> DataOptions:
    return DataOptions(
        sequence_length=length,
        conversations=replace(ConversationOptions(cache=folder / "cache", workers=0), **changes),
    )


def source_of(
    spec: SourceSpec, options: DataOptions, *, seed: int = 1, epochs: int | None = None
) -> ConversationSource:
    blended = open_training([spec], tokenizer=TOKENIZER, options=options, seed=seed)
    (source,) = blended._sources
    source._epochs = epochs
    return source


def documents(sample: Sample) -> list[tuple[list[int], list[int]]]:
    """Tokens and flags of each document of a sample."""
    count = int(sample.document_ids_S1.max()) + 1
    places = [sample.document_ids_S1 == document for document in range(count)]
    return [(sample.tokens_S1[at].tolist(), sample.flags_S1[at].tolist()) for at in places]


def reference(conversation: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Tokens and flags of one conversation, from pieces tokenised by themselves."""
    tokens: list[int] = []
    flags: list[int] = []
    messages = conversation["messages"]
    for index, message in enumerate(messages):
        thought = "<think>\n\n</think>\n\n" if index == len(messages) - 1 else ""
        header = f"<|im_start|>{message['role']}\n"
        body = f"{thought}{message['content']}<|im_end|>"
        is_response = message["role"] == "assistant"
        for text, flag in ((header, 0), (body, FULLY_TRAINED * is_response), ("\n", 0)):
            piece = TOKENIZER.encode_batch([text])[0].tolist()
            tokens += piece
            flags += [flag] * len(piece)
    return tokens, flags


def test_an_epoch_holds_every_conversation_once_with_its_marks(tmp_path: Path) -> None:
    corpus = rows(40)
    spec = conversation_spec(write_rows(tmp_path / "a.jsonl", corpus))
    source = source_of(spec, options_of(tmp_path, 300, packing_buffer=16), epochs=1)
    samples = list(iter(source.next_or_none, None))
    found = Counter(json.dumps(one) for sample in samples for one in documents(sample))
    assert found == Counter(json.dumps(reference(one)) for one in corpus)
    assert len(samples) < 40 / 2
    for sample in samples:
        padding = sample.document_ids_S1 == PADDING_DOCUMENT
        assert (sample.tokens_S1[padding] == TOKENIZER.eos_id).all()
        assert not sample.flags_S1[padding].any()
        assert (np.diff(padding.astype(int)) >= 0).all()


def test_masks_of_packed_samples_are_shifted_once_and_padding_never_trains(tmp_path: Path) -> None:
    # The end-of-turn token is the padding token as well.
    assert TOKENIZER.decode([TOKENIZER.eos_id]) == "<|im_end|>"
    spec = conversation_spec(write_rows(tmp_path / "a.jsonl", rows(6)))
    source = source_of(spec, options_of(tmp_path, 1000))
    batch = pack_samples([source.next_sample()])
    found = micro_batch(batch, slice(0, 1), isolate_documents=True)
    tokens, flags = batch.tokens_GS1[0].tolist(), batch.marks_GS1[0].tolist()
    documents_of = [mark >> 8 for mark in flags]
    expected = [
        documents_of[i] == documents_of[i + 1] != 0 and bool(flags[i + 1] & CE_TRAINED)
        for i in range(len(tokens) - 1)
    ]
    assert found.ce_mask_bs[0].tolist() == found.kd_mask_bs[0].tolist() == expected
    labels = found.labels_bs[0][found.ce_mask_bs[0]].tolist()
    ends = sum(label == TOKENIZER.eos_id for label in labels)
    assert ends == sum(len(row["messages"]) // 2 for row in rows(6))
    assert tokens.count(TOKENIZER.eos_id) > 2 * ends  # prompts end so too, and padding does
    assert sum(expected) == count_labels(batch, isolate_documents=True)[0].ce
    assert found.label_weights_bs is None


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_every_sequence_length_cuts_a_conversation_as_declared(
    tmp_path: Path, truncation: str
) -> None:
    conversation = rows(2)[1]
    tokens, flags = reference(conversation)
    spec = conversation_spec(write_rows(tmp_path / "a.jsonl", [conversation]))
    for length in range(2, len(tokens) + 2):
        options = options_of(tmp_path, length, truncation=truncation)
        width, size = length + 1, len(tokens)
        pieces = {
            "right": [(0, width)],
            "left": [(max(0, size - width), size)],
            "split": [(i, i + width) for i in range(0, max(1, size - 1), length)],
            "drop": [(0, size)] if size <= width else [],
            "error": [(0, size)] if size <= width else [],
        }[truncation]
        expected = [(tokens[a:b], flags[a:b]) for a, b in pieces if any(flags[a + 1 : b])]
        if not expected:
            with pytest.raises(DataError, match="too long" if truncation == "error" else "no conv"):
                source_of(spec, options)
            continue
        source = source_of(spec, options, epochs=1)
        found = [one for s in iter(source.next_or_none, None) for one in documents(s)]
        assert sorted(found) == sorted(expected), length
        kept = sum(sum(map(bool, own[1:])) for _, own in expected)
        lost = sum(map(bool, flags)) - kept
        assert (source.too_long.count, source.too_long.lost_labels) == (
            (1, lost) if size > width else (0, 0)
        )


def test_long_conversations_are_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = rows(6)
    path = write_rows(tmp_path / "a.jsonl", corpus)
    sizes = [len(reference(one)[0]) for one in corpus]
    length = sorted(sizes)[-3]
    with caplog.at_level(logging.WARNING):
        logging.getLogger("megatron_distill").propagate = True
        source_of(conversation_spec(path), options_of(tmp_path, length))
    longest = sizes.index(max(sizes)) + 1
    reported = f"has {max(sizes)} tokens, {length + 1} fit (data.sequence_length + 1)"
    assert f"too long: 2 of 6 conversations; the longest {reported}" in caplog.text
    assert f"{path}:{longest}" in caplog.text


LENGTHS = st.lists(st.integers(1, 50), max_size=60)


@given(lengths=LENGTHS)
def test_windows_hold_each_piece_once_and_no_two_could_be_one(lengths: list[int]) -> None:
    windows = fill_windows(lengths, width=50)
    assert sorted(place for window in windows for place in window) == list(range(len(lengths)))
    filled = sorted(sum(lengths[place] for place in window) for window in windows)
    assert all(size <= 50 for size in filled)
    assert all(one + other > 50 for one, other in zip(filled, filled[1:], strict=False))


@given(start=st.integers(0, 5), size=st.integers(2, 40), width=st.integers(2, 9))
def test_split_trains_each_label_once(start: int, size: int, width: int) -> None:
    pieces = cut_conversation(start, start + size, width=width, truncation="split")
    labels = [at for piece in pieces for at in range(piece.start + 1, piece.stop)]
    assert labels == list(range(start + 1, start + size))


def test_it_resumes_exactly_from_every_sample(tmp_path: Path) -> None:
    spec = conversation_spec(write_rows(tmp_path / "a.jsonl", rows(23)))
    options = options_of(tmp_path, 200, packing_buffer=9)
    source = source_of(spec, options)
    states, samples = [], []
    for _ in range(30):
        states.append(json.loads(json.dumps(source.state_dict())))
        samples.append(source.next_sample())
    assert states[-1]["epoch"] >= 2
    for first in (0, 1, 7, 13, 29):
        again = source_of(spec, options)
        again.load_state_dict(states[first])
        for expected in samples[first:]:
            found = again.next_sample()
            assert found.sample_id == expected.sample_id
            np.testing.assert_array_equal(found.tokens_S1, expected.tokens_S1)
            np.testing.assert_array_equal(found.flags_S1, expected.flags_S1)
    other = source_of(spec, options_of(tmp_path, 200, packing_buffer=10))
    with pytest.raises(DataError, match=r"packing_buffer differs .* \(10, was 9\)"):
        other.load_state_dict(states[3])


def test_held_out_conversations_are_not_trained_whatever_the_seed(tmp_path: Path) -> None:
    spec = conversation_spec(write_rows(tmp_path / "a.jsonl", rows(60)))
    options = replace(options_of(tmp_path, 120), validation_fraction=0.3)
    held_out = held_out_samples([spec], tokenizer=TOKENIZER, options=options, samples=3)
    kept_out = {json.dumps(one) for sample in held_out.samples for one in documents(sample)}
    for seed in (1, 2):
        source = source_of(spec, options, seed=seed, epochs=1)
        trained = {json.dumps(one) for s in iter(source.next_or_none, None) for one in documents(s)}
        assert not kept_out & trained
        assert len(trained) < 60
    again = held_out_samples([spec], tokenizer=TOKENIZER, options=options, samples=3)
    assert [s.tokens_S1.tolist() for s in again.samples] == [
        s.tokens_S1.tolist() for s in held_out.samples
    ]


def test_weights_reach_the_batch_and_its_counts(tmp_path: Path) -> None:
    corpus = rows(2)
    corpus[1]["messages"][1]["weight"] = 0.25
    spec = conversation_spec(write_rows(tmp_path / "a.jsonl", corpus))
    source = source_of(spec, options_of(tmp_path, 400))
    batch = pack_samples([source.next_sample()])
    found = micro_batch(batch, slice(0, 1), isolate_documents=True)
    expected = 0.0
    for row in corpus:
        for message in row["messages"]:
            # Their weight times their tokens; the last turn of each has a thought before it.
            body = f"{message['content']}<|im_end|>"
            thought = "<think>\n\n</think>\n\n" if message is row["messages"][-1] else ""
            count = len(TOKENIZER.encode_batch([thought + body])[0])
            expected += count * message.get("weight", 1.0) * (message["role"] == "assistant")
    assert count_labels(batch, isolate_documents=True) == (LabelCounts(expected, expected),)
    assert float(found.ce_weights_bs.sum()) == float(found.kd_weights_bs.sum()) == expected
    assert set(found.ce_weights_bs.unique().tolist()) == {0.0, 0.25, 1.0}
    ce_mask, _ = label_masks(batch.marks_GS1, isolate_documents=True)
    assert int(ce_mask.sum()) > expected
    unweighted = options_of(tmp_path, 400, keeps_weights=False)
    with pytest.raises(DataError, match="weights other than 0 and 1, which a store"):
        source_of(spec, unweighted)


def test_a_tokenizer_is_trained_on_the_text_of_messages(tmp_path: Path) -> None:
    spec = conversation_spec(write_rows(tmp_path / "a.jsonl", rows(2)))
    texts = list(sample_texts([spec], options=options_of(tmp_path, 8), characters=10**6))
    assert texts == [message["content"] for row in rows(2) for message in row["messages"]]


def test_a_missing_template_is_reported_before_anything_is_read(tmp_path: Path) -> None:
    spec = conversation_spec(write_rows(tmp_path / "a.jsonl", rows(2)))
    bare = chat_tokenizer("plain")
    with pytest.raises(DataError, match="plain: the tokenizer has no chat template; set .*plain"):
        open_training([spec], tokenizer=bare, options=options_of(tmp_path, 8), seed=1)
    plain = conversation_spec(tmp_path / "a.jsonl", chat_template="plain", separator=" ")
    source = open_training([plain], tokenizer=bare, options=options_of(tmp_path, 400), seed=1)
    text = bare.decode(source.next_sample().tokens_S1)
    assert "ask 0.0  say 0.0.<|endoftext|>" in text
    path = tmp_path / "broken.jinja"
    path.write_text("{% for %}")
    broken = conversation_spec(tmp_path / "a.jsonl", chat_template=str(path))
    with pytest.raises(DataError, match="broken.jinja: line 1"):
        open_training([broken], tokenizer=bare, options=options_of(tmp_path, 8), seed=1)
    missing = conversation_spec(tmp_path / "a.jsonl", chat_template=str(tmp_path / "no.jinja"))
    with pytest.raises(DataError, match=r"no\.jinja: cannot be read"):
        open_training([missing], tokenizer=bare, options=options_of(tmp_path, 8), seed=1)
    assert template_of("plain").render(turns("a", "b"), None) == "a\nb<|endoftext|>"

"""Conversations in two tokenizers: chunks of contents and ends of turns, masks, packing, resuming.

Pairs of templates that write other headers, strip contents or not, close turns by tokens of
different roles, move the system message, or cannot write it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from megatron_distill.data.aligned.preview import PrintableTokens, chunk_table
from megatron_distill.data.chat.source import ConversationOptions, ConversationSource
from megatron_distill.data.collation import micro_batch, pack_samples
from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.preview import token_kinds
from megatron_distill.data.samples import CE_TRAINED, KD_TRAINED, NO_CHUNK, Sample
from megatron_distill.data.sources import (
    DataOptions,
    TeacherReading,
    held_out_samples,
    open_training,
)
from megatron_distill.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.errors import DataError
from tests.support.chat_fixtures import (
    TOOLS,
    chat_tokenizer,
    conversation_spec,
    conversations,
    other_tokenizer,
    tool_dialogue,
    turns,
    write_rows,
)

# The end of a turn of each style, as its template writes it.
ENDS = {"qwen25": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "phi3": "<|end|>",
        "gemma": "<end_of_turn>", "mistral": "</s>", "plain": "<|endoftext|>"}  # fmt: skip


def rows(count: int) -> list[dict[str, Any]]:
    return conversations(count, "say 中文 {}, hello.")


def options_of(
    folder: Path, teacher: Tokenizer, lengths: tuple[int, int] = (300, 320), **changes: Any
) -> DataOptions:
    given = ConversationOptions(cache=folder / "cache", workers=0)
    return DataOptions(
        sequence_length=lengths[0],
        conversations=replace(given, **changes),
        teacher=TeacherReading(teacher, lengths[1], max_unaligned=0.01, workers=0),
    )


def source_of(
    spec: SourceSpec, student: Tokenizer, options: DataOptions, *, epochs: int | None = None
) -> ConversationSource[Any]:
    (source,) = open_training([spec], tokenizer=student, options=options, seed=1)._sources
    source._epochs = epochs
    return source


def chunk_texts(sample: Sample, student: Tokenizer, teacher: Tokenizer) -> list[tuple[str, str]]:
    """The text of each chunk on both sides."""
    of_teacher = sample.teacher
    own, other = (
        [tokenizer.decode(tokens[chunks == chunk].tolist()) for chunk in range(of_teacher.chunks)]
        for chunks, tokens, tokenizer in (
            (of_teacher.student_chunks_S1, sample.tokens_S1, student),
            (of_teacher.chunks_U1, of_teacher.tokens_U1, teacher),
        )
    )
    return list(zip(own, other, strict=True))


def assert_equal_texts(samples: Sequence[Sample], student: Tokenizer, teacher: Tokenizer) -> None:
    """Chunks have one text on both sides, ends of turns apart."""
    pairs = [pair for sample in samples for pair in chunk_texts(sample, student, teacher)]
    assert all(own == other or (own, other) == ("<|im_end|>", "<|eot_id|>") for own, other in pairs)


PAIRS = [("qwen25", "llama3"), ("qwen3", "gemma"), ("llama3", "mistral"), ("phi3", "qwen3"),
         ("gemma", "phi3"), ("mistral", "qwen25")]  # fmt: skip


@pytest.mark.parametrize(("style", "teacher_style"), PAIRS)
def test_the_responses_and_their_ends_are_in_chunks_of_equal_text(
    tmp_path: Path, style: str, teacher_style: str
) -> None:
    student, teacher = chat_tokenizer(style), other_tokenizer(teacher_style)
    corpus = rows(9)
    spec = conversation_spec(write_rows(tmp_path / "a.jsonl", corpus))
    source = source_of(spec, student, options_of(tmp_path, teacher), epochs=1)
    samples = list(iter(source.next_or_none, None))
    ends = (ENDS[style], ENDS[teacher_style])
    texts = []
    for sample in samples:
        found = chunk_texts(sample, student, teacher)
        assert all(own == other or (own, other) == ends for own, other in found)
        texts.append("".join(own for own, _ in found))
    # All responses, each with its end, and nothing of prompts and headers.
    answers = [m["content"] for row in corpus for m in row["messages"] if m["role"] == "assistant"]
    whole = "".join(texts)
    pieces = [piece.strip() for piece in whole.split(ends[0])][:-1]
    # A token may reach over the edge of a content, as a space before a word does.
    assert len(pieces) == len(answers)
    for piece in pieces:
        assert any(text.endswith(piece) and len(text) - len(piece) <= 4 for text in answers), piece


def test_a_preview_keeps_the_sizes_beside_long_text_between_chunks(tmp_path: Path) -> None:
    student, teacher = chat_tokenizer("qwen25"), other_tokenizer("llama3")
    spec = conversation_spec(write_rows(tmp_path / "a.jsonl", rows(3)))
    sample = source_of(spec, student, options_of(tmp_path, teacher)).next_sample()
    kinds = token_kinds(sample, isolate_documents=True)
    sides = PrintableTokens(student), PrintableTokens(teacher)
    table = chunk_table(sample, *sides, kinds, rows=30, width=80, has_colour=False)
    console = Console(width=80, record=True)
    console.print(table)
    lines = console.export_text().splitlines()
    assert any(
        re.match(r" +1:1  \[\[<\|im_end\|>\]\] +<\|im_end\|> +<\|eot_id\|>", one) for one in lines
    )
    assert any(re.match(r" +-  <\|im_start\|>system", one) for one in lines)
    assert any(re.match(r" +-  <\|begin_of_text\|>", one) for one in lines)


def test_masks_come_from_the_student_s_rendering(tmp_path: Path) -> None:
    student, teacher = chat_tokenizer("qwen25"), other_tokenizer("llama3")
    spec = conversation_spec(write_rows(tmp_path / "a.jsonl", rows(6)))
    alone = open_training(
        [spec], tokenizer=student, seed=1,
        options=replace(options_of(tmp_path, teacher, train_on="last_response"), teacher=None),
    )  # fmt: skip
    for prompts in (False, True):
        options = options_of(tmp_path, teacher, train_on="last_response", distill_on_prompt=prompts)
        sample = source_of(spec, student, options).next_sample()
        other = alone._sources[0].next_sample() if not prompts else None
        inside = sample.teacher.student_chunks_S1 != NO_CHUNK
        assert ((sample.flags_S1 & KD_TRAINED > 0) == inside).all()
        trained = (sample.flags_S1 & CE_TRAINED) > 0
        if other is not None and np.array_equal(other.tokens_S1, sample.tokens_S1):
            # Cross-entropy trains the same labels as with one tokenizer.
            np.testing.assert_array_equal(trained, (other.flags_S1 & CE_TRAINED) > 0)
        texts = "".join(own for own, _ in chunk_texts(sample, student, teacher))
        assert ("why" in texts) == prompts
        if not prompts:
            assert (trained | ~inside).all()
        batch = micro_batch(pack_samples([sample]), slice(0, 1), isolate_documents=True)
        assert batch.chunk_count == sample.teacher.chunks > 0
        assert int(batch.kd_mask_bs.sum()) == int(inside.sum())


@pytest.mark.parametrize("truncation", ["right", "drop", "error"])
def test_conversations_are_whole_or_cut_behind_a_chunk(tmp_path: Path, truncation: str) -> None:
    student, teacher = chat_tokenizer("qwen25"), other_tokenizer("llama3")
    corpus = rows(12)
    spec = conversation_spec(write_rows(tmp_path / "a.jsonl", corpus))
    whole = source_of(spec, student, options_of(tmp_path, teacher), epochs=1)
    documents: dict[tuple[int, ...], tuple[int, ...]] = {}
    for sample in iter(whole.next_or_none, None):
        documents |= dict(both_sides(sample))
    assert len(documents) == 12
    sizes = [(len(own), len(other)) for own, other in documents.items()]
    # Some are too long on one side only.
    lengths = (sorted(own for own, _ in sizes)[-3], sorted(other for _, other in sizes)[-5])
    options = options_of(tmp_path, teacher, lengths, truncation=truncation)
    if truncation == "error":
        with pytest.raises(DataError, match=r"tokens of the student and \d+ of the teacher, \d+"):
            source_of(spec, student, options)
        return
    source = source_of(spec, student, options, epochs=1)
    samples = list(iter(source.next_or_none, None))
    found = [pair for sample in samples for pair in both_sides(sample)]
    fits = [own <= lengths[0] + 1 and other <= lengths[1] + 1 for own, other in sizes]
    assert 6 < sum(fits) < 12
    assert source.too_long.count == fits.count(False)
    assert len(found) == (sum(fits) if truncation == "drop" else 12)
    cut = 0
    for own, other in found:
        (mother,) = [one for one in documents if one[: len(own)] == own]
        assert documents[mother][: len(other)] == other
        cut += own != mother
    assert cut == (0 if truncation == "drop" else fits.count(False))
    assert sum(sample.teacher.chunks for sample in samples) > 0
    assert_equal_texts(samples, student, teacher)
    labels = sum(int((sample.flags_S1 & KD_TRAINED > 0).sum()) for sample in samples)
    total = int(source._prepared.index["trained"].sum())
    assert source.too_long.lost_labels == total - labels > 0


@pytest.mark.parametrize("truncation", ["left", "split"])
def test_pieces_of_a_conversation_begin_behind_a_chunk(tmp_path: Path, truncation: str) -> None:
    """The last chunks that fit, or all of them: each once, behind the token before it."""
    student, teacher = chat_tokenizer("qwen25"), other_tokenizer("llama3")
    spec = conversation_spec(write_rows(tmp_path / "a.jsonl", rows(12)))
    options = options_of(tmp_path, teacher, distill_on_prompt=True)
    whole = source_of(spec, student, options, epochs=1)
    mothers = [one for sample in iter(whole.next_or_none, None) for one in documents_of(sample)]
    assert len(mothers) == 12
    # A conversation of one turn fits, and no longer one.
    own_length, other_length = (sorted(len(one[side]) for one in mothers)[3] + 2 for side in (0, 1))
    lengths = (own_length, other_length)
    given = options_of(tmp_path, teacher, lengths, truncation=truncation, distill_on_prompt=True)
    source = source_of(spec, student, given, epochs=1)
    samples = list(iter(source.next_or_none, None))
    pieces = [one for sample in samples for one in documents_of(sample)]
    counts = [0] * len(mothers)
    for own, other in pieces:
        assert len(own) <= own_length + 1
        assert len(other) <= other_length + 1
        (number,) = (i for i, mother in enumerate(mothers) if place_of(own, mother[0]) is not None)
        mother = mothers[number]
        starts = place_of(own, mother[0]), place_of(other, mother[1])
        for piece, start, side in zip((own, other), starts, mother, strict=True):
            # The token before the cut is in no chunk; the further ones are in those of the whole.
            assert piece[0][1] == NO_CHUNK
            assert [one >= 0 for _, one in piece[1:]] == [
                one >= 0 for _, one in side[start + 1 : start + len(piece)]
            ]
            ends = (start + len(piece) == len(side), starts == (0, 0))
            assert truncation == "split" or ends[0] or ends[1]
        counts[number] += len({chunk for _, chunk in own if chunk >= 0})
        assert {chunk for _, chunk in own} == {chunk for _, chunk in other}
    chunks = [len({chunk for _, chunk in own if chunk >= 0}) for own, _ in mothers]
    is_long = [len(own) > own_length + 1 or len(other) > other_length + 1 for own, other in mothers]
    assert 6 < sum(is_long) < 12
    for count, all_of_it, long in zip(counts, chunks, is_long, strict=True):
        assert count == all_of_it if truncation == "split" or not long else 0 < count < all_of_it
    assert len(pieces) == 12 if truncation == "left" else len(pieces) > 12 + sum(is_long) // 2
    lost = source.too_long.lost_labels
    assert lost == 0 if truncation == "split" else lost > 0
    assert_equal_texts(samples, student, teacher)


Tokens = list[tuple[int, int]]  # ids with their chunks


def documents_of(sample: Sample) -> list[tuple[Tokens, Tokens]]:
    """The tokens of each document on both sides, with their chunks in the sample."""
    teacher = sample.teacher
    sides = (
        (sample.tokens_S1, teacher.student_chunks_S1, sample.document_ids_S1),
        (teacher.tokens_U1, teacher.chunks_U1, teacher.document_ids_U1),
    )
    found = []
    for number in range(int(sample.document_ids_S1.max()) + 1):
        own, other = (
            list(zip(tokens[ids == number].tolist(), chunks[ids == number].tolist(), strict=True))
            for tokens, chunks, ids in sides
        )
        found.append((own, other))
    return found


def place_of(piece: Tokens, whole: Tokens) -> int | None:
    """Where the ids of a piece are in those of a document; None if they are not."""
    ids, all_ids = [one for one, _ in piece], [one for one, _ in whole]
    places = range(len(all_ids) - len(ids) + 1)
    return next((start for start in places if all_ids[start : start + len(ids)] == ids), None)


def both_sides(sample: Sample) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The tokens of each document on both sides."""
    return [
        (tuple(token for token, _ in own), tuple(token for token, _ in other))
        for own, other in documents_of(sample)
    ]


def test_it_resumes_exactly_and_prepares_once_for_two_tokenizers(tmp_path: Path) -> None:
    student, teacher = chat_tokenizer("qwen25"), other_tokenizer("llama3")
    spec = conversation_spec(write_rows(tmp_path / "a.jsonl", rows(23)))
    options = options_of(tmp_path, teacher, packing_buffer=9)
    source = source_of(spec, student, options)
    states, samples = [], []
    for _ in range(20):
        states.append(json.loads(json.dumps(source.state_dict())))
        samples.append(source.next_sample())
    assert states[-1]["epoch"] >= 1
    for first in (0, 1, 7, 19):
        # Another process reads the cache, or prepares in worker processes.
        folder = tmp_path / "workers" if first == 7 else tmp_path
        changed = options_of(folder, teacher, packing_buffer=9, workers=2 if first == 7 else 0)
        again = source_of(spec, student, changed)
        again.load_state_dict(states[first])
        for expected in samples[first:]:
            found = again.next_sample()
            assert found.sample_id == expected.sample_id
            for one, other in ((found, expected), (found.teacher, expected.teacher)):
                for name, value in vars(other).items():
                    if isinstance(value, np.ndarray):
                        np.testing.assert_array_equal(vars(one)[name], value)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    other = source_of(
        spec, student, options_of(tmp_path, other_tokenizer("gemma"), packing_buffer=9)
    )
    assert len(list((tmp_path / "cache").iterdir())) == 2
    with pytest.raises(DataError, match="conversations differs from the checkpoint"):
        other.load_state_dict(states[3])
    longer = source_of(spec, student, options_of(tmp_path, teacher, (300, 321), packing_buffer=9))
    with pytest.raises(DataError, match=r"teacher_sequence_length differs .* \(321, was 320\)"):
        longer.load_state_dict(states[3])
    held_out = replace(options, validation_fraction=1.0)
    (one, *_) = held_out_samples([spec], tokenizer=student, options=held_out, samples=2).samples
    assert one.teacher is not None


def test_moved_and_rewritten_contents_are_in_no_chunk(tmp_path: Path) -> None:
    # Mistral's template writes the system message into the last question, and strips responses.
    student, teacher = chat_tokenizer("qwen25"), other_tokenizer("mistral_v3")
    messages = turns("ask  ", "say one.", "why", " say two.", system="be kind")
    spec = conversation_spec(write_rows(tmp_path / "a.jsonl", [{"messages": messages}]))
    options = options_of(tmp_path, teacher, distill_on_prompt=True)
    found = chunk_texts(source_of(spec, student, options).next_sample(), student, teacher)
    texts = "".join(own for own, _ in found)
    assert all(own == other or (own, other) == ("<|im_end|>", "</s>") for own, other in found)
    assert "kind" not in texts
    for text in ("one.", "two."):
        assert text in texts


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_tools_that_a_template_leaves_out_are_warned_of_once_per_side(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, side: str
) -> None:
    # This template of Phi-3 writes no tools.
    corpus: list[dict[str, Any]] = [
        *rows(3),
        {"messages": turns("a", "b", system="be kind")},
        {"messages": turns("c", "d"), "tools": TOOLS},
        {"messages": turns("e", "f"), "tools": TOOLS},
    ]
    path = write_rows(tmp_path / "a.jsonl", corpus)
    styles = ("phi3", "qwen25") if side == "student" else ("qwen25", "phi3")
    options = options_of(tmp_path, other_tokenizer(styles[1]))
    for _ in range(2):  # prepared, and from the cache
        source_of(conversation_spec(path), chat_tokenizer(styles[0]), options)
    warned = [one.message for one in caplog.records if "template leaves out" in one.message]
    template, remedy = {
        "student": ("chat template", "set data.sources.conversation.chat_template to a Jinja file"),
        "teacher": ("teacher's chat template", "put a chat_template.jinja that writes them into"),
    }[side]
    assert len(warned) == 1
    assert warned[0].startswith(f"jsonl {path}: in 2 conversations the {template} leaves out")
    assert remedy in warned[0]


def test_refusals_name_the_file_the_row_and_the_key(tmp_path: Path) -> None:
    student = chat_tokenizer("qwen25")
    path = write_rows(tmp_path / "a.jsonl", rows(3))
    bare = options_of(tmp_path, other_tokenizer("plain"))
    with pytest.raises(
        DataError, match="the teacher's tokenizer has no chat template; add a chat_"
    ):
        source_of(conversation_spec(path), student, bare)
    student_alone, plain = chat_tokenizer("plain"), conversation_spec(path, chat_template="plain")
    sample = source_of(plain, student_alone, bare).next_sample()
    texts = chunk_texts(sample, student_alone, other_tokenizer("plain"))
    assert ("<|endoftext|>", "<|endoftext|>") in texts
    gemma = options_of(tmp_path, other_tokenizer("gemma"))
    system = write_rows(tmp_path / "b.jsonl", [{"messages": turns("a", "b", system="c")}])
    with pytest.raises(DataError, match=r"b\.jsonl:1: the teacher's template: "):
        source_of(conversation_spec(system), student, gemma)
    calls = [{"messages": tool_dialogue(), "tools": TOOLS}]
    called = conversation_spec(write_rows(tmp_path / "c.jsonl", calls))
    with pytest.raises(
        DataError,
        match=r"c\.jsonl:1: the teacher's template: message 1: the chat template does not write "
        r"its tool calls; put a chat_template\.jinja that does into the folder of the teacher's",
    ):
        source_of(called, student, options_of(tmp_path, other_tokenizer("phi3")))
    # A template that changes every response: nothing is in a chunk.
    shouting = other_tokenizer("llama3")
    source = shouting.hugging_face.chat_template.replace("| trim", "| upper")
    assert source != shouting.hugging_face.chat_template
    shouting.hugging_face.chat_template = source
    changed = HuggingFaceTokenizer(shouting.hugging_face, name="shouting")
    with pytest.raises(
        DataError, match=r"data\.max_unaligned=0\.01: 3 of 3 .*a\.jsonl:3: no trained"
    ):
        source_of(conversation_spec(path), student, options_of(tmp_path, changed))

"""Conversations with every kind of tokenizer: ends of turns are tokens."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from megatron_distill.data.chat.conversations import ConversationSpec
from megatron_distill.data.chat.encode import MaskRule, label_flags
from megatron_distill.data.chat.spans import ResponseFinder
from megatron_distill.data.chat.template import chat_template, encode_rendered
from megatron_distill.data.samples import FULLY_TRAINED
from tests.support.tokenizer_kinds import tokenizer_of

# One of each class; the others of each: tests/unit/data/tokenizers/test_kinds.py.
KINDS = ("hf_bytes", "hf_unigram", "sp_suffix", "tiktoken")
TURNS = [
    {"role": "user", "content": "What is a shard?"},
    {"role": "assistant", "content": "A part of the whole."},
    {"role": "user", "content": "And a stage?"},
    {"role": "assistant", "content": "A part of the depth."},
]


@pytest.mark.parametrize("kind", KINDS)
def test_responses_and_their_ends_are_trained_with_every_tokenizer(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    template = chat_template(ConversationSpec(chat_template="plain"), tokenizer)
    rendered = ResponseFinder(template).find(TURNS)
    (encoding,) = encode_rendered(tokenizer, [rendered.text])
    flags_n = label_flags(encoding, rendered, [1.0] * len(TURNS), MaskRule())
    trained = encoding.ids_n[flags_n == FULLY_TRAINED].tolist()
    assert trained.count(tokenizer.eos_id) == 2
    assert trained[-1] == tokenizer.eos_id
    assert encoding.ids_n.tolist().count(tokenizer.eos_id) == 2
    end = tokenizer.decode([tokenizer.eos_id])
    first, second, rest = tokenizer.decode(trained).split(end)
    assert (first.strip(), second.strip(), rest) == (
        TURNS[1]["content"],
        TURNS[3]["content"],
        "",
    )
    untrained = tokenizer.decode(encoding.ids_n[flags_n == 0].tolist())
    assert "A part" not in untrained


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_of_a_text_are_tokens_and_spans_go_on_behind_them(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    end = tokenizer.decode([tokenizer.eos_id])
    texts = ["", end, f"one{end}{end}two", f"{end}three", "four", f"five{end}"]
    for text, found in zip(texts, encode_rendered(tokenizer, texts), strict=True):
        places = [at for at in range(len(text)) if text.startswith(end, at)]
        is_end_n = found.ids_n == tokenizer.eos_id
        assert found.starts_n[is_end_n].tolist() == places
        assert found.stops_n[is_end_n].tolist() == [place + len(end) for place in places]
        assert (np.diff(found.starts_n) >= 0).all()
        covered = {
            at
            for start, stop in zip(found.starts_n, found.stops_n, strict=True)
            for at in range(start, stop)
        }
        assert covered == set(range(len(text)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_process_gets_the_same_tokenizer(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.identity == tokenizer.identity
    (own,), (other,) = (one.encode_batch(["Grüße, 世界"]) for one in (tokenizer, again))
    assert own.tolist() == other.tolist()

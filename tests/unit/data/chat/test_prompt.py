"""Prompts and conversations as tokens: chat templates, plain text, spans of responses."""

from __future__ import annotations

import pickle
from copy import copy

import numpy as np
import pytest

from megatron_distill.data.chat.conversations import ConversationSpec
from megatron_distill.data.chat.encode import MaskRule, chat_prompt, label_flags, plain_prompt
from megatron_distill.data.chat.spans import ResponseFinder
from megatron_distill.data.chat.template import chat_template, encode_rendered
from megatron_distill.data.samples import FULLY_TRAINED
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.errors import ConfigError
from tests.support.chat_fixtures import chat_tokenizer
from tests.support.tokenizer_kinds import tokenizer_of

ENDS = {
    "llama3": "<|eot_id|>",
    "llama31": "<|eot_id|>",
    "qwen25": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "generation_blocks": "<|im_end|>",
    "mistral": "</s>",
    "mistral_v3": "</s>",
    "phi3": "<|end|>",
    "gemma": "<end_of_turn>",
}


def ending_with(tokenizer: Tokenizer, token: int) -> Tokenizer:
    """The tokenizer of a folder whose generation settings name one more token."""
    other = copy(tokenizer)
    other.end_ids = (tokenizer.eos_id, token)
    return other


@pytest.mark.parametrize("style", ENDS)
def test_the_prompt_is_that_of_transformers_and_the_end_of_its_turn_stops_it(style: str) -> None:
    tokenizer = chat_tokenizer(style)
    messages = [{"role": "user", "content": "Is it sunny?"}]
    expected = tokenizer.hugging_face.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    found = chat_prompt(tokenizer, "Is it sunny?")
    assert list(found.ids) == expected
    assert set(found.stop_ids) == {tokenizer.eos_id, tokenizer.special_ids[ENDS[style]]}
    more = chat_prompt(ending_with(tokenizer, 7), "Is it sunny?")
    assert set(more.stop_ids) == {*found.stop_ids, 7}


def test_a_system_message_comes_first() -> None:
    tokenizer = chat_tokenizer("qwen25")
    text = tokenizer.decode(chat_prompt(tokenizer, "Hi", system="Be brief.").ids)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    with pytest.raises(ConfigError, match="--chat: gemma: the chat template refuses it: .*System"):
        chat_prompt(chat_tokenizer("gemma"), "Hi", system="Be brief.")


def test_a_tokenizer_without_a_template_is_named() -> None:
    tokenizer = chat_tokenizer("plain")
    with pytest.raises(ConfigError, match="the tokenizer plain has no chat template; add a chat_t"):
        chat_prompt(tokenizer, "Hi")
    assert plain_prompt(tokenizer, "Hi").stop_ids == (tokenizer.eos_id,)
    assert plain_prompt(ending_with(tokenizer, 7), "Hi").stop_ids == (tokenizer.eos_id, 7)
    with pytest.raises(ConfigError, match="--prompt is empty"):
        plain_prompt(tokenizer, "")


@pytest.mark.parametrize(("adds_bos", "add_bos"), [(True, None), (False, True)])
def test_a_plain_prompt_begins_as_the_documents_of_training_do(
    adds_bos: bool, add_bos: bool | None
) -> None:
    tokenizer = chat_tokenizer("gemma")
    tokenizer.adds_bos = adds_bos
    ids = tokenizer.encode_batch(["Hi"])[0].tolist()
    found = plain_prompt(tokenizer, "Hi", add_bos=add_bos)
    assert list(found.ids) == [tokenizer.bos_id, *ids]
    assert list(found.text_ids) == ids
    assert plain_prompt(tokenizer, "", add_bos=add_bos).ids == (tokenizer.bos_id,)
    plain = plain_prompt(tokenizer, "Hi", add_bos=False)
    assert list(plain.ids) == list(plain.text_ids) == ids


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

"""A user message as the prompt of a chat model."""

from __future__ import annotations

import pytest

from megatron_distill.data.chat.encode import chat_prompt, plain_prompt
from megatron_distill.errors import ConfigError
from tests.support.chat_fixtures import chat_tokenizer

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

"""Prompts and answers as tokens, and differences between models on the same items."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from megatron_distill.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron_distill.errors import DataError
from megatron_distill.evaluation.tasks.encode import TextEncoder, rolling_requests
from megatron_distill.evaluation.tasks.paired import ItemValues, TaskItems, differences
from megatron_distill.evaluation.tasks.prompts import Prompt
from tests.support.chat_fixtures import chat_tokenizer


def tokenizer(*, adds_bos: bool) -> HuggingFaceTokenizer:
    found = chat_tokenizer("gemma")
    found.adds_bos = adds_bos
    return found


PROMPT = Prompt("", "", (), "is it sunny?", " ", "\n\n")


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("has_bos", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_there_is_one_begin_of_text_token_or_none(
    adds_bos: bool, has_bos: bool, chat: bool
) -> None:
    tokens = tokenizer(adds_bos=adds_bos)
    encoder = TextEncoder.of(tokens, chat=chat, named="task t")
    text = encoder.rendered(PROMPT, named="task t")
    if has_bos and not text.startswith("<bos>"):
        text = f"<bos>{text}"
    if not has_bos:
        text = text.removeprefix("<bos>")
    (ids,) = encoder.texts([text])
    assert (ids == tokens.bos_id).sum() == (adds_bos or has_bos)
    if adds_bos or has_bos:
        assert ids[0] == tokens.bos_id
    with pytest.raises(DataError, match="two begin-of-text tokens"):
        encoder.texts([f"<bos><bos>{text}"])


@pytest.mark.parametrize(("adds_bos", "add_bos"), [(True, False), (False, True)])
def test_prompts_begin_as_the_documents_of_training_do(adds_bos: bool, add_bos: bool) -> None:
    tokens = tokenizer(adds_bos=adds_bos)
    encoder = TextEncoder.of(tokens, chat=False, named="task t", add_bos=add_bos)
    (ids,) = encoder.texts(["is it sunny?"])
    assert (ids == tokens.bos_id).sum() == int(add_bos)
    # Templates decide for chats.
    chat = TextEncoder.of(tokens, chat=True, named="task t", add_bos=add_bos)
    (ids,) = chat.texts([chat.rendered(PROMPT, named="task t")])
    assert (ids == tokens.bos_id).sum() == 1


def test_a_chat_prompt_ends_with_the_turn_of_the_answer() -> None:
    encoder = TextEncoder.of(tokenizer(adds_bos=True), chat=True, named="task t")
    shots = (("what is it?", "A"),)
    text = encoder.rendered(Prompt("", "", shots, "is it sunny?", " ", "\n\n"), named="task t")
    assert text.count("<start_of_turn>model\n") == 2
    assert text.endswith("is it sunny?<end_of_turn>\n<start_of_turn>model\n")
    plain = chat_tokenizer("plain")
    with pytest.raises(DataError, match="task t: chat is true, but plain has no chat template"):
        TextEncoder.of(plain, chat=True, named="task t")


def test_answers_are_cut_behind_the_tokens_of_their_context() -> None:
    tokens = tokenizer(adds_bos=False)
    encoder = TextEncoder(tokens)

    def ids(text: str) -> list[int]:
        return [int(one) for one in tokens.encode_batch([text])[0]]

    ((first, second),) = encoder.requests([("the weather", [" in Paris", " is"])])
    assert first.context.tolist() == second.context.tolist() == ids("the weather")
    assert first.answer.tolist() == ids("the weather in Paris")[len(ids("the weather")) :]
    # Spaces at the end of a context belong to the answer.
    ((moved,),) = encoder.requests([("the weather ", ["in Paris"])])
    assert moved.context.tolist() == first.context.tolist()
    assert moved.answer.tolist() == first.answer.tolist()
    # A merge over the boundary leaves a shorter answer, as in the reference.
    ((merged,),) = encoder.requests([("the weath", ["er"])])
    whole, alone = ids("the weather"), ids("the weath")
    assert merged.context.tolist() == alone
    assert merged.answer.tolist() == whole[len(alone) :]


def test_an_empty_context_is_the_prefix_token_unless_the_answer_begins_with_it() -> None:
    tokens = tokenizer(adds_bos=False)
    encoder = TextEncoder(tokens)
    ((request,),) = encoder.requests([("", ["hello"])])
    assert request.context.tolist() == [tokens.bos_id]
    assert request.answer.tolist() == tokens.encode_batch(["hello"])[0].tolist()
    chat = TextEncoder.of(tokens, chat=True, named="t")
    ((begun,),) = chat.requests([("", ["<bos>hello"])])
    assert begun.context.tolist() == [tokens.bos_id]
    assert begun.answer.tolist() == request.answer.tolist()


@pytest.mark.parametrize("length", [1, 5, 6, 7, 12, 23])
def test_rolling_windows_score_each_token_once(length: int) -> None:
    ids = np.arange(100, 100 + length).astype(np.int32)
    windows = rolling_requests(ids, prefix_id=7, positions=6)
    assert np.concatenate([window.answer for window in windows]).tolist() == ids.tolist()
    assert windows[0].context.tolist() == [7]
    for window in windows[1:]:
        # Each later window fills the model, and its context comes right before it.
        assert len(window.context) + len(window.answer) == 7
        assert window.context[-1] + 1 == window.answer[0]
    assert rolling_requests(ids[:0], prefix_id=7, positions=6) == []


def hits(values: list[bool] | np.ndarray, prompt_hash: str = "sha256:0") -> dict[str, TaskItems]:
    one = ItemValues.of_mean(np.array(values, float))
    return {"quiz": TaskItems(prompt_hash, {"acc": one})}


def test_the_error_is_that_of_the_differences_of_pairs() -> None:
    """Far smaller than that of two independent samples, where both models are often right."""
    generator = np.random.default_rng(3)
    first = generator.random(4000) < 0.7
    second = np.where(generator.random(4000) < 0.05, ~first, first)
    found = differences(hits(first), hits(second))["quiz"]["acc"]
    pairs = first.astype(float) - second
    assert found["difference"] == pytest.approx(pairs.mean())
    exact = pairs.std(ddof=1) / math.sqrt(4000)
    assert found["stderr"] == pytest.approx(exact, rel=0.06)
    assert found["low"] == pytest.approx(pairs.mean() - 1.96 * exact, abs=0.3 * exact)
    assert found["high"] == pytest.approx(pairs.mean() + 1.96 * exact, abs=0.3 * exact)
    alone = math.sqrt(2 * 0.7 * 0.3 / 4000)
    assert found["stderr"] < 0.5 * alone
    assert found["n"] == 4000


def test_the_interval_covers_the_true_difference_at_its_nominal_rate() -> None:
    generator = np.random.default_rng(5)
    covered = 0
    for _ in range(200):
        first = generator.random(300) < 0.6
        second = np.where(generator.random(300) < 0.2, generator.random(300) < 0.3, first)
        found = differences(hits(first), hits(second))["quiz"]["acc"]
        covered += found["low"] <= 0.6 - (0.8 * 0.6 + 0.2 * 0.3) <= found["high"]
    assert 180 <= covered <= 199


def test_a_ratio_of_sums_is_resampled_as_one() -> None:
    """Bits per byte: an item brings its bits and its bytes along."""
    generator = np.random.default_rng(7)
    sizes = generator.integers(20, 2000, 500).astype(float)
    bits = [sizes * generator.normal(mean, 0.1, 500) for mean in (1.5, 1.4)]
    one, other = (
        {"text": TaskItems("sha256:0", {"bits_per_byte": ItemValues(values, sizes)})}
        for values in bits
    )
    found = differences(one, other)["text"]["bits_per_byte"]
    ratio = (bits[0] - bits[1]).sum() / sizes.sum()
    assert found["difference"] == pytest.approx(ratio)
    residuals = bits[0] - bits[1] - ratio * sizes
    error = math.sqrt(500) * residuals.std(ddof=1) / sizes.sum()  # the delta method
    assert found["stderr"] == pytest.approx(error, rel=0.1)


def test_the_seed_decides_the_interval_and_equal_models_have_no_difference() -> None:
    first, second = [True, False] * 40, [True, True, False, False] * 20
    found = differences(hits(first), hits(second))
    assert differences(hits(first), hits(second)) == found
    other = differences(hits(first), hits(second), seed=1)["quiz"]["acc"]
    assert other["difference"] == found["quiz"]["acc"]["difference"]
    assert other["stderr"] != found["quiz"]["acc"]["stderr"]
    same = differences(hits(first), hits(first))["quiz"]["acc"]
    assert (same["difference"], same["low"], same["high"], same["stderr"]) == (0, 0, 0, 0)


def test_tasks_with_other_prompts_are_left_out_and_items_survive_a_file() -> None:
    first = hits([True, False])
    assert differences(first, hits([True, False], "sha256:1")) == {}
    assert differences(first, {}) == {}
    plain = json.loads(json.dumps(first["quiz"].as_dict()))
    assert differences({"quiz": TaskItems.from_dict(plain)}, first) == differences(first, first)
    del plain["measures"]["acc"]["weights"][0]
    with pytest.raises(ValueError, match="different lengths"):
        TaskItems.from_dict(plain)

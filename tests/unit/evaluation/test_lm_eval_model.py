"""The model class of lm-evaluation-harness: settings, chat templates, lost tokens, its results.

Its scores and texts are compared with the harness's own backend in `tests/e2e/evaluation`.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_distill.data.tokenizers.open import load_tokenizer
from megatron_distill.errors import ConfigError, DataError
from megatron_distill.evaluation.requests import Request, Score, WrittenText
from megatron_distill.evaluation.tasks.encode import TextEncoder
from megatron_distill.models.generation import Sampling
from tests.support.chat_fixtures import STYLES, chat_tokenizer, turns

pytest.importorskip("lm_eval", reason="lm-eval is not installed: make peers")

from lm_eval.api.instance import Instance

from megatron_distill.evaluation.lm_eval_model import (
    ScorerLM,
    harness_tasks,
    run_harness,
)
from megatron_distill.evaluation.lm_eval_settings import writing_settings

GREEDY = Sampling()


@pytest.mark.parametrize(
    ("given", "limit", "sampling"),
    [
        ({}, 256, GREEDY),
        ({"max_gen_toks": 7}, 7, GREEDY),
        ({"max_new_tokens": 7}, 7, GREEDY),
        ({"max_tokens": 7}, 7, GREEDY),
        ({"max_completion_tokens": 7}, 7, GREEDY),
        ({"max_tokens": 9, "max_gen_toks": 7}, 7, GREEDY),
        ({"temperature": 0.0}, 256, GREEDY),
        ({"temperature": 0.7}, 256, Sampling(temperature=0.7)),
        ({"temperature": 0.7, "do_sample": False, "top_p": 0.9}, 256, GREEDY),
        (
            {"temperature": 0.8, "do_sample": True, "top_p": 0.95, "top_k": 5, "min_p": 0.1},
            256,
            Sampling(temperature=0.8, top_p=0.95, top_k=5, min_p=0.1),
        ),
        ({"temperature": 1, "top_k": 0, "num_beams": 1}, 256, Sampling(temperature=1.0)),
        ({"temperature": 1, "top_k": -1, "seed": 3}, 256, Sampling(temperature=1.0, seed=3)),
        ({"temperature": 1, "seed": 2**60 + 1}, 256, Sampling(temperature=1.0, seed=2**60 + 1)),
        ({"do_sample": False, "use_cache": False, "repetition_penalty": 1.0}, 256, GREEDY),
    ],
    ids=str,
)
def test_settings_of_generation_have_the_harness_s_names_and_defaults(
    given: dict[str, Any], limit: int, sampling: Sampling
) -> None:
    found = writing_settings({"until": ["\n", ""], **given}, 0)
    assert (found.stops, found.limit, found.sampling) == (("\n",), limit, sampling)
    assert writing_settings({"until": "a", **given}, 0).stops == ("a",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"do_sample": True}, "do_sample = true and temperature = 0 .* above 0, or set do_sample"),
        ({"do_sample": True, "temperature": 0.0}, "temperature = 0 in gen_kwargs"),
        ({"num_beams": 4}, "num_beams = 4 in gen_kwargs is none .*; leave it out"),
        ({"max_length": 90}, "max_length = 90 .*; give max_gen_toks"),
        ({"temperature": "warm"}, "gen_kwargs = .*warm.*; correct them"),
        ({"temperature": 1, "top_p": 1.5}, "top_p=1.5"),
        ({"temperature": 1, "top_p": "high"}, "gen_kwargs = .*'high'.*; correct them"),
        ({"temperature": 1, "seed": "a"}, "gen_kwargs = .*'a'.*; correct them"),
        ({"temperature": 1, "top_k": 1.5}, "1.5 is no whole number; correct them"),
        ({"temperature": 1, "top_k": math.inf}, "cannot convert float infinity .*; correct them"),
        ({"max_gen_toks": 0}, "max_gen_toks = 0 in gen_kwargs; give 1 or more"),
        ({"max_gen_toks": -3}, "max_gen_toks = -3 in gen_kwargs; give 1 or more"),
    ],
    ids=str,
)
def test_settings_that_the_sampler_does_not_have_are_named(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        writing_settings(given, 0)


class Positions:
    """A scorer of a model of some positions that finds every answer certain."""

    def __init__(self, positions: int) -> None:
        self.positions = positions

    def score(
        self, requests: Sequence[Request], *, advanced: Callable[[int], None] | None = None
    ) -> list[Score]:
        del advanced
        return [Score(0.0, True)] * len(requests)


def model(style: str, positions: int = 4096) -> Any:
    return ScorerLM(Positions(positions), TextEncoder(chat_tokenizer(style)))


def asked(task: str, *given: str, kind: str = "loglikelihood") -> Instance:
    """A request of the harness."""
    return Instance(kind, {}, given, 0, metadata=(task, 0, 1))


def of_the_harness(style: str, messages: list[dict[str, Any]], prompted: bool) -> str:
    """The text of the harness's Hugging Face backend, which needs its tokenizer alone for it."""
    from lm_eval.models.huggingface import HFLM

    backend = SimpleNamespace(tokenizer=chat_tokenizer(style).hugging_face, chat_template_args={})
    text: str = HFLM.apply_chat_template(backend, messages, add_generation_prompt=prompted)
    return text


TEMPLATES = sorted(set(STYLES) - {"plain"})


@pytest.mark.parametrize("style", TEMPLATES)
@pytest.mark.parametrize("system", [None, "Answer in one word."])
def test_chats_are_those_of_the_harness_s_own_backend(style: str, system: str | None) -> None:
    """With a prompt for an answer, and with an answer's beginning whose turn stays open.

    Templates without a system role lose that message.
    """
    asked = turns("Is it sunny?", "yes", "Why?", system=system)
    begun = [*asked, {"role": "assistant", "content": "The answer is"}]
    for messages, prompted in ((asked, True), (begun, False)):
        text = model(style).apply_chat_template(messages, add_generation_prompt=prompted)
        assert text == of_the_harness(style, messages, prompted)
        assert prompted or text.endswith("The answer is")


def test_a_refused_system_message_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    found = model("gemma")
    with caplog.at_level("WARNING", logger="megatron_distill"):
        for _ in range(2):
            text = found.apply_chat_template(turns("Is it sunny?", system="Be short."))
            assert "Be short." not in text
    assert len([one for one in caplog.messages if "refuses a system message" in one]) == 1
    with pytest.raises(DataError, match="--apply-chat-template: the chat template refuses it"):
        found.apply_chat_template(turns("a", "b")[1:])
    with pytest.raises(DataError, match="plain has no chat template; .*leave the option out$"):
        model("plain").apply_chat_template(turns("a"))


def test_requests_that_lose_tokens_are_counted_by_task(caplog: pytest.LogCaptureFixture) -> None:
    """The last token of an answer is predicted, not read: positions + 1 tokens fit."""
    found = model("plain", positions=8)
    pairs = (("short", "zzzzzzz", "zz"), ("long", "zzzzzzzz", "zz"), ("long", "z", "zz"))
    with caplog.at_level("WARNING", logger="megatron_distill"):
        found.loglikelihood([asked(*pair) for pair in pairs], disable_tqdm=True)
    assert dict(found.truncated) == {"long": 1}
    (logged,) = caplog.messages
    assert "--lm-eval long: longer than the model's 8 positions, and cut" in logged
    assert "1 of 2 requests; lower --num-fewshot if" in logged
    assert logged.endswith("or take a model with more positions"), "the scorer takes all it has"
    caplog.clear()
    shorter = ScorerLM(Positions(8), TextEncoder(chat_tokenizer("plain")), most=16)
    with caplog.at_level("WARNING", logger="megatron_distill"):
        shorter.loglikelihood([asked(*pairs[1])], disable_tqdm=True)
    assert caplog.messages[0].endswith("or raise evaluation.max_length, to 16 at most")


@pytest.mark.parametrize("style", ["plain", "llama3", "gemma"])
def test_results_tell_of_the_tokenizer_as_the_harness_does(style: str) -> None:
    from lm_eval.loggers.utils import add_tokenizer_info

    named = chat_tokenizer(style).hugging_face
    backend = SimpleNamespace(tokenizer=named, eot_token_id=named.eos_token_id, max_length=8)
    expected: dict[str, Any] = {}
    add_tokenizer_info(expected, backend)
    assert expected
    assert model(style, positions=8).tokenizer_info() == expected


@dataclass(frozen=True)
class Whole:
    """A scorer by whole passes of a model of transformers."""

    model: torch.nn.Module
    positions: int

    @torch.no_grad()
    def score(
        self, requests: Sequence[Request], *, advanced: Callable[[int], None] | None = None
    ) -> list[Score]:
        del advanced
        found = []
        for request in requests:
            ids = torch.from_numpy(np.concatenate([request.context, request.answer])).long()
            ids = ids[-self.positions - 1 :]
            rows = self.model(ids[None, :-1]).logits[0].double().log_softmax(-1)
            answer, rows = ids[-len(request.answer) :], rows[-len(request.answer) :]
            greedy = bool((rows.argmax(-1) == answer).all())
            found.append(Score(rows.gather(1, answer[:, None]).sum().item(), greedy))
        return found


@pytest.fixture(scope="module", params=[True, False], ids=["adds BOS", "adds none"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Our class and the harness's backend of one random model, whose tokenizer adds BOS or not."""
    import transformers
    from lm_eval.models.huggingface import HFLM
    from tokenizers.processors import TemplateProcessing

    folder = tmp_path_factory.mktemp("model")
    named = copy.deepcopy(chat_tokenizer("gemma").hugging_face)
    if request.param:
        bos = (named.bos_token, named.bos_token_id)
        named._tokenizer.post_processor = TemplateProcessing(f"{bos[0]} $A", None, [bos])
    named.save_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.adds_bos == request.param
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    shape = transformers.LlamaConfig(
        vocab_size=len(named), num_attention_heads=2, max_position_embeddings=64,
        initializer_range=0.5, **sizes,
    )  # fmt: skip
    transformers.LlamaForCausalLM(shape).save_pretrained(folder)
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)
    return ScorerLM(Whole(theirs.model, 64), TextEncoder(tokenizer)), theirs


@pytest.mark.slow
@pytest.mark.parametrize("has_bos", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_texts_begin_as_in_the_harness_s_own_backend(both: Any, has_bos: bool, chat: bool) -> None:
    """One BOS or none, in contexts and in whole texts; behind an empty context, and by itself."""
    ours, theirs = both
    text = "is it sunny?"
    if chat:
        text = ours.apply_chat_template(turns(text))
    text = text.removeprefix("<bos>")
    if has_bos:
        text = f"<bos>{text}"
    assert ours.tok_encode(text) == theirs.tok_encode(text)
    expected = has_bos or ours._encoder.tokenizer.adds_bos
    assert ours.tok_encode(text).count(ours._encoder.tokenizer.bos_id) == expected
    pairs = [(text, " yes"), (f"{text} ", "no"), ("", text), (text * 9, " yes")]
    found, wanted = (
        one.loglikelihood([asked("task", *pair) for pair in pairs], disable_tqdm=True)
        for one in both
    )
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in wanted], abs=1e-4)
    whole = [asked("task", one, kind="loglikelihood_rolling") for one in (text, text * 9)]
    rolled = [one.loglikelihood_rolling(whole, disable_tqdm=True) for one in both]
    assert rolled[0] == pytest.approx(rolled[1], abs=1e-4)


class Listening(Positions):
    """A scorer that keeps what it was asked."""

    def score(self, requests: Sequence[Request], **_: Any) -> list[Score]:
        self.asked = [(one.context.tolist(), one.answer.tolist()) for one in requests]
        return [Score(0.0, True)] * len(requests)


def test_an_answer_after_a_blank_context_is_scored_whole_and_one_without_tokens_refused() -> None:
    """Blank contexts have no token: then the prefix token is before the answer."""
    tokenizer = chat_tokenizer("plain")
    scorer = Listening(64)
    ours = ScorerLM(scorer, TextEncoder(tokenizer))
    ours.loglikelihood([asked("task", " ", "sunny"), asked("task", "", " sunny")])
    (blank, empty) = scorer.asked
    assert blank == empty == ([ours.prefix_token_id], ours.tok_encode(" sunny"))
    message = r"lm-eval: the answer 'b' after 'a' has no token of its own; begin it with a space"
    with pytest.raises(DataError, match=message):
        ours._loglikelihood_tokens([(("a", "b"), [5], [])])


class Drawing:
    """A writer that keeps its arguments, and writes special tokens beside the text."""

    def __init__(self) -> None:
        self.keys: dict[tuple[int, ...], list[int]] = {}
        self.stop_ids: tuple[int, ...] = ()

    def write(self, prompts: Sequence[Sequence[int]], **given: Any) -> list[WrittenText]:
        self.stop_ids = given["stop_ids"]
        for prompt, key in zip(prompts, given["samples"], strict=True):
            self.keys.setdefault(tuple(prompt), []).append(key)
        return [WrittenText("<eos>sunny<bos> today", False)] * len(prompts)


def drawn(task: str, number: int, text: str) -> Instance:
    settings = {"temperature": 1.0, "do_sample": True, "until": ["."]}
    return Instance("generate_until", {}, (text, settings), 0, (task, number, 1))


def test_draws_are_those_of_task_document_and_repeat_whatever_stands_beside_them() -> None:
    first = [drawn("a", number, f"question {number}") for number in (0, 1) for _ in range(2)]
    others = [drawn("b", 0, "other"), drawn("c", 1, "")]
    found = []
    tokenizer = copy.copy(chat_tokenizer("gemma"))
    tokenizer.end_ids = (tokenizer.eos_id, 7, 9)
    for requests in (first, [*others, *first], [*first, *others]):
        writer = Drawing()
        ours = ScorerLM(Positions(600), TextEncoder(tokenizer), writer)
        texts = ours.generate_until(requests)
        assert set(texts) == {"sunny today"}, "special tokens are left out"
        assert {7, 9, ours.eot_token_id} <= set(writer.stop_ids)
        found.append([writer.keys[tuple(ours.tok_encode(one.args[0]))] for one in first[::2]])
        if len(requests) > len(first):
            assert (ours.prefix_token_id,) in writer.keys, "an empty prompt"
    assert found[0] == found[1] == found[2]
    assert len({key for keys in found[0] for key in keys}) == 4


class Alternating:
    """A writer of one text, of which every other one is cut."""

    def write(self, prompts: Sequence[Sequence[int]], **_: Any) -> list[WrittenText]:
        return [WrittenText("sunny", number % 2 == 1) for number in range(len(prompts))]


@pytest.mark.slow
def test_results_have_standard_errors_and_count_the_texts_that_were_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Means have theirs in closed form, other metrics by resampling; results are printed alone."""
    file = tmp_path / "rows.jsonl"
    rows = [{"q": f"Is it sunny {n}?", "right": n % 2} for n in range(6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    choices = {"output_type": "multiple_choice", "doc_to_choice": ["no", "yes"]}
    choices["metric_list"] = [{"metric": "acc"}]
    words = {"output_type": "loglikelihood", "metric_list": [{"metric": "perplexity"}]}
    texts = {"output_type": "generate_until", "metric_list": [{"metric": "exact_match"}]}
    for name, own in (("own_choices", choices), ("own_words", words), ("own_texts", texts)):
        task = {"task": name, "dataset_path": "json", "test_split": "test", **own}
        task |= {"doc_to_text": "{{q}}", "doc_to_target": "{{right}}"}
        files = {"data_files": {"test": str(file)}, "cache_dir": str(tmp_path / "cache")}
        (tmp_path / f"{name}.yaml").write_text(json.dumps({**task, "dataset_kwargs": files}))
    model = ScorerLM(Positions(4096), TextEncoder(chat_tokenizer("plain")), Alternating())
    tasks = harness_tasks(["own_choices", "own_words", "own_texts"], include=str(tmp_path))
    before = os.environ.get("DISABLE_MULTIPROC")
    found = run_harness(model, tasks, limit=None)
    results = found["results"]
    # Half of six are right: the deviation of the values is that of a coin, with one item less.
    assert results["own_choices"]["acc,none"] == 0.5
    assert results["own_choices"]["acc_stderr,none"] == pytest.approx(math.sqrt(0.25 / 5))
    assert results["own_words"]["perplexity_stderr,none"] == 0.0, "every answer is certain"
    assert results["own_texts"]["exact_match_stderr,none"] == 0.0
    assert found["cut"] == {"own_texts": 3}
    assert capsys.readouterr().out == ""
    assert os.environ.get("DISABLE_MULTIPROC") == before

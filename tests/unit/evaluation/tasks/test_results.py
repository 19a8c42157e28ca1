"""Preparation and results: truncation, hashes, accuracies, standard errors, bits per byte."""

from __future__ import annotations

import json
import math
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_distill.data.tokenizers.open import Tokenizer, train_bpe
from megatron_distill.errors import ConfigError, DataError
from megatron_distill.evaluation.requests import Score, WrittenText
from megatron_distill.evaluation.tasks.grading import Graded
from megatron_distill.evaluation.tasks.paired import TaskItems
from megatron_distill.evaluation.tasks.prepared import PreparedTask, prepare_task
from megatron_distill.evaluation.tasks.record import load_task
from megatron_distill.evaluation.tasks.results import (
    scored_items,
    task_result,
    written_items,
    written_result,
)
from tests.support.chat_fixtures import chat_tokenizer
from tests.unit.evaluation.tasks import published
from tests.unit.evaluation.tasks.test_prompts import lines


@cache
def tokenizer() -> Tokenizer:
    """One in which the letters after a space are tokens."""
    texts = [f"Answer: {letter}\n\nWhich of these is {letter}?" for letter in "ABCD"]
    return train_bpe(texts * 8, vocab_size=330)


def prepared(tmp_path: Path, positions: int = 4000, **changes: Any) -> PreparedTask:
    files = lines(tmp_path / "mmlu.jsonl", published.MMLU)
    task = load_task("mmlu", {"files": [files], "shot_files": [files], "shots": 2, **changes})
    return prepare_task(task, tokenizer(), positions=positions)


def scores(task: PreparedTask, right: float = -1.0) -> list[Score]:
    """The right choice has the given log-probability in every other item, the rest -3."""
    found = []
    for number, item in enumerate(task.items):
        log_probs = [-3.0] * item.requests
        log_probs[item.right] = right if number % 2 == 0 else -4.0
        found += [Score(one, False) for one in log_probs]
    return found


def test_accuracy_its_error_and_the_mass_of_the_letters(tmp_path: Path) -> None:
    task = prepared(tmp_path)
    assert task.is_single
    found = task_result(task, scores(task))
    assert (found["acc"], found["n"]) == (0.5, 8)
    assert found["acc_stderr"] == pytest.approx(math.sqrt(0.25 / 7))
    high, low = math.exp(-1) + 3 * math.exp(-3), math.exp(-4) + 3 * math.exp(-3)
    assert found["letter_mass"] == pytest.approx((high + low) / 2)
    assert found["letter_mass_stderr"] == pytest.approx((high - low) / 2 / math.sqrt(7))
    assert (found["acc_where_mass"], found["acc_where_mass_n"]) == (1.0, 4)
    assert found["acc_where_mass_stderr"] == 0.0
    assert set(found["groups"]["virology"]) == {"acc", "acc_stderr", "n"}
    assert found["not_comparable"] == ["letter_mass"]
    assert (found["shots_dropped"], found["truncated"]) == (0, 0)


def test_choices_by_length_ties_and_values_that_are_not_numbers(tmp_path: Path) -> None:
    files = lines(tmp_path / "arc.jsonl", published.ARC)
    task = prepare_task(load_task("arc_challenge", {"files": [files]}), tokenizer(), positions=500)
    # rain, a stone, light, dust: 4, 7, 5 and 4 characters; right are the first and the second.
    by_hand = [Score(one, False) for one in (-4.0, -6.3, -9.0, -9.0, -5.0, -5.0, -9.0, -9.0)]
    found = task_result(task, by_hand)
    assert found["acc"] == 0.5, "a tie goes to the first choice"
    assert found["acc_norm"] == 0.5, "-6.3 over 7 characters is more than -4 over 4"
    assert "letter_mass" not in found
    broken = [Score(math.nan, False), *by_hand[1:]]
    assert task_result(task, broken)["not_finite"] == 1


def test_the_calibration_error_is_that_of_the_softmax_of_the_choices(tmp_path: Path) -> None:
    """Against bins in loops, with the standard error of their signed gaps."""
    task = prepared(tmp_path)
    generator = np.random.default_rng(4)
    log_probs = generator.normal(-40.0, 1.5, (len(task.items), 4))
    log_probs[3] = -700.0, -900.0, -745.0, -701.0  # whose exponentials are no numbers
    found = task_result(task, [Score(float(one), False) for one in log_probs.ravel()])
    bins: dict[int, list[tuple[float, float]]] = {}
    for item, row in zip(task.items, log_probs, strict=True):
        confidence = 1.0 / math.fsum(math.exp(one - row.max()) for one in row)
        own = (float(row.argmax() == item.right), confidence)
        bins.setdefault(min(14, int(confidence * 15)), []).append(own)
    gaps, error = [], 0.0
    for pairs in bins.values():
        accuracy, confidence = (sum(one[place] for one in pairs) / len(pairs) for place in (0, 1))
        error += abs(accuracy - confidence) * len(pairs) / len(task.items)
        gaps += [math.copysign(1, accuracy - confidence) * (a - c) for a, c in pairs]
    assert len(bins) > 2
    assert found["calibration_error"] == pytest.approx(error, rel=1e-12)
    expected = np.std(gaps, ddof=1) / math.sqrt(len(gaps))
    assert found["calibration_error_stderr"] == pytest.approx(expected, rel=1e-12)
    assert "calibration_error" not in found["groups"]["virology"]


def test_a_calibrated_model_has_no_calibration_error(tmp_path: Path) -> None:
    """Half of the items are right, all with a confidence of one half; or no item has a score."""
    task = prepared(tmp_path)
    rows: list[float] = []
    for number, item in enumerate(task.items):
        row, half = [-math.inf] * item.requests, math.log(0.5)
        right, wrong = item.right, (item.right + 1) % item.requests
        row[right], row[wrong] = half, half
        row[right if number % 2 else wrong] += 1e-12
        rows += row
    found = task_result(task, [Score(one, False) for one in rows])
    assert found["acc"] == 0.5
    assert found["calibration_error"] == pytest.approx(0.0, abs=1e-9)
    first = task.items[0].requests
    some = [Score(math.nan if place < first else -1.0, False) for place in range(len(rows))]
    assert task_result(task, some)["calibration_error"] > 0, "the item without a score is left out"
    none = [Score(math.nan, False)] * len(rows)
    assert not [name for name in task_result(task, none) if "calibration" in name]


def test_prompts_lose_whole_examples_then_tokens_and_both_are_counted(tmp_path: Path) -> None:
    whole = prepared(tmp_path)
    longest = max(len(one.context) for one in whole.requests)
    shorter = prepared(tmp_path, positions=longest - 1)
    assert shorter.shots_dropped > 0
    assert shorter.truncated == 0
    question = whole.requests[0].context[-20:].tolist()
    assert shorter.requests[0].context[-20:].tolist() == question
    tiny = prepared(tmp_path, positions=10)
    assert tiny.truncated == len(tiny.items)
    lost = ["letter_mass", "shots_dropped"]
    assert task_result(shorter, scores(shorter))["not_comparable"] == lost
    assert task_result(tiny, scores(tiny))["not_comparable"] == [*lost, "truncated"]
    tokens = prepared(tmp_path, positions=longest - 1, truncation="tokens")
    assert (tokens.shots_dropped, tokens.truncated > 0) == (0, True)


@pytest.mark.parametrize(
    ("question", "choices", "message"),
    [
        ("Answer:", ["no", ""], "choice 1, '', has no token .*; correct the row or `choices`, or"),
        # "Which" is one token, and it begins with the question.
        ("Whi", ["ch", "no"], "choice 0, 'ch', has no token of its own .* `delimiter` to a space"),
    ],
)
def test_a_choice_without_a_token_of_its_own_is_refused(
    tmp_path: Path, question: str, choices: list[str], message: str
) -> None:
    """Its probability would be one, and it would win every item."""
    files = lines(tmp_path / "mine.jsonl", [{"q": question}])
    task = {"kind": "multiple_choice", "question": "{{ q }}", "choices": choices, "delimiter": ""}
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps({**task, "answer": "0", "files": [files]}))
    with pytest.raises(DataError, match=rf"task mine: .*mine\.jsonl:1: {message}"):
        prepare_task(load_task(str(path)), tokenizer(), positions=100)
    # A chat prompt ends with a new line, which is scored with the answer.
    in_chat = load_task(str(path), {"chat": True, "choices": ["", "no"]})
    with pytest.raises(DataError, match="choice 0, '', has no token .* or set chat=false"):
        prepare_task(in_chat, chat_tokenizer("qwen25"), positions=100)
    spaced = load_task(str(path), {"delimiter": " "})
    assert prepare_task(spaced, tokenizer(), positions=100).items[0].requests == 2


def test_the_hash_is_that_of_the_prompts(tmp_path: Path) -> None:
    first = prepared(tmp_path).prompt_hash
    assert prepared(tmp_path).prompt_hash == first
    assert prepared(tmp_path, delimiter="").prompt_hash != first
    assert prepared(tmp_path, shots=1).prompt_hash != first
    assert prepared(tmp_path, limit=3).prompt_hash != first


def test_a_limit_that_leaves_no_row_out_is_no_reservation(tmp_path: Path) -> None:
    for limit, reasons in ((7, ["limit"]), (8, []), (9, [])):
        task = prepared(tmp_path, limit=limit)
        found = task_result(task, scores(task, right=-0.1))
        assert found["n"] == min(limit, 8)
        assert [one for one in found.get("not_comparable", []) if one == "limit"] == reasons


def test_no_room_for_a_text_names_the_place_to_lower_its_tokens(tmp_path: Path) -> None:
    files = lines(tmp_path / "gsm8k.jsonl", published.GSM8K)
    task = load_task("gsm8k", {"files": [files], "shot_files": [files]})
    own = tmp_path / "own.yaml"
    own.write_text(f"base: gsm8k\nfiles: ['{files}']\nshots: 0\n")
    with pytest.raises(ConfigError, match="lower it in a YAML file of your own with `base: gsm8k`"):
        prepare_task(task, tokenizer(), positions=128)
    with pytest.raises(ConfigError, match=rf"max_new_tokens = 256, .*; lower it in {own}"):
        prepare_task(load_task(str(own)), tokenizer(), positions=128)


def test_bits_per_byte_count_the_counted_text(tmp_path: Path) -> None:
    texts = ["the weather in Paris", "hello é there", "it is sunny " * 9, "\na line\n"]
    words = 4 + 3 + 28 + 4  # blanks at an end have an empty word beside them
    files = lines(tmp_path / "text.jsonl", [{"text": text} for text in texts])
    task = prepare_task(load_task("text", {"files": [files]}), tokenizer(), positions=12)
    scored = [Score(-0.5 * len(one.answer), False) for one in task.requests]
    found = task_result(task, scored)
    tokens = sum(len(ids) for ids in tokenizer().encode_batch(texts))
    size = sum(len(text.encode()) for text in texts)
    assert found["bits_per_byte"] == pytest.approx(0.5 * tokens / size / math.log(2))
    assert found["token_perplexity"] == pytest.approx(math.exp(0.5))
    assert found["word_perplexity"] == pytest.approx(math.exp(0.5 * tokens / words))
    assert (found["tokens"], found["bytes"]) == (tokens, size)
    for name, scale in (("bits_per_byte", 1 / math.log(2)), ("byte_perplexity", None)):
        nats = found["bits_per_byte"] * math.log(2)
        sizes = np.array([len(text.encode()) for text in texts])
        lost = np.array([0.5 * len(ids) for ids in tokenizer().encode_batch(texts)])
        error = math.sqrt(len(texts)) * (lost - nats * sizes).std(ddof=1) / size
        expected = error * (found["byte_perplexity"] if scale is None else scale)
        assert found[f"{name}_stderr"] == pytest.approx(expected)
    items = scored_items(task, scored).measures["bits_per_byte"]
    assert items.values.sum() / items.weights.sum() == pytest.approx(found["bits_per_byte"])


def test_perplexities_that_are_no_numbers_are_null(tmp_path: Path) -> None:
    """Of a long text without blanks, and of a model that is broken; not of blanks alone."""
    for text, log_prob, null in (
        ("a" * 900, -900.0, {"word_perplexity", "token_perplexity"}),
        (" \n ", -1.0, set()),
        ("the weather", math.nan, None),
    ):
        files = lines(tmp_path / "text.jsonl", [{"text": text}])
        task = prepare_task(load_task("text", {"files": [files]}), tokenizer(), positions=4000)
        found = task_result(task, [Score(log_prob, False)] * len(task.requests))
        json.dumps(found, allow_nan=False)
        own = {name for name, value in found.items() if value is None}
        named = {name for name in found if "perplexity" in name or "bits" in name}
        if null is None:
            assert own == named
        else:
            assert ("word_perplexity" in own) == bool(null)
            assert own <= {*null, *(f"{name}_stderr" for name in null)}
            assert found["bits_per_byte"] > 0


def test_texts_without_a_token_are_refused(tmp_path: Path) -> None:
    files = lines(tmp_path / "text.jsonl", [{"text": ""}] * 2)
    task = load_task("text", {"files": [files]})
    with pytest.raises(DataError, match="text = .* is empty in each of 2 rows; name the column"):
        prepare_task(task, tokenizer(), positions=12)


def test_an_empty_prompt_is_the_prefix_token(tmp_path: Path) -> None:
    """As an empty context of a choice; a model writes behind a token."""
    own = tmp_path / "own.yaml"
    files = lines(tmp_path / "own.jsonl", [{"q": "", "a": "4"}, {"q": "2 + 2", "a": "4"}])
    own.write_text(
        f"kind: generation\nfiles: ['{files}']\nquestion: '{{{{ q }}}}'\nanswer: a\n"
        "graders: [exact]\nmax_new_tokens: 2\n"
    )
    task = prepare_task(load_task(str(own)), tokenizer(), positions=12)
    empty, plain = (request.context.tolist() for request in task.requests)
    bos, eos = tokenizer().bos_id, tokenizer().eos_id
    assert empty == [eos if bos is None else bos]
    (ids,) = tokenizer().encode_batch(["2 + 2"])
    assert plain[-len(ids) :] == ids.tolist()


@pytest.mark.parametrize(
    ("grader", "answer", "wanted"),
    [("gsm8k_strict", "four", "the number"), ("gsm8k_flexible", "#### none", "the number"),
     ("letter", "K", "the letter from A to J")],
)  # fmt: skip
def test_an_answer_that_no_text_can_have_is_named(
    tmp_path: Path, grader: str, answer: str, wanted: str
) -> None:
    files = lines(tmp_path / "own.jsonl", [{"q": "2 + 2", "a": answer}])
    own = tmp_path / "own.yaml"
    own.write_text(
        f"kind: generation\nfiles: ['{files}']\nquestion: '{{{{ q }}}}'\nanswer: a\n"
        f"graders: [{grader}]\nmax_new_tokens: 2\n"
    )
    with pytest.raises(
        DataError, match=rf"own.jsonl:1: the answer is '{answer}', without {wanted}"
    ):
        prepare_task(load_task(str(own)), tokenizer(), positions=12)


def test_results_of_generated_texts_have_their_reservations(tmp_path: Path) -> None:
    """Shares with errors, texts that were cut, not judged in time or at all, and versions."""
    files = lines(
        tmp_path / "a.jsonl", [{"q": f"{n}?", "a": str(n), "kind": n % 2} for n in range(4)]
    )
    content = {"kind": "generation", "question": "{{ q }}", "answer": "a", "group": "kind"}
    content |= {"graders": ["exact", {"regex": r"\d", "name": "digit"}, "math_verify"]}
    (tmp_path / "mine.yaml").write_text(json.dumps({**content, "files": [files]}))
    task = prepare_task(load_task(str(tmp_path / "mine.yaml")), tokenizer(), positions=400)
    texts = [WrittenText("0", False), WrittenText("x1", True), WrittenText("2", True)]
    texts.append(WrittenText("", False))
    grades = {
        "exact": Graded((True, False, True, False), 0, 0),
        "digit": Graded((True, True, True, False), 0, 1),
        "math_verify": Graded((True, False, False, False), 2, 0),
    }
    found = written_result(task, texts, grades)
    assert (found["exact"], found["digit"], found["math_verify"]) == (0.5, 0.75, 0.25)
    assert found["digit_stderr"] == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    assert (found["cut"], found["n"]) == (2, 4)
    assert "not_comparable" not in found, "published results have texts that were cut, too"
    assert "unboxed" not in found, "none of the graders looks for a box"
    assert (found["math_verify_timeouts"], found["digit_failures"]) == (2, 1)
    assert not {"exact_timeouts", "exact_failures", "digit_timeouts"} & set(found)
    own = f"megatron-distill {version('megatron-distill')}"
    assert found["graders"] == {
        "exact": own,
        "digit": rf"{own}, first match of \d",
        "math_verify": f"math-verify {version('math-verify')}",
    }
    assert found["groups"] == {
        "0": {"exact": 1.0, "exact_stderr": 0.0, "n": 2},
        "1": {"exact": 0.0, "exact_stderr": 0.0, "n": 2},
    }
    assert found["prompt_hash"] == task.prompt_hash
    items = written_items(task, texts, grades)
    assert items.measures["digit"].values.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert items.texts == tuple(one.text for one in texts)
    assert TaskItems.from_dict(json.loads(json.dumps(items.as_dict()))).texts == items.texts


def test_right_answers_without_a_box_are_counted(tmp_path: Path) -> None:
    """The graders of MATH compare with all of them."""
    rows = [*published.MATH, {**published.MATH[0], "solution": "It is two."}]
    files = lines(tmp_path / "a.jsonl", rows)
    for named in ("hendrycks_math", "minerva_math"):
        task = prepare_task(load_task(named, {"files": [files]}), tokenizer(), positions=4000)
        grades = {name: Graded((True, False), 0, 0) for name in task.task.measures}
        found = written_result(task, [WrittenText("2", False)] * 2, grades)
        assert found["unboxed"] == 1
        assert found["groups"]["Algebra"]["n"] == 2

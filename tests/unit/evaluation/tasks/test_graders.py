"""Graders on tables of answers, and their processes: time limits, failures, missing packages."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_distill.errors import ConfigError, DataError
from megatron_distill.evaluation.requests import Interrupted
from megatron_distill.evaluation.tasks.graders import (
    GRADERS,
    boxed,
    exact,
    grader_named,
    gsm8k_flexible,
    gsm8k_strict,
    hendrycks_math,
    letter,
    minerva_math,
    normalised_math,
)
from megatron_distill.evaluation.tasks.grading import grade_texts

GOLD = "It is 7 + 1,000.\n#### 1,007"


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so #### 1007", True, True),
        ("so #### 1,007.", True, True),
        ("the answer is $1,007.", False, True),
        ("#### 1007 or 3", True, False),
        ("#### 3 then 1007", False, True),
        ("no number", False, False),
        ("-1007", False, False),
        ("", False, False),
    ],
)
def test_gsm8k(text: str, strict: bool, flexible: bool) -> None:
    assert gsm8k_strict(text, GOLD) == strict
    assert gsm8k_flexible(text, GOLD) == flexible


@pytest.mark.parametrize(
    ("text", "right"),
    [("the answer is (B).", True), ("answer is B", True), ("answer is (C) B", False), ("B", False)],
)
def test_letters(text: str, right: bool) -> None:
    assert letter(text, "B") == right


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("so $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("\\boxed{1} and \\boxed{2}", "2"),
        ("\\fbox{a{b}c}", "a{b}c"),
        ("$\\boxed 5$", "5"),
        ("\\boxed{open", None),
        ("none", None),
    ],
)
def test_the_last_box(text: str, inside: str | None) -> None:
    assert boxed(text) == inside


SAME = [
    ("\\frac12", "\\frac{1}{2}"), ("\\dfrac{1}{2}", "\\frac{1}{2}"), ("0.5", "\\frac{1}{2}"),
    ("1/2", "\\frac{1}{2}"), (".5", "1/2"), ("2 cm", "2"), ("\\left(1,2\\right)", "(1,2)"),
    ("100,000", "100000"), ("50\\%", "50"), ("90^\\circ", "90"), ("x=3", "3"),
    ("\\text{east}", "east"), ("\\sqrt3", "\\sqrt{3}"), ("\\sqrt[3]8", "\\sqrt[3]{8}"),
    ("5\\text{ cm}", "5"), ("\\$12", "12"), ("-\\frac{2}{3}", "-2/3"), ("2.50", "2.5"),
    ("\\left[2,5\\right)", "[2,5)"), ("6 dollars", "6"), ("3.", "3"), ("1,234,567", "1234567"),
]  # fmt: skip
DIFFERENT = [
    ("0,1", "1"), ("1,2", "12"), ("\\frac{1}{3}", "0.3"), ("(1,2)", "[1,2]"), ("", "1"),
    ("1/0", "0"), ("left", "le"), ("\\frac{a}{b}", "\\frac{b}{a}"), ("2", "-2"), ("x", "y"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [(*pair, True) for pair in SAME] + [(*pair, False) for pair in DIFFERENT],
)
def test_answers_of_mathematics(found: str, wanted: str, same: bool) -> None:
    assert hendrycks_math(f"so ${found}$", f"\\boxed{{{wanted}}}") == same
    said = f"Final Answer: The final answer is ${found}$. I hope it is correct. Problem"
    assert minerva_math(said, f"\\boxed{{{wanted}}}") == same
    assert not minerva_math(f"${found}$", f"\\boxed{{{wanted}}}")


def test_the_whole_text_counts_without_two_dollars() -> None:
    assert hendrycks_math(" 7 ", "\\boxed{7}")
    assert not hendrycks_math("it is 7", "\\boxed{7}")
    assert normalised_math("\\left(3,\\frac{\\pi}{2}\\right)") == "(3,\\frac{\\pi}{2})"


def runs_away(text: str, answer: str) -> bool:
    """A grader that never ends on one text and breaks on another."""
    while text == "runs away":
        pass
    if text == "breaks":
        raise ValueError(text)
    return text == answer


def test_a_text_that_takes_too_long_is_wrong_and_counted() -> None:
    """Only the end of its process stops such a grader; the texts after it are graded."""
    pairs = [("a", "a"), ("runs away", "a"), ("b", "a"), ("breaks", "a"), ("a", "a")]
    found = grade_texts(runs_away, pairs, seconds=0.5, workers=1)
    assert found.right == (True, False, False, False, True)
    assert (found.timeouts, found.failures) == (1, 1)


def test_pairs_are_graded_in_order_by_several_processes() -> None:
    pairs = [("#### 1007", GOLD), ("#### 3", GOLD), ("#### 1,007", GOLD), ("", GOLD)]
    found = grade_texts(gsm8k_strict, pairs, workers=2)
    assert (found.right, found.timeouts, found.failures) == ((True, False, True, False), 0, 0)
    assert grade_texts(exact, []).right == ()


def is_signalled(text: str, answer: str) -> bool:
    """A grader that gets the signals of its process group, and dies once by SIGKILL."""
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    if text == "always":
        os.kill(os.getpid(), signal.SIGKILL)
    if text.startswith("/") and not Path(text).exists():
        Path(text).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "leaves":
        os._exit(0)
    return text != answer


def test_a_signal_to_a_grader_does_not_change_its_grades(tmp_path: Path) -> None:
    """SIGTERM and SIGINT do nothing; a text whose process is killed is graded once more."""
    texts = ["a", str(tmp_path / "once"), "always", "leaves", "b"]
    found = grade_texts(is_signalled, [(text, "") for text in texts], workers=1)
    assert found.right == (True, True, False, False, True)
    assert (found.timeouts, found.failures) == (0, 2)


def comes_up(path: str, starts: int) -> Callable[[str, str], bool]:
    """Return a grader in its process, which ends in this call at first."""
    os.kill(os.getpid(), signal.SIGTERM)
    with Path(path).open("a") as file:
        file.write("start\n")
    if len(Path(path).read_text().split()) < starts:
        os._exit(3)
    return exact


class Fragile:
    """A grader whose process ends while it starts."""

    def __init__(self, path: Path, starts: int) -> None:
        self.path, self.starts = path, starts

    def __reduce__(self) -> tuple[Any, ...]:
        return comes_up, (str(self.path), self.starts)

    def __call__(self, text: str, answer: str) -> bool:
        raise AssertionError("it runs in its process alone")


def test_a_grader_that_does_not_start_is_tried_twice(tmp_path: Path) -> None:
    assert grade_texts(Fragile(tmp_path / "second", 2), [("a", "a")]).right == (True,)
    with pytest.raises(DataError, match="Fragile cannot start: .* 2 times .* status 3"):
        grade_texts(Fragile(tmp_path / "never", 9), [("a", "a")])
    assert (tmp_path / "never").read_text().split() == ["start"] * 2


def test_a_request_to_stop_ends_grading() -> None:
    began = time.monotonic()
    with pytest.raises(Interrupted):
        grade_texts(
            runs_away,
            [("runs away", "a")],
            seconds=600.0,
            stop_requested=lambda: time.monotonic() > began + 1.0,
        )


def test_unknown_and_missing_graders_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="graders: 'gsm' is not one of exact, letter"):
        grader_named("gsm")
    monkeypatch.setattr("megatron_distill.evaluation.tasks.graders.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="install the extra `math`"):
        grader_named("math_verify")
    assert set(GRADERS) >= {"gsm8k_strict", "hendrycks_math", "minerva_math"}

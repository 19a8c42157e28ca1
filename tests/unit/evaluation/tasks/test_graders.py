"""Graders on tables of answers, and their processes: time limits, failures, missing packages."""

from __future__ import annotations

import ast
import os
import random
import re
import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron_distill.errors import ConfigError, DataError
from megatron_distill.evaluation.tasks.graders import (
    GRADERS,
    RegexGrader,
    exact,
    grader_named,
    gsm8k_flexible,
    gsm8k_strict,
    hendrycks_math,
    letter,
    minerva_math,
)
from megatron_distill.evaluation.tasks.grading import grade_texts
from megatron_distill.evaluation.tasks.mathematics import (
    NoNormalFormError,
    boxed,
    by_hendrycks,
    by_minerva,
)
from megatron_distill.runtime.termination import Interrupted
from tests.unit.evaluation.tasks import answers

GOLD = "It is 7 + 1,000.\n#### 1,007"


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so #### 1007", True, True),
        ("so #### 1,007.", True, True),
        ("the answer is $1,007.", False, True),
        ("#### 1007 or 3", True, False),
        ("#### 3 then 1007", False, True),
        ("so 1,007 apples\n#### 1,007\n", True, True),
        ("#### 1007\n\nQuestion: 3", True, False),
        ("####1007", False, True),
        ("#### $1,007", False, True),
        ("#### 1007.00", False, False),
        ("#### -1,007", False, False),
        ("1007 dollars", False, True),
        ("x2 = 1007.", False, True),
        ("1007%", False, True),
        ("1.007", False, False),
        ("1 007", False, False),
        ("1007...", False, False),
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
    [
        ("the answer is (B).", True),
        ("answer is B", True),
        ("think. The answer is (B)\n\nQuestion:", True),
        ("answer is (C) B", False),
        ("the answer is (A). No, the answer is (B).", False),
        ("answer is: B", False),
        ("answer is b", False),
        ("answer is (K)", False),
        ("B", False),
        ("", False),
    ],
)
def test_letters(text: str, right: bool) -> None:
    assert letter(text, "B") == right


def test_exact_texts() -> None:
    assert exact(" 7\n", "7")
    assert not exact("7.0", "7")
    assert not exact("seven", "Seven")


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


@pytest.mark.parametrize("pair", answers.PAIRS, ids=lambda pair: f"{pair.found} {pair.wanted}")
def test_answers_of_mathematics_by_their_text(pair: answers.Pair) -> None:
    box = f"\\boxed{{{pair.wanted}}}"
    assert hendrycks_math(f"so ${pair.found}$", box) == pair.by_hendrycks
    written = f"Final Answer: The final answer is ${pair.found}$. I hope it is correct. Problem"
    assert minerva_math(written, box) == pair.by_minerva
    assert not minerva_math(f"${pair.found}$", box)


def of_the_harness(task: str, *names: str) -> dict[str, Callable[..., Any]]:
    """Functions and tables of a task of lm-evaluation-harness, without what its file imports."""
    installed = find_spec("lm_eval")
    if installed is None or installed.origin is None:
        pytest.skip("lm-eval is not installed: make peers")
    file = Path(installed.origin).parent / "tasks" / task / "utils.py"
    tree = ast.parse(file.read_text(encoding="utf-8").replace('"\\%", ""', '"\\\\%", ""'))
    tree.body = [
        one
        for one in tree.body
        if (isinstance(one, ast.FunctionDef) and not one.name.startswith("process"))
        or (isinstance(one, ast.Assign) and ast.unparse(one.targets[0]).isupper())
    ]
    found: dict[str, Any] = {"re": re}
    exec(compile(tree, str(file), "exec"), found)
    return {name: found[name] for name in names}


PARTS = [
    "\\frac", "\\dfrac", "\\tfrac", "\\sqrt", "\\sqrt[3]", "\\text{", "\\textbf{", "\\overline{",
    "\\boxed{", "\\mbox{", "}", "{", "1", "2", "a", "x=", "=", "/", "0.5", ".", "$", "\\$",
    "\\%", "%", "cm", "square", "ft", "sue", "points", "\\left(", "\\right)", "^\\circ",
    "^{\\circ}", "\\!", "\\\\", ",", "100,000", "{,}", "\\ldots", "\\dots", "\"", "\\;",
    "\\mathrm{th}", "\\text{and}", "\\text{m}^2", "\\text{s}", "left", "1/2", "-", "1_0", "+1",
    "\\in", " ", "\\text{ ", "an ", "a ", "\\ ", "\n", "\t",
]  # fmt: skip


def test_normal_forms_are_those_of_the_harness() -> None:
    """Of the table's answers, and of 4,000 texts from parts that the rules are about."""
    minerva = of_the_harness("minerva_math", "normalize_final_answer")["normalize_final_answer"]
    hendrycks = of_the_harness("hendrycks_math", "strip_string", "is_equiv")
    generator = random.Random(0)
    texts = [text for pair in answers.PAIRS for text in pair[:2]]
    texts += ["".join(generator.choices(PARTS, k=generator.randint(1, 7))) for _ in range(4000)]
    refused = 0
    for text in texts:
        assert by_minerva(text) == minerva(text), text
        try:
            assert by_hendrycks(text) == hendrycks["strip_string"](text), text
        except NoNormalFormError:
            refused += 1
            with pytest.raises((AssertionError, IndexError, ValueError)):
                hendrycks["strip_string"](text)
    assert refused > 100, "the rules do not cover all texts"
    for pair in answers.PAIRS:
        assert pair.by_hendrycks == hendrycks["is_equiv"](pair.found, pair.wanted), pair


@pytest.mark.parametrize("found", answers.TEXTS, ids=lambda found: found.text[:30])
def test_the_answer_of_a_whole_text_by_its_text(found: answers.Text) -> None:
    for name in ("hendrycks_math", "minerva_math"):
        assert GRADERS[name](found.text, answers.SOLUTION) == (name in found.graders), name


@pytest.mark.slow
def test_answers_of_mathematics_by_their_value() -> None:
    """All pairs, also with the right answer as bare LaTeX, and all texts, by math-verify."""
    cases = [
        ((f"so ${pair.found}$", wanted), pair.by_value)
        for pair in answers.PAIRS
        for wanted in (f"\\boxed{{{pair.wanted}}}", pair.wanted)
    ]
    cases += [
        ((found.text, answers.SOLUTION), "math_verify" in found.graders) for found in answers.TEXTS
    ]
    pairs, expected = zip(*cases, strict=True)
    found = grade_texts(grader_named("math_verify"), pairs, seconds=60.0)
    wrong = [
        pair for pair, right, one in zip(pairs, found.right, expected, strict=True) if right != one
    ]
    assert (wrong, found.timeouts, found.failures) == ([], 0, 0)


# Of a text, where one has no end: a busy machine grades any other one within them.
SECONDS = 5.0


@pytest.mark.slow
def test_an_answer_on_which_math_verify_never_ends_is_a_timeout() -> None:
    """The texts after it are graded."""
    endless = ("$\\sum_{k=1}^{10^{9}} k^{k}$", "$3$")
    pairs = [("$7$", "7"), endless, ("$8$", "$8$")]
    found = grade_texts(grader_named("math_verify"), pairs, seconds=SECONDS, workers=1)
    assert found.right == (True, False, True)
    assert (found.timeouts, found.failures) == (1, 0)


@pytest.mark.parametrize(
    ("regex", "take", "text", "right"),
    [
        (r"total: (\d+)", "first", "total: 12\ntotal: 13", True),
        (r"total: (\d+)", "last", "total: 12\ntotal: 13", False),
        (r"\d+", "last", "7 then 12", True),
        (r"\d+", "first", "7 then 12", False),
        (r"<(\d+)>|\((\d+)\)", "first", "so (12).", True),
        (r"is\s+(.*)$", "first", "it is  12 ", True),
        (r"(?i)TOTAL (\d+)", "first", "a total 12", True),
        (r"total (\d+)", "first", "none", False),
    ],
)
def test_regular_expressions(regex: str, take: str, text: str, right: bool) -> None:
    """The first group that matched, or the whole match, equals the answer but for blanks."""
    assert RegexGrader(regex, take=take)(text, " 12\n") == right


@pytest.mark.slow
def test_a_regular_expression_that_backtracks_for_ever_is_a_timeout() -> None:
    pairs = [("aab", "aa"), ("a" * 64 + "c", "a"), ("ab", "a")]
    found = grade_texts(RegexGrader("((?:a+)+)b"), pairs, seconds=SECONDS, workers=1)
    assert found.right == (True, False, True)
    assert (found.timeouts, found.failures) == (1, 0)


def runs_away(text: str, answer: str) -> bool:
    """A grader that never ends on one text and breaks on another."""
    while text == "runs away":
        pass
    if text == "breaks":
        raise ValueError(text)
    return text == answer


@pytest.mark.slow
def test_a_text_that_takes_too_long_is_wrong_and_counted() -> None:
    """Only the end of its process stops such a grader; the texts after it are graded."""
    pairs = [("a", "a"), ("runs away", "a"), ("b", "a"), ("breaks", "a"), ("a", "a")]
    found = grade_texts(runs_away, pairs, seconds=SECONDS, workers=1)
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

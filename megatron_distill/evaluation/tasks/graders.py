"""Graders of generated answers: pure functions of a text and the right answer."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from megatron_distill.errors import ConfigError
from megatron_distill.evaluation.tasks.mathematics import (
    NoNormalFormError,
    boxed,
    by_hendrycks,
    by_minerva,
    exact_value,
)

__all__ = [
    "ANSWERS",
    "BOXED",
    "GRADERS",
    "Grade",
    "RegexGrader",
    "grader_named",
    "grader_versions",
    "opened_grader",
]

Grade = Callable[[str, str], bool]
"""(generated text, right answer of the row) -> whether they agree."""

_NO_MATH_VERIFY: Final = (
    "the grader math_verify needs the package math-verify; install the extra `math` or leave "
    "it out of the task's graders"
)


def exact(text: str, answer: str) -> bool:
    """The same text but for blanks around it."""
    return text.strip() == answer.strip()


def letter(text: str, answer: str) -> bool:
    """The letter behind the first "answer is", in parentheses or not."""
    found = re.search(r"answer is \(?([ABCDEFGHIJ])\)?", text)
    return found is not None and found[1] == answer.strip()


def gsm8k_strict(text: str, answer: str) -> bool:
    """The number behind the first "####"."""
    found = re.search(r"#### (-?[0-9.,]+)", text)
    return found is not None and _number(found[1]) == _number(answer)


def gsm8k_flexible(text: str, answer: str) -> bool:
    """The last number of the text."""
    found = [one[0] or one[1] for one in re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", text)]
    return bool(found) and _number(found[-1]) == _number(answer)


def _number(text: str) -> str:
    """A number as it is compared: behind "#### ", without commas, dollars and a last point."""
    behind = re.sub(r"(?s).*#### ", "", text)
    return re.sub(r"\.$", "", behind.replace(",", "").replace("$", "")).lower().strip()


def hendrycks_math(text: str, answer: str) -> bool:
    """The text between the first and the last dollar, or all of it, against the boxed answer.

    Both in the normal form of lm-evaluation-harness's `hendrycks_math`. Where one of them has none,
    they are compared letter by letter.
    """
    inside = text[text.find("$") + 1 : text.rfind("$")] if text.count("$") > 1 else text
    wanted = _wanted(answer)
    try:
        return by_hendrycks(inside) == by_hendrycks(wanted)
    except NoNormalFormError:
        return inside == wanted


def minerva_math(text: str, answer: str) -> bool:
    """The text behind "The final answer is" against the boxed answer.

    Both in the normal form of lm-evaluation-harness's `minerva_math`; fractions and decimals with
    equal values are equal, and an empty text equals nothing.
    """
    pattern = r"Final Answer: The final answer is(.*?). I hope it is correct."
    final = re.search(pattern, f"{text}I hope it is correct.")
    if final is None:
        return False
    found, wanted = by_minerva(final[1].strip()), by_minerva(_wanted(answer))
    if found == wanted:
        return bool(found)
    values = exact_value(found), exact_value(wanted)
    return None not in values and values[0] == values[1]


def _wanted(answer: str) -> str:
    inside = boxed(answer)
    return answer if inside is None else inside


def math_verify(text: str, answer: str) -> bool:
    """Whether math-verify finds the answers equivalent; it runs in a process that can be ended.

    A right answer without a box, dollars or LaTeX brackets is LaTeX as a whole.
    """
    from math_verify import parse, verify

    # It warns of the time limits that are off: the process has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    is_marked = any(mark in answer for mark in ("$", "\\boxed", "\\fbox", "\\(", "\\["))
    return bool(
        verify(
            parse(answer if is_marked else f"${answer}$", parsing_timeout=None),
            parse(text, parsing_timeout=None),
            timeout_seconds=None,
        )
    )


GRADERS: Final[Mapping[str, Grade]] = {
    one.__name__: one
    for one in (
        exact,
        letter,
        gsm8k_strict,
        gsm8k_flexible,
        hendrycks_math,
        minerva_math,
        math_verify,
    )
}


# Those that compare with the last box of the right answer, or with all of it where it has none.
BOXED: Final = frozenset({"hendrycks_math", "minerva_math"})

# What a right answer has where these graders can find it in a text: a pattern, and words for it.
ANSWERS: Final[Mapping[str, tuple[str, str]]] = {
    "gsm8k_strict": (r"[0-9]", "the number"),
    "gsm8k_flexible": (r"[0-9]", "the number"),
    "letter": (r"^\s*[ABCDEFGHIJ]\s*$", "the letter from A to J"),
}
_TAKES: Final = {"first": 0, "last": -1}
_OF_RESULTS: Final = (
    "n", "cut", "graders", "groups", "shots", "shots_dropped", "truncated", "prompt_hash",
    "not_comparable", "seconds", "minus", "unboxed",
)  # fmt: skip


@dataclass(frozen=True)
class RegexGrader:
    """A regular expression that finds the answer in a text; it equals the right one but for blanks.

    The answer is the first group that matched, or the whole match without groups. A grader is sent
    to its processes, which compile the expression once.

    Attributes:
        regex: of Python's `re`, `.` not matching a line's end.
        name: of the measure.
        take: the `first` or the `last` match.

    Raises ConfigError for an expression that is none, and for a wrong name or `take`.
    """

    regex: str
    name: str = "regex"
    take: str = "first"

    def __post_init__(self) -> None:
        try:
            re.compile(self.regex)
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"regex = {self.regex!r} is not a regular expression: {error}; correct it"
            ) from error
        if self.take not in _TAKES:
            raise ConfigError(f"take = {self.take!r}; give first or last")
        taken = (*GRADERS, *_OF_RESULTS)
        if not re.fullmatch(r"[A-Za-z]\w*", self.name) or self.name in taken:
            raise ConfigError(
                f"name = {self.name!r}; give letters, digits and underscores, and none of "
                f"{', '.join(taken)}"
            )

    def __call__(self, text: str, answer: str) -> bool:
        """Whether the answer that the expression finds in a text is the right one."""
        found = list(re.finditer(self.regex, text))
        if not found:
            return False
        chosen = found[_TAKES[self.take]]
        taken = next((one for one in chosen.groups() if one is not None), chosen[0])
        return taken.strip() == answer.strip()


def opened_grader(grader: str | RegexGrader) -> Grade:
    """Return a grader; raises ConfigError as `grader_named`."""
    return grader_named(grader) if isinstance(grader, str) else grader


def grader_named(name: str) -> Grade:
    """Return a grader; raises ConfigError for another name, or a package that is missing."""
    if name not in GRADERS:
        raise ConfigError(f"graders: {name!r} is not one of {', '.join(GRADERS)}")
    if name == "math_verify" and find_spec("math_verify") is None:
        raise ConfigError(_NO_MATH_VERIFY)
    return GRADERS[name]


def grader_versions(graders: Sequence[str | RegexGrader]) -> dict[str, str]:
    """Return the version of each grader: this package's, or that of the package it calls.

    A regular expression is written after it.
    """
    found = {}
    for grader in graders:
        package = "math-verify" if grader == "math_verify" else "megatron-distill"
        try:
            described = f"{package} {version(package)}"
        except PackageNotFoundError:
            described = package
        if isinstance(grader, str):
            found[grader] = described
        else:
            found[grader.name] = f"{described}, {grader.take} match of {grader.regex}"
    return found

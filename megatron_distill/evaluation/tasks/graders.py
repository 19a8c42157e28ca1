"""Graders of generated answers: pure functions of a text and the right answer."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from megatron_distill.errors import ConfigError

__all__ = ["GRADERS", "Grade", "boxed", "grader_named", "grader_versions"]

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


def boxed(text: str) -> str | None:
    """The content of the last `\\boxed` or `\\fbox`, None without one."""
    place = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if place < 0:
        return None
    rest = text[place:].removeprefix("\\boxed").removeprefix("\\fbox")
    if rest.startswith(" "):
        return rest[1:].split("$")[0]
    depth = 0
    for index, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:index] if character == "}" else None
    return None


def hendrycks_math(text: str, answer: str) -> bool:
    """The text between the first and the last dollar, or all of it, against the boxed answer.

    Both normalised as strings; fractions and decimals with equal values are equal.
    """
    inside = text[text.find("$") + 1 : text.rfind("$")] if text.count("$") > 1 else text
    wanted = boxed(answer)
    return _same_math(inside, answer if wanted is None else wanted)


def minerva_math(text: str, answer: str) -> bool:
    """The text behind "The final answer is" against the boxed answer, both normalised."""
    pattern = r"Final Answer: The final answer is(.*?). I hope it is correct."
    found = re.search(pattern, f"{text}I hope it is correct.")
    wanted = boxed(answer)
    if found is None:
        return False
    return _same_math(found[1].strip(), answer if wanted is None else wanted)


def _same_math(found: str, wanted: str) -> bool:
    first, second = normalised_math(found), normalised_math(wanted)
    if first == second:
        return True
    values = _value(first), _value(second)
    return None not in values and values[0] == values[1]


_UNITS: Final = (
    "square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units",
    "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters",
    "meals", "edges", "students",
)  # fmt: skip
_REMOVED: Final = (
    "\\left", "\\right", "\\!", "\\;", "\\,", "^{\\circ}", "^\\circ", "\\circ", "\\$", "$", "\\%",
    "%", "\\ ", '"', "\\ldots", "\\dots", "{,}", "\N{DEGREE SIGN}",
)  # fmt: skip
_POWER: Final = r"(?:\^\{?[23]\}?)?"  # of a unit


def normalised_math(text: str) -> str:
    """A LaTeX answer in one spelling: no units, blanks or sizes, and braces in full."""
    found = re.sub(r"\\\\\s*", lambda _: "\\", text.replace("\n", ""))
    parts = found.split("=")
    if len(parts) > 1:
        found = parts[-1]
    found = found.replace("mbox", "text")
    found = re.sub(r"\\text\{ .*$", "", found)
    found = re.sub(rf"(?<!\\)\b({'|'.join(_UNITS)})\b{_POWER}", "", found)
    found = re.sub(rf"\\text\{{\s*\}}{_POWER}", "", found)
    found = found.replace("tfrac", "frac").replace("dfrac", "frac")
    for removed in _REMOVED:
        found = found.replace(removed, "")
    found = re.sub(r"\\(?:text|textbf|mathrm|overline)\{(.*?)\}", r"\1", found)
    found = re.sub(r"\s+", "", found).rstrip(".")
    found = re.sub(r"frac([^{])([^{])", r"frac{\1}{\2}", found)
    found = re.sub(r"frac([^{])\{", r"frac{\1}{", found)
    found = re.sub(r"(frac\{[^{}]*\})([^{])", r"\1{\2}", found)
    found = re.sub(r"sqrt(\[[^\]]*\])(\w)", r"sqrt\1{\2}", found)
    found = re.sub(r"sqrt([^{\[])", r"sqrt{\1}", found)
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", found):
        found = found.replace(",", "")
    return re.sub(r"^(-?)\.", r"\g<1>0.", found)


def _value(text: str) -> Fraction | None:
    """The value of an integer, decimal, a/b, \\frac{a}{b} or mixed number; None for others."""
    mixed = re.fullmatch(r"(-?)(\d+)(\\frac\{\d+\}\{\d+\})", text)
    if mixed:
        part = _value(mixed[3])
        return None if part is None else (int(mixed[2]) + part) * (-1 if mixed[1] else 1)
    found = re.fullmatch(r"(-?)\\?frac\{(-?\d+)\}\{(-?\d+)\}", text)
    plain = f"{found[1]}{found[2]}/{found[3]}" if found else text
    if not re.fullmatch(r"-?\d+(\.\d+|/-?\d+)?", plain):
        return None
    above, _, below = plain.partition("/")
    if below and int(below) == 0:
        return None
    return Fraction(above) / (Fraction(below) if below else 1)


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


def grader_named(name: str) -> Grade:
    """Return a grader; raises ConfigError for another name, or a package that is missing."""
    if name not in GRADERS:
        raise ConfigError(f"graders: {name!r} is not one of {', '.join(GRADERS)}")
    if name == "math_verify" and find_spec("math_verify") is None:
        raise ConfigError(_NO_MATH_VERIFY)
    return GRADERS[name]


def grader_versions(names: tuple[str, ...]) -> dict[str, str]:
    """Return the version of each grader: this package's, or that of the package it calls."""
    found = {}
    for name in names:
        package = "math-verify" if name == "math_verify" else "megatron-distill"
        try:
            found[name] = f"{package} {version(package)}"
        except PackageNotFoundError:
            found[name] = package
    return found

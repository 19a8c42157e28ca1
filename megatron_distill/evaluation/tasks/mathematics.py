"""Answers of mathematics as text: boxes, two published normal forms, and exact values.

A normal form is that of lm-evaluation-harness 0.4.13, so that scores are comparable. One is of
`hendrycks_math` (Hendrycks et al., arXiv 2103.03874), one of `minerva_math` (Lewkowycz et al.,
arXiv 2206.14858, appendix D).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Final

__all__ = ["NoNormalFormError", "boxed", "by_hendrycks", "by_minerva", "exact_value"]


class NoNormalFormError(ValueError):
    """An answer that the rules do not cover; it is compared letter by letter."""


def boxed(text: str) -> str | None:
    """The content of the last `\\boxed`, or of the last `\\fbox` without one; None without both."""
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].split("$")[0]
    name = "\\boxed" if "\\boxed" in text else "\\fbox"
    _, found, rest = text.rpartition(name)
    depth = 0
    for index, character in enumerate(rest if found else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:index] if character == "}" else None
    return None


def _replaced(text: str, changes: Iterable[tuple[str, str]]) -> str:
    for before, after in changes:
        text = text.replace(before, after)
    return text


_HENDRYCKS: Final = (
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""),
    ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
)  # fmt: skip
_LONGEST_NAME: Final = 2  # of a quantity before "=", with its blank


def by_hendrycks(text: str) -> str:
    """The normal form of `hendrycks_math`: sizes, degrees, percents and a unit on the right go.

    A quantity of at most two characters before "=" goes, roots and fractions get braces, and a
    quotient of integers becomes a fraction. Raises NoNormalFormError: two units, a root or a
    fraction of nothing, or a quotient of anything else.
    """
    found, unit, behind = _replaced(text, _HENDRYCKS).partition("\\text{ ")
    if unit and unit in behind:
        raise NoNormalFormError(text)
    # The rules remove percents twice, which matters where the first pass makes one.
    found = _replaced(found, (("\\%", ""), ("\\%", ""), (" .", " 0."), ("{.", "{0.")))
    if found.startswith("."):
        found = f"0{found}"
    name, _, value = found.partition("=")
    if found.count("=") == 1 and len(name) <= _LONGEST_NAME:
        found = value
    if re.search(r"\\sqrt(\\sqrt|\Z)", found):
        raise NoNormalFormError(text)
    found = re.sub(r"(?s)\\sqrt([^{])", r"\\sqrt{\1}", found).replace(" ", "")
    found = _with_braces(found)
    if found == "0.5":
        return "\\frac{1}{2}"
    return _quotient(found)


def _with_braces(text: str) -> str:
    """The text with braces around the parts of `\\frac`, of one character each without them."""
    first, *rest = text.split("\\frac")
    found = [first]
    for part in rest:
        if not part:
            raise NoNormalFormError(text)
        if part[0] == "{":
            found.append(part)
        elif len(part) == 1:
            return text
        else:
            below = part[1] if part[1] == "{" else f"{{{part[1]}}}"
            found.append(f"{{{part[0]}}}{below}{part[2:]}")
    return "\\frac".join(found)


def _quotient(text: str) -> str:
    """The fraction of a text that is two integers with one slash; another text as it is."""
    above, slash, below = text.partition("/")
    if not slash or "/" in below:
        return text
    try:
        parts = int(above), int(below)
    except ValueError as error:
        raise NoNormalFormError(text) from error
    return f"\\frac{{{parts[0]}}}{{{parts[1]}}}" if text == f"{parts[0]}/{parts[1]}" else text


# Removed in this order; words also as whole words before blanks go.
_MINERVA: Final = (
    "square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units",
    "\\ldots", "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm",
    "pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples", "\\text{s}",
    "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}",
    "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_UNITS: Final = "|".join(one for one in _MINERVA if one.isalpha())
_ARTICLES_AND_BLANKS: Final = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip


def by_minerva(text: str) -> str:
    """The normal form of `minerva_math`: the right of the last "=", without units and blanks.

    Degrees, quotation marks and dots go, `\\text` and boxes are opened, roots and fractions get
    braces, and a number loses the commas between its thousands. Words in names of commands stay.
    """
    found = re.sub(rf"(?<!\\)\b(?:{_UNITS})\b", "", text.rpartition("=")[2])
    found = _replaced(found, _ARTICLES_AND_BLANKS)
    for removed in _MINERVA:
        if removed.isalpha():  # the alternative of a command takes its whole name first
            found = re.sub(rf"(\\[a-zA-Z]+)|{removed}", lambda one: one[1] or "", found)
        else:
            found = found.replace(removed, "")
    found = re.sub(r".*?\$(.*?)\$.*", r"$\1$", found)
    for command in ("text", "textbf", "overline"):
        found = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", found)
    found = re.sub(r"\\boxed\{(.*)\}", r"\1", found)
    found = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", found)
    found = re.sub(r"sqrt(\[[^\]]*\])(\w)", r"sqrt\1{\2}", found)
    found = re.sub(r"sqrt(?!\[)([^{])", r"sqrt{\1}", found).replace("$", "")
    is_number = re.fullmatch(r"-?\d{1,3}(,\d{3})+", found)
    return found.replace(",", "") if is_number else found


def exact_value(text: str) -> Fraction | None:
    """The value of an integer, decimal, a/b, \\frac{a}{b} or mixed number; None for others."""
    mixed = re.fullmatch(r"(-?)(\d+)(\\frac\{\d+\}\{\d+\})", text)
    if mixed:
        part = exact_value(mixed[3])
        return None if part is None else (int(mixed[2]) + part) * (-1 if mixed[1] else 1)
    found = re.fullmatch(r"(-?)\\?[dt]?frac\{(-?\d+)\}\{(-?\d+)\}", text)
    plain = f"{found[1]}{found[2]}/{found[3]}" if found else text
    if not re.fullmatch(r"-?(\d+(\.\d+|/-?\d+)?|\.\d+)", plain):
        return None
    above, _, below = plain.partition("/")
    if below and int(below) == 0:
        return None
    return Fraction(above) / (Fraction(below) if below else 1)

"""Numbers of the command line, whose errors show an example of what is allowed."""

from __future__ import annotations

import argparse
from collections.abc import Callable

__all__ = ["number", "whole_number", "whole_numbers"]


def whole_number(example: str) -> Callable[[str], int]:
    """Return a reader of a whole number, whose error shows an example of one."""

    def read(text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise _wrong(text, f"give a whole number, as {example}") from None

    return read


def whole_numbers(example: str) -> Callable[[str], list[int]]:
    """Return a reader of whole numbers with commas between them."""

    def read(text: str) -> list[int]:
        try:
            return [int(part) for part in text.split(",")]
        except ValueError:
            raise _wrong(
                text, f"give whole numbers with commas between them, as {example}"
            ) from None

    return read


def number(example: str) -> Callable[[str], float]:
    """Return a reader of a number, whose error shows an example of one."""

    def read(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise _wrong(text, f"give a number, as {example}") from None

    return read


def _wrong(text: str, wanted: str) -> argparse.ArgumentTypeError:
    """Return the error of a word; settings may have come too late."""
    if "=" in text:
        wanted += ", and write settings (key=value) before the option"
    return argparse.ArgumentTypeError(f"{text}: {wanted}")

"""Numbers of the command line, whose errors show an example of what is allowed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

__all__ = ["number", "whole_number", "whole_numbers"]

_Value = TypeVar("_Value")


def whole_number(example: str) -> Callable[[str], int]:
    """Return a reader of a whole number, whose error shows an example of one."""
    return _reader(int, f"give a whole number, as {example}")


def whole_numbers(example: str) -> Callable[[str], list[int]]:
    """Return a reader of whole numbers with commas between them."""
    wanted = f"give whole numbers with commas between them, as {example}"
    return _reader(lambda text: [int(part) for part in text.split(",")], wanted)


def number(example: str) -> Callable[[str], float]:
    """Return a reader of a number, whose error shows an example of one."""
    return _reader(float, f"give a number, as {example}")


def _reader(read: Callable[[str], _Value], wanted: str) -> Callable[[str], _Value]:
    def reader(text: str) -> _Value:
        try:
            return read(text)
        except ValueError:
            raise _wrong(text, wanted) from None

    return reader


def _wrong(text: str, wanted: str) -> argparse.ArgumentTypeError:
    """Return the error of a word; settings may have come too late."""
    if "=" in text:
        wanted += ", and write settings (key=value) before the option"
    return argparse.ArgumentTypeError(f"{text}: {wanted}")

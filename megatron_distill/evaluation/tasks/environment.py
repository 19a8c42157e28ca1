"""The Jinja environment of a task's templates, in which a null is never written as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from jinja2 import StrictUndefined, TemplateRuntimeError
from jinja2.sandbox import SandboxedEnvironment

__all__ = ["NullTextError", "task_environment"]

# Filters that take their value as text: Jinja would take a null as "None".
_OF_TEXTS: Final = (
    "capitalize", "center", "e", "escape", "forceescape", "format", "indent", "join", "lower",
    "replace", "string", "striptags", "title", "trim", "truncate", "upper", "wordcount", "wordwrap",
)  # fmt: skip


class NullTextError(TemplateRuntimeError):
    """A template writes a null."""


def task_environment() -> SandboxedEnvironment:
    """Return an environment that refuses missing columns and the text of nulls.

    A template may test a null, or replace it: `{{ x or "" }}`. Rendering raises NullTextError.
    """
    found = SandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False, finalize=_written
    )
    for name in _OF_TEXTS:
        found.filters[name] = _without_null(found.filters[name])
    found.filters["regex_replace"] = _without_null(_regex_replace)
    return found


def _written(value: Any) -> Any:
    if value is None:
        raise NullTextError("writes a null")
    return value


def _without_null(filter_of_text: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses a null as its value, and in a list or iterator of them."""

    # It keeps the marks of the filter, by which Jinja passes its context as the first argument.
    @wraps(filter_of_text)
    def checked(*given: Any, **named: Any) -> Any:
        values = [list(one) if _is_several(one) else _written(one) for one in given]
        for several in values:
            if isinstance(several, list):
                for one in several:
                    _written(one)
        return filter_of_text(*values, **named)

    return checked


def _is_several(value: Any) -> bool:
    """Whether a value is a list, or an iterator such as `map` gives, which is read once."""
    return isinstance(value, list | tuple) or hasattr(value, "__next__")


def _regex_replace(text: str, pattern: str, replacement: str) -> str:
    return re.sub(pattern, replacement, text)

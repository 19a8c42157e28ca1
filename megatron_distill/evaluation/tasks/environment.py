"""The Jinja environment of a task's templates, in which to write a null is an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
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
    """Return an environment that refuses missing columns, and nulls that are written.

    Alone, or as the value of a filter of texts; operators such as `~` take them. A template may
    test a null, or replace it: `{{ x or "" }}`. Rendering raises NullTextError.
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
    """Return a filter that refuses a null as its value, and within a list of them."""
    # Jinja passes its context before the value to filters that ask for it by a mark.
    place = int(hasattr(filter_of_text, "jinja_pass_arg"))

    @wraps(filter_of_text)
    def checked(*given: Any, **named: Any) -> Any:
        before, value, after = given[:place], _written(given[place]), given[place + 1 :]
        if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
            value = [_written(one) for one in value]
        return filter_of_text(*before, value, *after, **named)

    return checked


def _regex_replace(text: str, pattern: str, replacement: str) -> str:
    return re.sub(pattern, replacement, text)

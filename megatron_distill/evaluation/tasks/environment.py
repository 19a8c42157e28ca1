"""The Jinja environment of a task's templates, in which to write a null is an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Final

from jinja2 import StrictUndefined, TemplateRuntimeError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment

__all__ = ["NullTextError", "task_environment"]

# Filters that take their value as text: Jinja would take a null as "None".
_OF_TEXTS: Final = (
    "capitalize", "center", "e", "escape", "forceescape", "format", "indent", "join", "lower",
    "replace", "string", "striptags", "title", "trim", "truncate", "upper", "wordcount", "wordwrap",
)  # fmt: skip


_IN_A_TEXT: Final = "written_in_a_text"  # no name of a filter that a template has


class NullTextError(TemplateRuntimeError):
    """A template writes a null."""


class _TaskEnvironment(SandboxedEnvironment):
    """An environment whose operators and methods of texts take no null."""

    intercepted_binops = frozenset({"%"})

    def _generate(self, source: nodes.Template, *given: Any, **named: Any) -> str:
        for joined in source.find_all(nodes.Concat):
            joined.nodes = [
                nodes.Filter(one, _IN_A_TEXT, [], [], None, None, lineno=one.lineno)
                for one in joined.nodes
            ]
        return super()._generate(source, *given, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of an operator; raises NullTextError for a null in a text."""
        if isinstance(left, str):
            if isinstance(right, Mapping):
                right = _Values(right)
            else:
                _require(right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandboxed `str.format` of a text, None for anything else."""
        found = super().wrap_str_format(value)
        return None if found is None else _without_nulls(found)


class _Values(dict[Any, Any]):
    """Values by name, without nulls."""

    def __getitem__(self, name: Any) -> Any:
        return _written(super().__getitem__(name))


def task_environment() -> SandboxedEnvironment:
    """Return an environment that refuses missing columns, and nulls that are written.

    Alone, as the value of a filter of texts, or in a text by `~`, `%` and `format`. A template may
    test a null, or replace it: `{{ x or "" }}`. Rendering raises NullTextError.
    """
    found = _TaskEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False, finalize=_written
    )
    for name in _OF_TEXTS:
        found.filters[name] = _without_null(found.filters[name])
    found.filters["format"] = _without_nulls(found.filters["format"])
    found.filters["replace"] = _replacing(found.filters["replace"])
    found.filters[_IN_A_TEXT] = _written
    found.filters["regex_replace"] = _without_null(_regex_replace)
    return found


def _written(value: Any) -> Any:
    if value is None:
        raise NullTextError("writes a null")
    return value


def _require(values: Iterable[Any]) -> None:
    for value in values:
        _written(value)


def _without_nulls(writer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or a method that refuses a null among its arguments."""

    @wraps(writer)
    def checked(*given: Any, **named: Any) -> Any:
        _require((*given, *named.values()))
        return writer(*given, **named)

    return checked


def _replacing(replace: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter `replace` that refuses a null as the old or the new text."""

    @wraps(replace)
    def checked(context: Any, text: Any, old: Any, new: Any, count: Any = None) -> Any:
        _require((old, new))
        return replace(context, text, old, new, count)

    return checked


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

"""Messages about the schema: the place of a key, the known keys, the allowed values."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megatron_distill.config.schema import RunConfig, Section
from megatron_distill.errors import ConfigError, counted

__all__ = [
    "Key",
    "Problem",
    "WithoutEffect",
    "divisors",
    "dotted",
    "dotted_names",
    "field_key",
    "innermost",
    "key_at",
    "listed",
    "raise_problems",
    "schema_problems",
    "section_of",
    "shown",
    "without_effect",
]


_PLAIN = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


@dataclass(frozen=True)
class Key:
    """One key of the file, or one entry of a list in it.

    A required key has an example, which replaces a wrong value while the rules over several keys
    are checked.
    """

    annotation: Any
    bounds: tuple[Any, ...] = ()
    required: bool = False
    example: Any = None

    @property
    def nullable(self) -> bool:
        """Whether null is allowed for this key."""
        return type(None) in get_args(self.annotation)

    @property
    def plain(self) -> Any:
        """The type without null."""
        if get_origin(self.annotation) in (Union, types.UnionType):
            arms = [arm for arm in get_args(self.annotation) if arm is not type(None)]
            assert len(arms) == 1, "a key has one type, with or without null"
            return arms[0]
        return self.annotation

    @property
    def entry(self) -> Key | None:
        """The key of one entry of a list; None if this key is not a list."""
        return Key(get_args(self.plain)[0]) if get_origin(self.plain) is tuple else None

    @property
    def named(self) -> Key | None:
        """The key of one section of a mapping of names to sections; None if this key is none."""
        if get_origin(self.plain) is not dict:
            return None
        value = get_args(self.plain)[1]
        is_section = isinstance(value, type) and issubclass(value, Section)
        return Key(value) if is_section else None

    @property
    def section(self) -> type[Section] | None:
        """The class of the section; None if this key is not a section."""
        plain = self.plain
        return plain if isinstance(plain, type) and issubclass(plain, Section) else None

    @property
    def type_name(self) -> str:
        """The type in a word or two, for tables."""
        if self.entry is not None:
            name = "list of sections" if self.entry.section else f"list of {self.entry.type_name}"
        elif self.section is not None:
            name = "section"
        elif get_origin(self.plain) is Literal:
            name = "choice"
        elif get_origin(self.plain) is dict:
            name = "mapping" if self.named is None else "mapping of sections"
        else:
            name = {int: "integer", float: "number", str: "text", bool: "true/false"}[self.plain]
        return f"{name} or null" if self.nullable else name

    @property
    def range_name(self) -> str:
        """The allowed values beyond the type: bounds or choices; empty without limits."""
        if get_origin(self.plain) is Literal:
            return ", ".join(repr(choice) for choice in get_args(self.plain))
        signs = {
            annotated_types.Ge: (">=", "ge"),
            annotated_types.Gt: (">", "gt"),
            annotated_types.Le: ("<=", "le"),
            annotated_types.Lt: ("<", "lt"),
        }
        words = []
        for bound in self.bounds:
            if type(bound) in signs:
                sign, attribute = signs[type(bound)]
                words.append(f"{sign} {getattr(bound, attribute)}")
            elif isinstance(bound, annotated_types.MinLen):
                words.append("not empty")
            elif pattern := getattr(bound, "pattern", None):  # pydantic's own kind of bound
                words.append(f"matching `{pattern}`")
        return " and ".join(words)

    @property
    def requirement(self) -> str:
        """The allowed values, to finish the sentence 'must be ...'."""
        if self.entry is not None:
            words = f"a {self.type_name.removesuffix(' or null')}"
        elif self.section is not None:
            words = f"a section with keys such as {', '.join(list(self.section.model_fields)[:3])}"
        elif get_origin(self.plain) is Literal:
            words = f"one of {self.range_name}"
        elif get_origin(self.plain) is dict:
            kind = "single values" if self.named is None else "sections"
            words = f"a mapping of names to {kind}"
        else:
            words = _PLAIN[self.plain]
        if self.range_name and get_origin(self.plain) is not Literal:
            words += f", {self.range_name}" if self.bounds_are_lengths else f" {self.range_name}"
        return f"{words}, or null" if self.nullable else words

    @property
    def bounds_are_lengths(self) -> bool:
        """Whether the bounds apply to the length of the value."""
        return any(isinstance(bound, annotated_types.MinLen) for bound in self.bounds)


def field_key(field: FieldInfo) -> Key:
    """Describe one field of a section."""
    example = field.examples[0] if field.examples else None
    return Key(field.annotation, tuple(field.metadata), field.is_required(), example)


def section_of(root: type[Section], place: Sequence[object]) -> type[Section] | None:
    """Return the section class at a place such as ('data', 'sources', 0); None: not a section."""
    if not place:
        return root
    key = key_at(root, place)
    return None if key is None else key.section


def key_at(root: type[Section], place: Sequence[object]) -> Key | None:
    """Return the key at a place such as ('data', 'sources', 0); None: not in the schema."""
    section: type[Section] | None = root
    key: Key | None = None
    for part in place:
        if isinstance(part, int):
            key = None if key is None else key.entry
        elif section is not None and str(part) in section.model_fields:
            key = field_key(section.model_fields[str(part)])
        else:
            key = None if key is None or section is not None else key.named
        if key is None:
            return None
        section = key.section
    return key


def dotted(place: Sequence[object]) -> str:
    """Write a place as the user writes it in an override."""
    return ".".join(str(part) for part in place)


def dotted_names(root: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every key of the file; entries of a list are entry 0."""
    for name, field in root.model_fields.items():
        yield prefix + name
        key = field_key(field)
        below = key if key.entry is None else key.entry
        if below.section is not None:
            step = "." if key.entry is None else ".0."
            yield from dotted_names(below.section, f"{prefix}{name}{step}")


def shown(value: object) -> str:
    """Format a value of the file for a message: as YAML, shortened if long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        value = list(value)
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration: its keys and a sentence that names them.

    A problem without keys concerns the file itself.
    """

    keys: tuple[str, ...]
    text: str

    def concerns(self, key: str) -> bool:
        """Whether one of the problem's keys is `key`, lies below it, or contains it."""
        return any(_holds(key, own) or _holds(own, key) for own in self.keys)


def _holds(outer: str, inner: str) -> bool:
    return inner == outer or inner.startswith(f"{outer}.")


@dataclass(frozen=True)
class WithoutEffect(Problem):
    """A setting without effect: a warning, no error.

    `instead` is the value that replaces it when a file is loaded, so that a run has no such
    setting.
    """

    instead: object


def without_effect(key: str, value: object, reason: str, *, instead: object) -> WithoutEffect:
    """Describe a setting without effect; the reason completes "has no effect ..."."""
    text = f"{key} = {shown(value)} has no effect {reason}"
    return WithoutEffect((key,), text, instead)


def raise_problems(subject: str, problems: Sequence[Problem]) -> None:
    """Raise one ConfigError that lists every error among the problems; return if there is none."""
    errors = [problem for problem in problems if not isinstance(problem, WithoutEffect)]
    if errors:
        lines = "".join(f"\n  - {problem.text}" for problem in errors)
        raise ConfigError(f"{subject}: {counted(len(errors), 'problem')}{lines}")


def innermost(error: ValidationError) -> list[ErrorDetails]:
    """List pydantic's errors, without those that follow from an error deeper in the tree.

    If an entry of a list is wrong, pydantic also reports the list itself as too short.
    """
    details = error.errors(include_url=False)
    places = [dotted(detail["loc"]) for detail in details]
    return [
        detail
        for place, detail in zip(places, details, strict=True)
        if not any(_holds(place, other) for other in places if other != place)
    ]


def schema_problems(
    details: Iterable[ErrorDetails], root: type[Section] = RunConfig
) -> list[Problem]:
    """Translate pydantic's errors on single keys into sentences with the file's own names."""
    return [Problem((dotted(detail["loc"]),), _sentence(detail, root)) for detail in details]


def _sentence(detail: ErrorDetails, root: type[Section]) -> str:
    place, value = detail["loc"], detail["input"]
    name = dotted(place)
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        return _unknown_key(place, root)
    key = key_at(root, place)
    if key is None:
        return f"{name} = {shown(value)}: {detail['msg']}"
    if detail["type"] == "missing":
        return f"{name}: this key is required; it must be {key.requirement}"
    return f"{name} = {shown(value)}: must be {key.requirement}"


def _unknown_key(place: Sequence[Any], root: type[Section]) -> str:
    name, last = dotted(place), str(place[-1])
    if ":" in last:
        spaced = ": ".join(last.split(":", 1))
        return f"{name}: unknown key; YAML wants a space after the colon, {spaced}"
    section = section_of(root, place[:-1])
    siblings = [] if section is None else list(section.model_fields)
    prefix = f"{dotted(place[:-1])}." if len(place) > 1 else ""
    nearest = [prefix + near for near in difflib.get_close_matches(last, siblings, n=1)]
    if not nearest:
        nearest = list(_elsewhere(last, dotted_names(root)))[:3]
    if nearest:
        return f"{name}: unknown key; did you mean {' or '.join(nearest)}?"
    return f"{name}: unknown key; the keys here are {', '.join(siblings)}"


def _elsewhere(last: str, names: Iterable[str]) -> Iterator[str]:
    """Yield the keys of other sections whose last part equals or resembles `last`."""
    by_leaf: dict[str, list[str]] = {}
    for name in names:
        by_leaf.setdefault(name.rsplit(".", 1)[-1], []).append(name)
    for leaf in difflib.get_close_matches(last, by_leaf, n=1, cutoff=0.75):
        yield from by_leaf[leaf]


def divisors(size: int) -> str:
    """List the divisors of `size`, at most eight of them."""
    return listed([number for number in range(1, size + 1) if size % number == 0])


def listed(numbers: list[int]) -> str:
    """List numbers, at most eight of them."""
    found = [str(number) for number in numbers]
    if len(found) > 8:
        return f"{', '.join(found[:8])}, ..."
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"

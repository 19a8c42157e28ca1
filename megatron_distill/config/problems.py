"""What is wrong with a configuration, and its words."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatron_distill.config.describe import dotted, dotted_names, locate, section_of, shown
from megatron_distill.config.schema import RunConfig, Section
from megatron_distill.errors import ConfigError

__all__ = ["Problem", "innermost", "raise_problems", "schema_problems"]


@dataclass(frozen=True)
class Problem:
    """One thing to repair: the keys it concerns and a sentence that names them.

    A problem without keys speaks of the file itself.
    """

    keys: tuple[str, ...]
    text: str

    def concerns(self, key: str) -> bool:
        """Whether one of the problem's keys is `key`, lies below it, or holds it."""
        return any(_holds(key, own) or _holds(own, key) for own in self.keys)


def _holds(outer: str, inner: str) -> bool:
    return inner == outer or inner.startswith(f"{outer}.")


def raise_problems(subject: str, problems: Sequence[Problem]) -> None:
    """Raise one ConfigError that lists every problem; return when there is none."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  - {problem.text}" for problem in problems)
        raise ConfigError(f"{subject}: {count}{lines}")


def innermost(error: ValidationError) -> list[ErrorDetails]:
    """List what pydantic found, less what only follows from something deeper.

    Where an entry of a list is wrong, pydantic counts the list itself as too short.
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
    """Say in the file's own words what pydantic found wrong with single keys."""
    return [Problem((dotted(detail["loc"]),), _sentence(detail, root)) for detail in details]


def _sentence(detail: ErrorDetails, root: type[Section]) -> str:
    place, value = detail["loc"], detail["input"]
    name = dotted(place)
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        return _unknown_key(place, root)
    key = locate(root, place)
    if key is None:
        return f"{name} = {shown(value)}: {detail['msg']}"
    if detail["type"] == "missing":
        return f"{name}: this key is required; it must be {key.requirement}"
    return f"{name} = {shown(value)}: must be {key.requirement}"


def _unknown_key(place: Sequence[Any], root: type[Section]) -> str:
    name, last = dotted(place), str(place[-1])
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
    """Yield the keys of other sections that are called `last`, or nearly so."""
    by_leaf: dict[str, list[str]] = {}
    for name in names:
        by_leaf.setdefault(name.rsplit(".", 1)[-1], []).append(name)
    for leaf in difflib.get_close_matches(last, by_leaf, n=1, cutoff=0.75):
        yield from by_leaf[leaf]

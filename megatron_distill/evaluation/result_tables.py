"""Tables of an evaluation for a terminal, which leave out bins, groups and digests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.table import Table

__all__ = ["result_tables"]

_ERROR: Final = "_stderr"
_OR: Final = "\N{PLUS-MINUS SIGN}"
_HELD_OUT: Final = ("comparison", "comparison_on_teacher_text")
# What belongs to a figure of another row, or is no figure.
_HIDDEN: Final = ("calibration", "blocks", "text_hash", "seconds", "n", "shots")
_COUNTS: Final = ("shots_dropped", "truncated", "cut", "unboxed")

Figures = Mapping[str, Any]


def result_tables(figures: Figures) -> list[Table]:
    """Return the tables of what `evaluate` has found: of tasks, or of held-out text.

    Results of lm-evaluation-harness are in its form, with `configs`.
    """
    if "configs" in figures:
        return [_of_harness(figures)]
    if "results" in figures:
        return [_of_tasks(figures["results"], figures.get("student_minus", {}))]
    tables = [_of_losses(figures)]
    compared = [name for name in _HELD_OUT if name in figures]
    if compared:
        tables.append(_of_comparisons({name: figures[name] for name in compared}))
    if "speculative" in figures:
        tables.append(_of_drafts(figures["speculative"]))
    return tables


def _table(*columns: str) -> Table:
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        found.add_column(column, justify="right" if number else "left", no_wrap=not number)
    return found


def _of_tasks(results: Figures, minus: Figures) -> Table:
    """Return a row per task and measure: each model, and the student less each other one."""
    roles = list(results)
    found = _table("task", "measure", "items", *roles, *(f"student - {name}" for name in minus))
    found.columns[1].justify = "left"
    for task, own in results[roles[0]].items():
        for name, _ in _flat(own):
            first = (task, name, f"{own['n']:,}") if not _is_count(name) else (task, name, "")
            cells = [_shown(results[role].get(task, {}), name) for role in roles]
            gaps = [_gap(other.get(task, {}).get(name)) for other in minus.values()]
            found.add_row(*first, *cells, *gaps)
    reserved = {
        f"{task} is not comparable with published results: {', '.join(one['not_comparable'])}"
        for own in results.values()
        for task, one in own.items()
        if "not_comparable" in one
    }
    found.caption = "\n".join(sorted(reserved)) or None
    found.caption_justify = "left"
    return found


def _of_harness(figures: Figures) -> Table:
    """Return a row per task and metric of the harness, with the filter of the answers."""
    found = _table("task", "metric", "filter", "items", "value")
    found.columns[1].justify = found.columns[2].justify = "left"
    for task, own in figures["results"].items():
        counted = figures.get("n-samples", {}).get(task, {}).get("effective")
        for name, value in own.items():
            metric, comma, kind = name.partition(",")
            if not comma or metric.endswith(_ERROR) or not _is_number(value):
                continue
            error = own.get(f"{metric}{_ERROR},{kind}")
            shown = _with_error(value, error if _is_number(error) else None)
            items = "" if counted is None else f"{counted:,}"
            found.add_row(task, metric, kind if kind != "none" else "", items, shown)
    return found


def _gap(found: Figures | None) -> str:
    """Return a difference with the bounds of the middle 95 % of its resamples."""
    if found is None:
        return ""
    return f"{found['difference']:+.4f} ({found['low']:+.4f} to {found['high']:+.4f})"


def _of_losses(figures: Figures) -> Table:
    found = _table("held-out text", "mean")
    for name, value in _flat(figures):
        found.add_row(name, _shown({name: value}, name))
    for kind in ("sources", "teachers"):
        for source, own in figures.get(kind, {}).items():
            for name, value in _flat(own):
                found.add_row(f"{source}: {name}", _shown({name: value}, name))
    return found


def _of_comparisons(compared: Figures) -> Table:
    titles = {"comparison": "held-out text", "comparison_on_teacher_text": "the teacher's text"}
    found = _table("student and teacher", *(titles[name] for name in compared))
    names = dict.fromkeys(name for one in compared.values() for name, _ in _flat(one))
    for name in names:
        found.add_row(name, *(_shown(one, name) for one in compared.values()))
    return found


def _of_drafts(rules: Figures) -> Table:
    """Return a row per rule and length of drafts, which is measured."""
    names = ("tokens_per_verification", "expected", "expected_speedup", "texts", "blocks")
    found = _table("drafts", *names)
    for rule, by_length in rules.items():
        for length, own in by_length.items():
            found.add_row(f"{rule}, {length}", *(_shown(own, name) for name in names))
    return found


def _flat(figures: Figures) -> Iterator[tuple[str, Any]]:
    """Yield the figures by name; those by length of the draft as `NAME.LENGTH`."""
    for name, value in figures.items():
        if name.endswith(_ERROR) or name in _HIDDEN:
            continue
        if _is_count(name) and not value:
            continue
        if name == "tokens_per_verification":
            yield from ((f"{name}.{length}", one) for length, one in value.items())
        elif _is_number(value) or (isinstance(value, Sequence) and all(map(_is_number, value))):
            yield name, value


def _is_count(name: str) -> bool:
    return name in _COUNTS or name.endswith(("_timeouts", "_failures"))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(figures: Figures, name: str) -> str:
    """Return a figure with its standard error, empty without one."""
    family, _, length = name.partition(".")
    value, error = figures.get(family), figures.get(family + _ERROR)
    if length:
        value, error = (None if one is None else one.get(length) for one in (value, error))
    if value is None:
        return ""
    if isinstance(value, Sequence):  # an interval, with an error of each end
        ends = zip(value, error or [None] * len(value), strict=True)
        return " to ".join(_with_error(*end) for end in ends)
    return _with_error(value, error)


def _with_error(value: float, error: float | None) -> str:
    return _number(value) if error is None else f"{_number(value)} {_OR} {_number(error)}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"

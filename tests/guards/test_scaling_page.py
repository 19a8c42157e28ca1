"""The arithmetic of large runs: the script, the file it wrote and the page about it agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.scaling import (
    LOADED,
    PAGE_CACHE,
    RATES,
    RESULT,
    TOKENISED,
    WATCH_SECONDS,
    report,
    starts,
)
from megatron_distill.runtime import lone_failure

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "scaling.md"


def rows(text: str) -> list[list[str]]:
    """Return the cells of the rows of a page's tables that begin with a number of GPUs."""
    lines = [line.strip("| ") for line in text.splitlines() if " GPUs, TP" in line]
    return [[cell.strip() for cell in line.split(" | ")] for line in lines if " | " in line]


def test_the_file_is_the_one_that_the_script_writes() -> None:
    assert RESULT.read_text(encoding="utf-8") == report()


def test_every_row_of_the_page_has_figures_of_a_row_of_the_script() -> None:
    written = rows(report())
    found = rows(PAGE.read_text(encoding="utf-8"))
    assert len(found) == 14
    for name, *figures in found:
        # The page names the key in full, and leaves out the size that follows from the others.
        short = name.replace("`runtime.tp_comm_overlap`", "tp_comm_overlap").replace("`", "")
        parts = short.split(", ")
        same = [
            cells
            for own, *cells in written
            if own == short
            or [part.rpartition(" DP")[0] or part for part in own.split(", ")] == parts
        ]
        assert any(set(figures) <= set(cells) for cells in same), name


def test_the_page_has_every_row_of_a_start() -> None:
    text = PAGE.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    found = {line.strip("| ").split(" | ")[0]: line.strip("| ").split(" | ")[1:] for line in lines}
    for name, cells in starts():
        assert found[name] == list(cells.values()), name


@pytest.mark.parametrize(
    ("record", "figures"),
    [("data.md", (f"{TOKENISED:,}", f"{LOADED:,}")), ("convert.md", (f"{PAGE_CACHE / 1e9:.2f}",))],
)
def test_rates_of_other_records_are_theirs(record: str, figures: tuple[str, ...]) -> None:
    text = RESULT.with_name(record).read_text(encoding="utf-8")
    assert all(f"| {figure} |" in text for figure in figures)


def test_the_store_has_room_for_the_watch_of_a_thousand_ranks() -> None:
    assert lone_failure._WATCH_SECONDS == WATCH_SECONDS
    store = json.loads(RATES.read_text(encoding="utf-8"))["store"]
    assert store["clients"] == 200
    # Five requests of each look, with teachers on ranks of their own.
    assert store["requests per second"] > 10 * 5 * 1000 / WATCH_SECONDS

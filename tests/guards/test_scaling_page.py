"""The arithmetic of large runs: the script, the file it wrote and the page about it agree."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scaling import RESULT, report

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
    assert len(found) == 10
    for name, *figures in found:
        # The page names the key in full, and leaves out the size that follows from the others.
        short = name.replace("`runtime.tp_comm_overlap`", "tp_comm_overlap")
        parts = short.split(", ")
        same = [
            cells
            for own, *cells in written
            if own == short
            or [part.rpartition(" DP")[0] or part for part in own.split(", ")] == parts
        ]
        assert any(set(figures) <= set(cells) for cells in same), name

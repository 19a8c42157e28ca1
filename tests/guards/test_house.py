"""A reader comes from a configuration to the first step, and from the loss to its gradient."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.guards.source_tree import ROOT

LINES_TO_FIRST_STEP = 700
FRAMES, FILES = 12, 6


@pytest.mark.slow
def test_the_start_and_the_path_to_the_gradient_stay_short() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.guards.house_table"], cwd=ROOT, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    names, _, values, *_ = (line.strip("| ").split(" | ") for line in done.stdout.splitlines())
    row = dict(zip(names, values, strict=True))
    assert 0 < int(row["lines from configuration to first step"]) <= LINES_TO_FIRST_STEP
    assert (row["import cycles"], row["upward imports"]) == ("0", "0")
    found = re.search(r"from the hidden states to it: (\d+) frames, (\d+) files", done.stdout)
    assert 0 < int(found[1]) <= FRAMES
    assert 0 < int(found[2]) <= FILES

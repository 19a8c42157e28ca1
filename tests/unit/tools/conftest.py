"""Calls of a tool in this process."""

import runpy
import sys
from collections.abc import Callable
from unittest.mock import patch

import pytest

from tests.guards.source_tree import ROOT

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Call:
    """Call the module's TOOL with words; returns its status and what it printed."""
    main = runpy.run_path(str(ROOT / "tools" / request.module.TOOL))["main"]

    def run(*words: object) -> tuple[int, str, str]:
        with patch.object(sys, "argv", [request.module.TOOL, *map(str, words)]):
            try:
                status = main()
            except SystemExit as end:
                status = int(str(end.code))
        written = capsys.readouterr()
        return status, written.out, written.err

    return run

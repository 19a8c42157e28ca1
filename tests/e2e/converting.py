"""The conversion tool called in pool workers, with what it says and how it ends."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from unittest.mock import Mock, patch

from tests.distributed.pool import Pool
from tests.e2e.failing import Ending, file_size_limit, script

TOOL = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"


def call_tool(
    rank: int, world: int, words: list[str], limits: dict[int, int], free: int | None
) -> Ending:
    """Call the tool as torchrun would: `limits` bytes a file on some ranks, `free` on the disk."""
    places = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    disk = patch("shutil.disk_usage", return_value=Mock(free=free))
    said = io.StringIO()
    with (
        patch.dict(os.environ, places),
        patch.object(sys, "argv", [str(TOOL), *words]),
        disk if free is not None else contextlib.nullcontext(),
        contextlib.redirect_stderr(said),
        file_size_limit(limits.get(rank)),
    ):
        status = script(TOOL).main()
    return Ending(status, said.getvalue())


def convert(
    pool: Pool,
    *words: object,
    world: int = 2,
    limits: dict[int, int] | None = None,
    free: int | None = None,
) -> list[Ending]:
    """Call the tool on every rank; ranks that do not end together are a failure."""
    texts = [str(word) for word in words]
    return pool.run(world, call_tool, texts, limits or {}, free, timeout=30.0)


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(paths)}

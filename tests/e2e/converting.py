"""The conversion tool called in pool workers, with its output and its exit status."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.pool import Pool
from tests.e2e.failing import Ending, call_script
from tests.e2e.runs import SECONDS

TOOL = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"


def convert(
    pool: Pool,
    *words: object,
    world: int = 2,
    limits: dict[int, int] | None = None,
    free: int | None = None,
) -> list[Ending]:
    """Call the tool on every rank; ranks that do not end together are a failure."""
    texts = [str(word) for word in words]
    return pool.run(world, call_script, TOOL, texts, limits, None, free, timeout=SECONDS)

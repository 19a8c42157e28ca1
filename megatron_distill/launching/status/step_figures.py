"""Figures of a run's newest steps, from the records of its `metrics.jsonl`."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from megatron_distill.launching.grace import is_number, is_step

__all__ = ["slowest_of_teachers", "slowest_ranks", "speed", "why_no_slowest"]

_RECENT_STEPS: Final = 50
_IN_A_STAGE: Final = re.compile(r"\b(?:tp|cp|dp)(\d+)")  # sizes in a checkpoint's layout


def speed(records: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Return the median time of the newest steps, and a step's mean tokens over that time.

    Both are of the same steps, so that their product is the tokens of a step. A mean of the rates
    would weigh quick steps more. None: not in the records.
    """
    steps = [one for one in records if is_step(one)][-_RECENT_STEPS:]
    rated = [one for one in steps if is_number(one.get("tokens_per_second"))]
    if not steps:
        return None, None
    seconds = statistics.median(float(one["step_seconds"]) for one in rated or steps)
    if not rated or seconds <= 0.0:
        return seconds, None
    tokens = statistics.fmean(one["tokens_per_second"] * one["step_seconds"] for one in rated)
    return seconds, tokens / seconds


def slowest_ranks(records: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the newest text about slow ranks, None without one."""
    found = (one.get("slowest_ranks") for one in reversed(records))
    return next((text for text in found if isinstance(text, str)), None)


def slowest_of_teachers(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the newest text of each teacher; a record has those whose line was due."""
    found: dict[str, str] = {}
    for one in records:
        texts = one.get("slowest_teacher_ranks")
        if isinstance(texts, Mapping):
            found |= {name: text for name, text in texts.items() if isinstance(text, str)}
    return dict(sorted(found.items()))


def why_no_slowest(
    run: Path, settings: Mapping[str, Any] | None, checkpoint: str | None, *, steps: int
) -> str | None:
    """Return why the records name no slow ranks; None: the files do not tell.

    settings: of the run. checkpoint: the name of its newest one, which has the layout of the ranks.
    """
    section = (settings or {}).get("logging")
    interval = section.get("straggler_interval") if isinstance(section, Mapping) else None
    if not isinstance(interval, int):
        return None
    if interval == 0:
        return "logging.straggler_interval is 0"
    if checkpoint is not None and _ranks_of_a_stage(run / "checkpoints" / checkpoint) == 1:
        return "one rank per pipeline stage has nothing to be compared with"
    named = f"logging.straggler_interval = {interval}"
    if steps < interval:
        return f"fewer steps than {named}"
    return f"no start has made {named} steps, or a pipeline stage has one rank"


def _ranks_of_a_stage(checkpoint: Path) -> int | None:
    """Return the ranks of a pipeline stage, from the layout in a checkpoint's description."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        text = (checkpoint / "description.json").read_text(encoding="utf-8")
        if sizes := _IN_A_STAGE.findall(json.loads(text).get("layout")):
            return math.prod(map(int, sizes))
    return None

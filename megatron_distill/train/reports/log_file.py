"""The log of an earlier start: shortened to the resumed step, or set aside where nothing resumes.

<output>/metrics.jsonl                of the run
<output>/metrics.step_0000020.jsonl   of a run to step 20 whose checkpoints are gone
<output>/metrics.step_0000020.2.jsonl of a second one
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from megatron_distill.errors import counted
from megatron_distill.log import get_logger
from megatron_distill.runtime.atomic_files import replace_file

__all__ = ["drop_after", "name_of_earlier"]

_LOGGER = get_logger(__name__)


def drop_after(path: Path, resume_step: int) -> None:
    """Rewrite `path` without the lines of steps after `resume_step` and without damaged lines.

    With a `resume_step` of 0 a copy of a log with steps is kept beside it, and named in a warning:
    its checkpoints may be lost by mistake. Raises OSError.
    """
    content = path.read_bytes()
    *whole, torn = content.split(b"\n")
    lines_left: list[bytes] = []
    damaged: list[int] = []
    dropped: list[int] = []
    for number, line in enumerate(whole, start=1):
        step = _step_of(line)
        if step is None:
            damaged.append(number)
        elif step <= resume_step:
            lines_left.append(line)
        else:
            dropped.append(step)
    if damaged:
        _LOGGER.warning("%s: dropped lines that are not records: %s", path, damaged)
    if len(lines_left) == len(whole) and not torn:
        return
    if dropped and resume_step == 0:
        _set_aside(path, content, dropped)
    replace_file(path, b"".join(line + b"\n" for line in lines_left))


def _set_aside(path: Path, content: bytes, steps: list[int]) -> None:
    aside = name_of_earlier(path, max(steps), content)
    if not aside.exists():
        replace_file(aside, content)
    _LOGGER.warning(
        "output: %s has %s up to step %d, but there is no checkpoint to resume from: the run "
        "starts from step 0 with a new log, and %s has the earlier one",
        path,
        counted(len(steps), "record"),
        max(steps),
        aside,
    )


def name_of_earlier(path: Path, step: int, content: bytes) -> Path:
    """Return the first name beside `path` for that step that is free or has the same content.

    So a start that was killed after it wrote one finds it again.
    """
    for number in itertools.count(1):
        suffix = "" if number == 1 else f".{number}"
        earlier = path.with_name(f"{path.stem}.step_{step:07d}{suffix}{path.suffix}")
        if not earlier.exists() or earlier.read_bytes() == content:
            return earlier
    raise AssertionError("a count has no end")


def _step_of(line: bytes) -> int | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None

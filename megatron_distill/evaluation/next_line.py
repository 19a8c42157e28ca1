"""A task made of held-out code: the right next line out of four."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from megatron_distill.runtime.atomic_files import replace_file

__all__ = ["ITEMS", "TASK", "write_task"]

TASK: Final = "next_line"
ITEMS: Final = 200  # at most
_LENGTHS: Final = range(12, 51)  # characters of a line without its indentation
_CONTEXT: Final = 120  # characters before it, in whole lines
_CHOICES: Final = 4
_YAML = """\
kind: multiple_choice
folder: {folder}
files: [{name}.jsonl]
question: "{{{{ before }}}}"
choices: lines
answer: right
delimiter: "\\n"
"""


def write_task(folder: Path, documents: Iterable[str]) -> Path | None:
    """Write the task and its items, and return its YAML file; None if the documents have no item.

    The wrong lines are the right one with its words in another order: all are equally long, and
    knowing the words is not enough. The items are at even distances over all documents, at most
    200, and the same at every call.
    """
    found = [item for text in documents for item in _items(text)]
    if not found:
        return None
    count = min(ITEMS, len(found))
    chosen = [found[number * len(found) // count] for number in range(count)]
    task = folder / f"{TASK}.yaml"
    lines = "".join(json.dumps(item) + "\n" for item in chosen)
    replace_file(folder / f"{TASK}.jsonl", lines.encode())
    replace_file(task, _YAML.format(folder=json.dumps(str(folder)), name=TASK).encode())
    return task


def _items(text: str) -> Iterator[dict[str, object]]:
    lines = text.splitlines()
    for number, line in enumerate(lines):
        right = line.strip()
        before = _before(lines[:number])
        if not before or len(right) not in _LENGTHS or right in before:
            continue
        chance = random.Random(f"{number} {right}")
        options = [right, *_reordered(right, chance)]
        if len(options) < _CHOICES:
            continue
        chance.shuffle(options)
        indentation = line[: len(line) - len(line.lstrip())]
        yield {
            "before": before,
            "lines": [indentation + option for option in options],
            "right": options.index(right),
        }


def _reordered(line: str, chance: random.Random) -> list[str]:
    """Return different orders of a line's words; none for a line with fewer than three words."""
    parts = re.split(r"(\w+)", line)
    words, found = parts[1::2], [line]
    while len(set(words)) > 2 and len(found) < _CHOICES:
        chance.shuffle(words)
        parts[1::2] = words
        if (other := "".join(parts)) not in found:
            found.append(other)
    return found[1:]


def _before(lines: list[str]) -> str:
    """The last lines that fit the context; empty if the last one is blank or does not fit."""
    if not lines or not lines[-1].strip():
        return ""
    context = ""
    for line in reversed(lines):
        longer = f"{line}\n{context}" if context else line
        if len(longer) > _CONTEXT:
            break
        context = longer
    return context.lstrip("\n")

"""Sizes of the package, its start and the call path of the loss: python -m tests.guards.house_table

Both are taken from a real run of configs/tiny.yaml by its command. The start: the code lines of all
functions in `commands` and `train/assemble` that are entered before the first `train_step`. The
path: the package's own frames between `loop.train` and the function that writes the gradient on the
logits.
"""

from __future__ import annotations

import ast
import statistics
import sys
import tempfile
import threading
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

from megatron_distill.runtime.mcore_patches import prepare_megatron_core
from tests.guards.floors import cycles, floor_violations
from tests.guards.habits import broad_handlers, global_state
from tests.guards.source_tree import PACKAGE, ROOT, Source, read_sources


def functions(sources: Sequence[Source]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of the sources, nested ones included."""
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def annotated(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[bool]:
    """For each parameter but self and cls, whether it has an annotation."""
    given = function.args
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [one.annotation is not None for one in parameters if one.arg not in ("self", "cls")]


def sizes() -> dict[str, Any]:
    """The columns of the table, without the call path."""
    sources = read_sources(ROOT, (PACKAGE,))
    tests = read_sources(ROOT, ("tests",))
    lengths = sorted(len(source.text.splitlines()) for source in sources)
    lines = sum(lengths)
    every = list(functions(sources))
    parameters = [one for function in every for one in annotated(function)]
    folders: dict[Path, int] = {}
    for source in sources:
        folder = Path(source.place).parent
        folders[folder] = folders.get(folder, 0) + 1
    return {
        "files": len(sources),
        "lines": lines,
        "files per 1000 lines": round(1000 * len(sources) / lines, 1),
        "median": statistics.median(lengths),
        "p90": lengths[int(0.9 * len(lengths))],
        "max": lengths[-1],
        "files > 350": f"{sum(one > 350 for one in lengths) / len(lengths):.0%}",
        "largest folder": max(folders.values()),
        "fn docstring": f"{sum(bool(ast.get_docstring(one)) for one in every) / len(every):.0%}",
        "params annotated": f"{sum(parameters) / len(parameters):.1%}",
        "import cycles": len(list(cycles(sources))),
        "upward imports": len(list(floor_violations(sources))),
        "broad except": len(list(broad_handlers(sources))),
        "global": len(list(global_state(sources))),
        "test/package": round(sum(len(one.text.splitlines()) for one in tests) / lines, 2),
        "test files": len(tests),
    }


@dataclass
class Start:
    """One real run of configs/tiny.yaml by its command.

    entered: file and first line of each own function called before the first `train_step`. path:
    file and function of each own frame from `loop.train` to the gradient on the logits.
    """

    entered: set[tuple[str, int]] = field(default_factory=set)
    path: list[str] = field(default_factory=list)

    def note_call(self, frame: FrameType, event: str, _: object) -> None:
        """Note a function that is entered; as a profile function, it ends at `train_step`."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(ROOT / PACKAGE)):
            return
        if code.co_name == "train_step":
            sys.setprofile(None)
            threading.setprofile(None)
            return
        place = Path(code.co_filename).relative_to(ROOT).as_posix()
        self.entered.add((place, code.co_firstlineno))

    def note_path(self) -> None:
        """Note the frames of the first gradient."""
        if self.path:
            return
        package = str(ROOT / PACKAGE)
        frames = traceback.extract_stack()
        first = next(i for i, one in enumerate(frames) if one.name == "train")
        self.path.extend(
            f"{Path(one.filename).relative_to(package)}:{one.name}"
            for one in frames[first:]
            if one.filename.startswith(package)
        )
        self.path.append("ops/torch_rows.py:gradient")


def real_start() -> Start:
    """Run the training command on configs/tiny.yaml and return its start."""
    from megatron_distill.ops.torch_rows import Block

    # Packages of others take far longer under a profile function.
    prepare_megatron_core(on_cuda=False)
    for name in ("torch._dynamo", "transformers.models.auto.tokenization_auto"):
        import_module(name)
    start = Start()
    gradient = Block.gradient

    def noted(*given: Any, **named: Any) -> Any:
        start.note_path()
        return gradient(*given, **named)

    with tempfile.TemporaryDirectory() as folder, patch.object(Block, "gradient", noted):
        threading.setprofile(start.note_call)
        sys.setprofile(start.note_call)
        from megatron_distill.commands.train import COMMAND

        run = COMMAND.script(None)
        run([str(ROOT / "configs" / "tiny.yaml"), "train.steps=5", f"output={folder}/run"])
    return start


def lines_to_first_step(start: Start) -> dict[str, int]:
    """Code lines, by file, of the functions of commands and assembly before the first step."""
    found = {}
    for source in read_sources(ROOT, (f"{PACKAGE}/commands", f"{PACKAGE}/train/assemble")):
        entered = {line for place, line in start.entered if place == source.place}
        count = len(lines_of_functions(source, entered))
        if count:
            found[source.place] = count
    return found


def lines_of_functions(source: Source, entered: Collection[int]) -> set[int]:
    """The code lines of functions that begin at the given lines, nested functions included.

    Blank lines, comments, docstrings and imports are not counted, decorators are.
    """
    wanted: set[int] = set()
    skipped: set[int] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min(one.lineno for one in (node, *node.decorator_list))
            if first in entered:
                wanted |= _span(first, node)
            if ast.get_docstring(node) is not None:
                skipped |= _span(node.body[0].lineno, node.body[0])
        elif isinstance(node, ast.Import | ast.ImportFrom):
            skipped |= _span(node.lineno, node)
    texts = source.text.splitlines()
    return {
        line
        for line in wanted - skipped
        if texts[line - 1].strip() and not texts[line - 1].lstrip().startswith("#")
    }


def _span(first: int, node: ast.stmt) -> set[int]:
    assert node.end_lineno is not None, "a parsed statement has an end"
    return set(range(first, node.end_lineno + 1))


def main() -> int:
    """Print both."""
    start = real_start()
    by_file = lines_to_first_step(start)
    row = {**sizes(), "lines from configuration to first step": sum(by_file.values())}
    print("| " + " | ".join(row) + " |")  # noqa: T201
    print("|" + "---|" * len(row))  # noqa: T201
    print("| " + " | ".join(str(value) for value in row.values()) + " |")  # noqa: T201
    print("\nfrom configuration to first step, code lines:")  # noqa: T201
    print("\n".join(f"  {count:4} {place}" for place, count in by_file.items()))  # noqa: T201
    path = start.path
    files = {one.split(":")[0] for one in path}
    objective = next(i for i, one in enumerate(path) if one.startswith("losses/"))
    inside = path[objective:]
    print(f"\nfrom loop.train to the logit gradient: {len(path)} frames, {len(files)} files")  # noqa: T201
    own = {one.split(":")[0] for one in inside}
    print(f"from the hidden states to it: {len(inside)} frames, {len(own)} files")  # noqa: T201
    print("\n".join(f"  {one}" for one in path))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Sizes of the package and the call path of the loss: python -m tests.guards.house_table

The path is taken from a real run of configs/tiny.yaml: the package's own frames between
`loop.train` and the function that writes the gradient on the logits.
"""

from __future__ import annotations

import ast
import statistics
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.guards.floors import cycles, floor_violations
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


def broad_handlers(sources: Sequence[Source]) -> int:
    """How many handlers catch everything."""
    found = 0
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ExceptHandler):
                kind = "" if node.type is None else ast.unparse(node.type)
                found += kind in ("", "Exception", "BaseException")
    return found


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
        "broad except": broad_handlers(sources),
        "global": sum(
            isinstance(node, ast.Global) for source in sources for node in ast.walk(source.tree)
        ),
        "test/package": round(sum(len(one.text.splitlines()) for one in tests) / lines, 2),
        "test files": len(tests),
    }


def path_of_the_gradient() -> list[str]:
    """File and function of each own frame from `loop.train` to the gradient on the logits."""
    from megatron_distill.config import load_config
    from megatron_distill.runtime.launch import Launch, joined_world
    from megatron_distill.runtime.termination import TerminationRequest

    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            ROOT / "configs" / "tiny.yaml", ["train.steps=5", f"output={folder}/run"]
        )
        taken: list[str] = []
        with joined_world(
            **config.runtime.model_dump(), launch=Launch.from_environment()
        ) as device:
            from megatron_distill.ops.torch_rows import Block
            from megatron_distill.train.assemble.run import run_training

            gradient = Block.gradient

            def noted(*given: Any, **named: Any) -> Any:
                if not taken:
                    package = str(ROOT / PACKAGE)
                    frames = traceback.extract_stack()
                    first = next(i for i, one in enumerate(frames) if one.name == "train")
                    taken.extend(
                        f"{Path(one.filename).relative_to(package)}:{one.name}"
                        for one in frames[first:]
                        if one.filename.startswith(package)
                    )
                    taken.append("ops/torch_rows.py:gradient")
                return gradient(*given, **named)

            with patch.object(Block, "gradient", noted):
                run_training(config, device, TerminationRequest())
    return taken


def main() -> int:
    """Print both."""
    row = sizes()
    print("| " + " | ".join(row) + " |")  # noqa: T201
    print("|" + "---|" * len(row))  # noqa: T201
    print("| " + " | ".join(str(value) for value in row.values()) + " |")  # noqa: T201
    path = path_of_the_gradient()
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

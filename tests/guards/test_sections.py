"""Imports run downwards, and only orchestrators take the whole configuration."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.guards.floors import FENCES, cycles, fence_violations, floor_violations
from tests.guards.source_tree import PACKAGE, ROOT, Source, read_sources

PROJECT = read_sources(ROOT, (PACKAGE, "launch", "tools"))


def sources_of(root: Path, texts: dict[str, str]) -> list[Source]:
    """Write the modules of a synthetic package, such as 'config/load', and read them."""
    for name, text in texts.items():
        path = root / PACKAGE / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return read_sources(root, (PACKAGE,))


def test_there_is_a_project_to_guard():
    assert {"config", "errors", "log"} <= {source.room for source in PROJECT}


def test_imports_run_downwards_only():
    found = list(floor_violations(PROJECT))
    assert not found, "\n".join(found)


def test_fenced_packages_stay_in_their_places():
    found = list(fence_violations(PROJECT))
    assert not found, "\n".join(found)


def test_no_import_cycle():
    found = list(cycles(PROJECT))
    assert not found, "\n".join(found)


OFF_THE_STAIRS = {
    "from megatron_distill.losses import Term\n": "ops imports losses from a floor above",
    "from ..losses import objective\n": "ops imports losses from a floor above",
    "def late():\n    from megatron_distill.train import loop\n": "a floor above",
    "import megatron_distill.attic\n": "stands on no floor",
}


@pytest.mark.parametrize("text", OFF_THE_STAIRS)
def test_an_import_off_the_stairs_is_found(tmp_path, text):
    (found,) = floor_violations(sources_of(tmp_path, {"ops/vocab": text}))
    assert found.startswith("megatron_distill/ops/vocab.py:")
    assert OFF_THE_STAIRS[text] in found


def test_an_import_down_the_stairs_is_allowed(tmp_path):
    text = (
        "import torch\nfrom megatron_distill.runtime import collectives\n"
        "from .vocab import VocabShard\nfrom megatron_distill.errors import DataError\n"
    )
    assert list(floor_violations(sources_of(tmp_path, {"ops/statistics": text}))) == []


def test_a_name_outside_its_fence_is_found(tmp_path):
    outside = {
        "data/sources": "import megatron.core.datasets\n",
        "evaluation/runs": "def f():\n    from megatron.core import parallel_state\n",
        "losses/terms": "from megatron_distill.config import TermConfig\n",
        "runtime/device": "import tests.reference.divergence\n",
    }
    found = list(fence_violations(sources_of(tmp_path, outside)))
    assert len(found) == len(outside)
    inside = {
        "runtime/mcore_patches": "import megatron.core\n",
        "train/assemble/run": "from megatron_distill.config import RunConfig\n",
    }
    assert list(fence_violations(sources_of(tmp_path / "inside", inside))) == []


def test_every_fenced_place_with_a_name_of_its_own_is_there():
    named = [place for places in FENCES.values() for place in places if "*" not in place]
    assert [place for place in named if not (ROOT / place).is_file()] == []


def test_circles_are_found_and_a_package_that_reexports_is_none(tmp_path):
    three = {
        "ops/__init__": "from megatron_distill.ops.a import f\n",
        "ops/a": "from megatron_distill.ops.b import g\n",
        "ops/b": "def late():\n    from megatron_distill.ops import f\n",
    }
    assert "megatron_distill.ops.b" in next(cycles(sources_of(tmp_path / "three", three)))
    none = three | {"ops/b": "import torch\n"}
    assert list(cycles(sources_of(tmp_path / "none", none))) == []


WHOLE = {"RunConfig", "JobConfig", "CaptureConfig"}
ASSEMBLY = read_sources(ROOT, (f"{PACKAGE}/train/assemble", f"{PACKAGE}/train/reports"))

# A function over fewer sections takes these instead.
FEWEST_SECTIONS = 3


def needless_takers(sources: Sequence[Source]) -> Iterator[str]:
    """Functions that take a whole configuration and read less than three of its keys, and classes
    with a field of it."""
    for source in sources:
        file = source.place.rpartition("/")[2]
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                given = node.args
                every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
                every += [one for one in (given.vararg, given.kwarg) if one is not None]
                whole = [
                    one.arg
                    for one in every
                    if one.annotation is not None and _names_whole(one.annotation)
                ]
                is_needless = any(not _orchestrates(node, name) for name in whole)
            elif isinstance(node, ast.ClassDef):
                fields = [one.annotation for one in node.body if isinstance(one, ast.AnnAssign)]
                is_needless = any(_names_whole(one) for one in fields)
            else:
                continue
            if is_needless:
                yield f"{file}::{getattr(node, 'name', 'lambda')}"


def _orchestrates(function: ast.AST, name: str) -> bool:
    """Whether a function hands the argument on as a whole, or reads enough of its keys."""
    keys, uses = set(), 0
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == name and node.attr != "model_dump":
                keys.add(node.attr)
                uses += 1
        elif isinstance(node, ast.Name) and node.id == name:
            uses -= 1
    return uses < 0 or len(keys) >= FEWEST_SECTIONS


def _names_whole(annotation: ast.expr) -> bool:
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _names_whole(ast.parse(node.value, mode="eval").body):
                return True
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in WHOLE:
                return True
    return False


def test_only_orchestrators_take_the_whole_configuration() -> None:
    assert not list(needless_takers(ASSEMBLY))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(config: RunConfig): pass\n", ["f"]),
        ("def f(*, config: 'JobConfig | None' = None): pass\n", ["f"]),
        ("def f():\n    def g(c: config.CaptureConfig): pass\n", ["g"]),
        ("class C:\n    config: RunConfig\n", ["C"]),
        ("class C:\n    def f(self, configs: list[RunConfig]): pass\n", ["f"]),
        ("def f(config: RunConfig): g(config.a, config.b, config.a)\n", ["f"]),
        ("def f(data: DataConfig) -> RunConfig: pass\n", []),
        ("def f(config: RunConfig): g(config.a, config.b, config.c)\n", []),
        ("def f(config: RunConfig): g(config, config.a)\n", []),
    ],
)
def test_a_taker_is_found(text: str, found: list[str]) -> None:
    source = Source("megatron_distill/train/assemble/x.py", text)
    assert list(needless_takers([source])) == [f"x.py::{name}" for name in found]

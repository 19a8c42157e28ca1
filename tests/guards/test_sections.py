"""Builders of a run take sections of the configuration; only a job's orchestrators take the whole.

Regimes: an annotation by name, by a union, in quotes; a field of a class; a nested function.
"""

import ast
from collections.abc import Iterator, Sequence

import pytest

from tests.guards.source_tree import PACKAGE, ROOT, Source, read_sources

WHOLE = {"RunConfig", "JobConfig", "CaptureConfig"}
ASSEMBLY = read_sources(ROOT, (f"{PACKAGE}/train/assemble",))

# Functions of train/assemble that lead a job, check it as a whole, or record all its settings.
ORCHESTRATORS = {
    "run.py::run_training",
    "open_run.py::open_run",
    "run.py::_assemble",
    "run.py::_checked_folder",
    "reporting.py::open_metrics",
    "run.py::_with_computed_steps",
    "reporting.py::banner_of_run",
    "capture.py::run_capture",
    "capture.py::_assemble",
    "capture.py::_banner",
    "trained_run.py::evaluate",
    "trained_run.py::writer",
    "checks.py::check_start",
    "start.py::note_start",
    "start.py::_note",
    "start.py::plain_settings",
}


def takers_of_the_whole(sources: Sequence[Source]) -> Iterator[str]:
    """Functions with a parameter, and classes with a field, of a whole configuration."""
    for source in sources:
        file = source.place.rpartition("/")[2]
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                given = node.args
                every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
                every += [one for one in (given.vararg, given.kwarg) if one is not None]
                annotations = [one.annotation for one in every if one.annotation is not None]
            elif isinstance(node, ast.ClassDef):
                annotations = [
                    one.annotation for one in node.body if isinstance(one, ast.AnnAssign)
                ]
            else:
                continue
            if any(_names_whole(one) for one in annotations):
                yield f"{file}::{getattr(node, 'name', 'lambda')}"


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
    assert set(takers_of_the_whole(ASSEMBLY)) == ORCHESTRATORS


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(config: RunConfig): pass\n", ["f"]),
        ("def f(*, config: 'JobConfig | None' = None): pass\n", ["f"]),
        ("def f():\n    def g(c: config.CaptureConfig): pass\n", ["g"]),
        ("class C:\n    config: RunConfig\n", ["C"]),
        ("class C:\n    def f(self, configs: list[RunConfig]): pass\n", ["f"]),
        ("def f(data: DataConfig) -> RunConfig: pass\n", []),
    ],
)
def test_a_taker_is_found(text: str, found: list[str]) -> None:
    source = Source("megatron_distill/train/assemble/x.py", text, ast.parse(text))
    assert list(takers_of_the_whole([source])) == [f"x.py::{name}" for name in found]

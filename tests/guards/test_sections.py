"""Builders of a run take sections of the configuration; only a job's orchestrators take the whole.

An orchestrator hands the whole on, or reads three keys of it or more.
"""

import ast
from collections.abc import Iterator, Sequence

import pytest

from tests.guards.source_tree import PACKAGE, ROOT, Source, read_sources

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
    source = Source("megatron_distill/train/assemble/x.py", text, ast.parse(text))
    assert list(needless_takers([source])) == [f"x.py::{name}" for name in found]

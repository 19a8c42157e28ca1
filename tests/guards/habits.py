"""Habits that the package refuses, whatever a linter was told to overlook."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from tests.guards.source_tree import Source

# Methods whose meaning is the framework's; the docstring of their class speaks for them.
FRAMEWORK_METHODS = ("forward", "backward", "setup_context")
DRAWER_NAMES = ("util", "utils", "helper", "helpers", "manager", "misc", "common")
LEFT_OPEN = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def broad_handlers(sources: Sequence[Source]) -> Iterator[str]:
    """Find handlers that catch everything."""
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
                yield f"{source.place}:{node.lineno}: catches everything; name the errors"


def _is_broad(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    arms = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(
        isinstance(arm, ast.Name) and arm.id in ("Exception", "BaseException") for arm in arms
    )


def prints(sources: Sequence[Source]) -> Iterator[str]:
    """Find calls of print."""
    for source in sources:
        for node in ast.walk(source.tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "print"
            ):
                yield f"{source.place}:{node.lineno}: print; use the logger"


def left_open(sources: Sequence[Source]) -> Iterator[str]:
    """Find comments and code that put work off."""
    for source in sources:
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            put_off = token.type in (tokenize.COMMENT, tokenize.STRING) and LEFT_OPEN.search(
                token.string
            )
            if put_off or (token.type == tokenize.NAME and token.string == "NotImplementedError"):
                yield f"{source.place}:{token.start[0]}: left open: {token.string.strip()[:60]}"


def global_state(sources: Sequence[Source]) -> Iterator[str]:
    """Find functions that rebind a module's names."""
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Global):
                yield f"{source.place}:{node.lineno}: global {', '.join(node.names)}"


def config_probes(sources: Sequence[Source]) -> Iterator[str]:
    """Find getattr with a default on something called config."""
    for source in sources:
        for node in ast.walk(source.tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "getattr"
                and len(node.args) == 3
                and "config" in ast.unparse(node.args[0]).lower()
            ):
                yield f"{source.place}:{node.lineno}: probes a configuration with getattr"


def not_ascii(sources: Sequence[Source]) -> Iterator[str]:
    """Find lines with characters outside ASCII."""
    for source in sources:
        for number, line in enumerate(source.text.splitlines(), start=1):
            if not line.isascii():
                yield f"{source.place}:{number}: not ASCII"


def drawer_names(sources: Sequence[Source]) -> Iterator[str]:
    """Find files and folders that are named as drawers for anything."""
    for source in sources:
        for part in PurePosixPath(source.place).with_suffix("").parts:
            if set(part.split("_")) & set(DRAWER_NAMES):
                yield f"{source.place}: {part} names no concept"


def missing_docstrings(sources: Sequence[Source]) -> Iterator[str]:
    """Find public modules, classes, functions and methods without a docstring."""
    for source in sources:
        if ast.get_docstring(source.tree) is None and source.tree.body:
            yield f"{source.place}:1: the module has no docstring"
        for name, node in _public(source.tree.body, ""):
            if ast.get_docstring(node) is None:
                yield f"{source.place}:{node.lineno}: {name} has no docstring"


def _public(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    for node in body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        in_class = bool(prefix)
        if in_class and (node.name in FRAMEWORK_METHODS or _follows_another(node)):
            continue
        yield f"{prefix}{node.name}", node
        if isinstance(node, ast.ClassDef):
            yield from _public(node.body, f"{prefix}{node.name}.")


def _follows_another(node: Function | ast.ClassDef) -> bool:
    """Whether a decorator says that the docstring stands elsewhere: override, setter, overload."""
    words = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(word.split(".")[-1] in ("override", "setter", "overload") for word in words)

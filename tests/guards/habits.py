"""Habits that the package refuses, whatever a linter was told to overlook."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import TypeGuard

from tests.guards.source_tree import Source

# Methods whose meaning is the framework's; the docstring of their class speaks for them.
FRAMEWORK_METHODS = ("forward", "backward", "setup_context")
DRAWER_NAMES = ("util", "utils", "helper", "helpers", "manager", "misc", "common")
# Functions of torch.distributed that every rank of a group has to call.
COLLECTIVES = re.compile(
    r"(i?all_reduce|reduce|all_gather|gather|scatter|reduce_scatter|all_to_all|broadcast|barrier"
    r"|monitored_barrier|i?send|i?recv|batch_isend_irecv)(_coalesced|_object|_object_list|_single"
    r"|_tensor|_into_tensor|_with_index)*"
)
# Methods that make a class a kind of signal, or of a store's entries.
KIND_METHODS = ("token_statistics", "settings_problems")
# Modules that ask a target once whether it is a top-k, whose probabilities are known.
ONE_KIND = ("megatron_distill/losses/mean_on_records.py", "megatron_distill/train/comparison.py")
# Blocks that go on after an error in them.
SWALLOWING = ("suppress", "together")
LEFT_OPEN = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def broad_handlers(sources: Sequence[Source]) -> Iterator[str]:
    """Find handlers that catch everything."""
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
                yield f"{source.place}:{node.lineno}: catches everything; name the errors"


def _is_broad(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    arms = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(
        isinstance(arm, ast.Name) and arm.id in ("Exception", "BaseException") for arm in arms
    )


def caught_collectives(sources: Sequence[Source]) -> Iterator[str]:
    """Find collectives in blocks whose errors one rank alone would pass over, while others wait.

    A handler that raises in the end is none such. Functions count whose docstrings say that they
    are collective, unless others have their name.
    """
    known = communicating(sources)
    for source in sources:
        for node in source.nodes:
            if not _passes_over_errors(node):
                continue
            for call in (found for statement in node.body for found in ast.walk(statement)):
                if isinstance(call, ast.Call) and _is_collective(call.func, known):
                    called = ast.unparse(call.func)
                    yield f"{source.place}:{call.lineno}: catches around the collective {called}"


def _passes_over_errors(node: ast.AST) -> TypeGuard[ast.Try | ast.With]:
    if isinstance(node, ast.With):
        opened = [item.context_expr for item in node.items]
        names = [_last_name(call.func) for call in opened if isinstance(call, ast.Call)]
        return any(name in SWALLOWING for name in names)
    return isinstance(node, ast.Try) and any(
        not isinstance(handler.body[-1], ast.Raise) for handler in node.handlers
    )


def communicating(sources: Sequence[Source]) -> set[str]:
    """Names of functions that say they communicate, where all of that name do."""
    functions = [
        node for source in sources for node in source.nodes if isinstance(node, ast.FunctionDef)
    ]
    has_line = {node: "Collective" in (ast.get_docstring(node) or "") for node in functions}
    return {node.name for node in functions if has_line[node]} - {
        node.name for node in functions if not has_line[node]
    }


def _is_collective(called: ast.expr, known: set[str]) -> bool:
    name = _last_name(called)
    if name in known:
        return True
    of_torch = isinstance(called, ast.Attribute) and ast.unparse(called.value).endswith("dist")
    of_torch = of_torch or ast.unparse(called).startswith("torch.distributed.")
    return of_torch and COLLECTIVES.fullmatch(name) is not None


def _last_name(called: ast.expr) -> str:
    if isinstance(called, ast.Name | ast.Attribute):
        return called.id if isinstance(called, ast.Name) else called.attr
    return ast.unparse(called).rpartition(".")[2]


def repeated_exports(sources: Sequence[Source]) -> Iterator[str]:
    """Find names that a module's ``__all__`` lists twice."""
    for source in sources:
        for node in source.tree.body:
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.List)):
                continue
            if not any(isinstance(to, ast.Name) and to.id == "__all__" for to in node.targets):
                continue
            names = [one.value for one in node.value.elts if isinstance(one, ast.Constant)]
            for name in sorted({str(name) for name in names if names.count(name) > 1}):
                yield f"{source.place}:{node.lineno}: __all__ lists {name} twice"


def prints(sources: Sequence[Source]) -> Iterator[str]:
    """Find calls of print."""
    for source in sources:
        for node in source.nodes:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "print"
            ):
                yield f"{source.place}:{node.lineno}: print; use the logger"


def left_open(sources: Sequence[Source]) -> Iterator[str]:
    """Find comments and code that put work off."""
    for source in sources:
        if not (LEFT_OPEN.search(source.text) or "NotImplementedError" in source.text):
            continue
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            put_off = token.type in (tokenize.COMMENT, tokenize.STRING) and LEFT_OPEN.search(
                token.string
            )
            if put_off or (token.type == tokenize.NAME and token.string == "NotImplementedError"):
                yield f"{source.place}:{token.start[0]}: left open: {token.string.strip()[:60]}"


def global_state(sources: Sequence[Source]) -> Iterator[str]:
    """Find functions that rebind a module's names."""
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.Global):
                yield f"{source.place}:{node.lineno}: global {', '.join(node.names)}"


def config_probes(sources: Sequence[Source]) -> Iterator[str]:
    """Find getattr with a default on something called config."""
    for source in sources:
        for node in source.nodes:
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


def kind_ladders(sources: Sequence[Source]) -> Iterator[str]:
    """Find tests for a kind of signal: the answer is a method that all kinds have.

    Assertions are allowed; no other kind is treated in their place.
    """
    kinds = signal_kinds(sources)
    for source in sources:
        asserted = {
            id(inner)
            for node in source.nodes
            if isinstance(node, ast.Assert)
            for inner in ast.walk(node.test)
        }
        tests = [
            (node.lineno, names)
            for node in source.nodes
            if id(node) not in asserted and (names := _tested_classes(node) & kinds)
        ]
        allowed = 1 if source.place in ONE_KIND else 0
        for line, names in tests[allowed:]:
            found = " and ".join(sorted(names))
            yield f"{source.place}:{line}: tests for {found}; call a method that all kinds have"


def signal_kinds(sources: Sequence[Source]) -> set[str]:
    """Names of the classes with a method that every kind of signal has."""
    return {
        node.name
        for source in sources
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
        and any(isinstance(one, Function) and one.name in KIND_METHODS for one in node.body)
    }


def _tested_classes(node: ast.AST) -> set[str]:
    """Names of the classes that a node tests for: isinstance, `type(x) is C`, or `case C():`."""
    if isinstance(node, ast.MatchClass):
        return {_last_name(node.cls)}
    if isinstance(node, ast.Compare) and _is_type_of(node.left):
        return {_last_name(one) for to in node.comparators for one in _expressions(to)}
    if isinstance(node, ast.Call) and _last_name(node.func) in ("isinstance", "issubclass"):
        return {_last_name(one) for one in _expressions(node.args[1])}
    return set()


def _is_type_of(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _last_name(node.func) == "type"


def _expressions(node: ast.expr) -> list[ast.expr]:
    return [one for one in ast.walk(node) if isinstance(one, ast.expr)]


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
    """Whether the docstring stands elsewhere, by a decorator: override, setter, overload."""
    words = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(word.split(".")[-1] in ("override", "setter", "overload") for word in words)

"""How long a file and a function may be."""

import ast
from collections.abc import Collection, Iterator, Sequence

from tests.guards.source_tree import Source

FILE_LINES = 500
FUNCTION_LINES = 60

# Files and functions (place::name) that read better long; each with its reason.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}


def long_files(sources: Sequence[Source], excepted: Collection[str] = LONG_FILES) -> Iterator[str]:
    """Find files of more than FILE_LINES lines."""
    for source in sources:
        count = len(source.text.splitlines())
        if count > FILE_LINES and source.place not in excepted:
            yield f"{source.place}: {count} lines, more than {FILE_LINES}"


def long_functions(
    sources: Sequence[Source], excepted: Collection[str] = LONG_FUNCTIONS
) -> Iterator[str]:
    """Find functions of more than FUNCTION_LINES lines; their docstring is not counted."""
    for source in sources:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            count = _lines(node) - _docstring_lines(node)
            if count > FUNCTION_LINES and f"{source.place}::{node.name}" not in excepted:
                yield (
                    f"{source.place}:{node.lineno}: {node.name} has {count} lines, more than "
                    f"{FUNCTION_LINES}"
                )


def needless_exceptions(
    sources: Sequence[Source],
    files: Collection[str] = LONG_FILES,
    functions: Collection[str] = LONG_FUNCTIONS,
) -> Iterator[str]:
    """Find names in the tables of exceptions that are short by now, or gone."""
    still_long = {text.split(":")[0] for text in long_files(sources, ())}
    yield from (f"{name}: no longer too long" for name in files if name not in still_long)
    for name in functions:
        place, _, function = name.partition("::")
        if not any(
            text.startswith(f"{place}:") and f" {function} has " in text
            for text in long_functions(sources, ())
        ):
            yield f"{name}: no longer too long"


def _lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None, "a parsed statement has an end"
    return node.end_lineno - node.lineno + 1


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return 0 if ast.get_docstring(node) is None else _lines(node.body[0])

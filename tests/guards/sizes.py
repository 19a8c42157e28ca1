"""How long a file, a function and a script may be, and how many files a folder may have."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.guards.source_tree import Source

FILE_LINES = 500
FUNCTION_LINES = 60
FOLDER_FILES = 24
SCRIPT_LINES = 20


def long_files(sources: Sequence[Source]) -> Iterator[str]:
    """Find files of more than FILE_LINES lines."""
    for source in sources:
        count = len(source.text.splitlines())
        if count > FILE_LINES:
            yield f"{source.place}: {count} lines, more than {FILE_LINES}"


def long_functions(sources: Sequence[Source]) -> Iterator[str]:
    """Find functions of more than FUNCTION_LINES lines; their docstring is not counted."""
    for source in sources:
        for node in source.nodes:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            count = _lines(node) - _docstring_lines(node)
            if count > FUNCTION_LINES:
                yield (
                    f"{source.place}:{node.lineno}: {node.name} has {count} lines, more than "
                    f"{FUNCTION_LINES}"
                )


def long_scripts(sources: Sequence[Source]) -> Iterator[str]:
    """Find scripts of more than SCRIPT_LINES lines; their docstring is not counted."""
    for source in sources:
        docstring = 0 if ast.get_docstring(source.tree) is None else _lines(source.tree.body[0])
        count = len(source.text.splitlines()) - docstring
        if count > SCRIPT_LINES:
            yield f"{source.place}: {count} lines, more than {SCRIPT_LINES}; move work to commands"


def crowded_folders(folders: Sequence[Path]) -> Iterator[str]:
    """Find folders with more than FOLDER_FILES files beside their `__init__.py`."""
    for top in folders:
        for folder in (top, *sorted(path for path in top.rglob("*") if path.is_dir())):
            if folder.name == "__pycache__":
                continue
            count = sum(one.is_file() and one.name != "__init__.py" for one in folder.iterdir())
            if count > FOLDER_FILES:
                yield f"{folder}: {count} files, more than {FOLDER_FILES}"


def _lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None, "a parsed statement has an end"
    return node.end_lineno - node.lineno + 1


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return 0 if ast.get_docstring(node) is None else _lines(node.body[0])

"""Length of files, functions, scripts and folders: on the tree, and on both sides of each limit."""

from pathlib import Path

from tests.guards.sizes import (
    FILE_LINES,
    FOLDER_FILES,
    FUNCTION_LINES,
    SCRIPT_LINES,
    crowded_folders,
    long_files,
    long_functions,
    long_scripts,
)
from tests.guards.source_tree import PACKAGE, ROOT, Source, read_sources

PROJECT = read_sources(ROOT, (PACKAGE, "launch", "tools", "benchmarks", "tests"))
SCRIPTS = read_sources(ROOT, ("launch", "tools"))


FOLDERS = [ROOT / name for name in (PACKAGE, "launch", "tools", "benchmarks", "tests", "docs")]
RECORDS = ROOT / "benchmarks" / "results"  # one file or two for each benchmark


def source(text: str) -> Source:
    return Source("megatron_distill/ops/long.py", text)


def function(lines: int, docstring_lines: int = 0) -> str:
    """Write a function whose `def` and statements take `lines` lines."""
    docstring = '    """Sum.\n' + "\n" * (docstring_lines - 2) + '    """\n'
    body = "    x = 1\n" * (lines - 1)
    return "def f():\n" + (docstring if docstring_lines else "") + body


def test_no_file_is_too_long():
    found = list(long_files(PROJECT))
    assert not found, "\n".join(found)


def test_no_function_is_too_long():
    found = list(long_functions(PROJECT))
    assert not found, "\n".join(found)


def test_no_script_is_more_than_thin():
    found = list(long_scripts(SCRIPTS))
    assert not found, "\n".join(found)


def test_no_folder_is_crowded():
    found = [text for text in crowded_folders(FOLDERS) if not text.startswith(f"{RECORDS}:")]
    assert not found, "\n".join(found)


def test_the_folder_limit_is_sharp_and_spares_the_init(tmp_path: Path):
    room = tmp_path / "room"
    room.mkdir()
    (room / "__init__.py").touch()
    for number in range(FOLDER_FILES):
        (room / f"{number}.py").touch()
    assert list(crowded_folders([tmp_path])) == []
    (room / "one_more.md").touch()
    assert list(crowded_folders([tmp_path])) == [
        f"{room}: {FOLDER_FILES + 1} files, more than {FOLDER_FILES}"
    ]


def test_the_file_limit_is_sharp():
    assert list(long_files([source("x = 1\n" * FILE_LINES)])) == []
    assert len(list(long_files([source("x = 1\n" * (FILE_LINES + 1))]))) == 1


def test_the_function_limit_is_sharp_and_spares_the_docstring():
    assert list(long_functions([source(function(FUNCTION_LINES))])) == []
    assert len(list(long_functions([source(function(FUNCTION_LINES + 1))]))) == 1
    assert list(long_functions([source(function(FUNCTION_LINES, docstring_lines=30))])) == []
    nested = "class C:\n" + "".join(
        f"    {line}\n" for line in function(FUNCTION_LINES + 1).splitlines()
    )
    assert len(list(long_functions([source(nested)]))) == 1


def test_the_script_limit_is_sharp_and_spares_the_docstring():
    docstring = '"""Run.\n' + "\n" * 30 + '"""\n'
    assert list(long_scripts([source(docstring + "x = 1\n" * SCRIPT_LINES)])) == []
    assert len(list(long_scripts([source("x = 1\n" * (SCRIPT_LINES + 1))]))) == 1

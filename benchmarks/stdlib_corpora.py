"""Two corpora of the running Python's standard library: its code, and its documentation."""

from __future__ import annotations

import ast
import hashlib
import json
import pydoc_data.topics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron_distill.data.text.files import stdlib_files

__all__ = ["CORPORA", "Corpus", "write_corpora"]

CORPORA: Final = ("code", "docs")
_HELD_OUT_OF: Final = 20  # one document in so many, by hash
_SHORTEST: Final = 200  # characters of a document
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Corpus:
    """The JSONL files of one corpus, one document in each line."""

    training: Path
    held_out: Path

    @property
    def size(self) -> str:
        """Documents and bytes of both files, in words."""
        lines = [
            f"{sum(1 for _ in path.open(encoding='utf-8')):,} documents, "
            f"{sum(len(text.encode()) for text in _texts(path)):,} bytes"
            for path in (self.training, self.held_out)
        ]
        return f"{lines[0]}; held out {lines[1]}"

    def training_texts(self, characters: int) -> Iterator[str]:
        """Training documents until `characters` are given."""
        for text in _texts(self.training):
            yield text
            characters -= len(text)
            if characters <= 0:
                return


def _texts(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)["text"]
            assert isinstance(text, str)
            yield text


def write_corpora(folder: Path) -> Mapping[str, Corpus]:
    """Write the four files, unless an earlier call has."""
    corpora = {
        name: Corpus(folder / f"{name}.jsonl", folder / f"{name}_held_out.jsonl")
        for name in CORPORA
    }
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        documents = _documents()
        for name, corpus in corpora.items():
            _write(documents[name], corpus)
        (folder / "done").touch()
    return corpora


def _write(documents: list[str], corpus: Corpus) -> None:
    parts: tuple[list[str], list[str]] = ([], [])
    for text in documents:
        digest = hashlib.sha256(text.encode()).digest()
        parts[digest[0] % _HELD_OUT_OF == 0].append(json.dumps({"text": text}) + "\n")
    for path, lines in zip((corpus.training, corpus.held_out), parts, strict=True):
        path.write_text("".join(lines), encoding="utf-8")


def _documents() -> dict[str, list[str]]:
    code: list[str] = []
    docs: list[str] = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    for path in stdlib_files():
        source = path.read_text(encoding="utf-8")
        try:
            tree = ast.parse(source)
        except SyntaxError:  # templates of lib2to3 and the like
            continue
        rest, docstrings = _divided(source, tree)
        code.append(rest)
        docs.append("\n\n".join(docstrings))
    return {
        "code": [text for text in code if len(text) >= _SHORTEST],
        "docs": [text for text in docs if len(text) >= _SHORTEST],
    }


def _divided(source: str, tree: ast.Module) -> tuple[str, list[str]]:
    """Return the source without its docstrings, and the docstrings in the order of the source."""
    found = [
        (node.body[0], ast.get_docstring(node) or "")
        for node in ast.walk(tree)
        if isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None
    ]
    found.sort(key=lambda pair: pair[0].lineno)
    lines = source.splitlines(keepends=True)
    for statement, _ in found:
        first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
        if not lines[first][: statement.col_offset].strip():  # not behind `def name():`
            lines[first:last] = [""] * (last - first)
    return "".join(lines), [text for _, text in found if text]

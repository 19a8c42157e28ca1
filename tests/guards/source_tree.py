"""The project's Python sources as syntax trees, and what each of them imports."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron_distill"


@dataclass(frozen=True)
class Import:
    """One imported name, written out: `from a.b import c` is a.b.c."""

    line: int
    name: str


@dataclass(frozen=True)
class Source:
    """One Python file: its place below the root and its syntax tree."""

    place: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        parts = self.place.removesuffix(".py").split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """The package or top-level module of megatron_distill it belongs to, else its folder."""
        parts = self.place.removesuffix(".py").split("/")
        if parts[0] != PACKAGE:
            return parts[0]
        return "" if parts[1] == "__init__" else parts[1]

    def imports(self) -> Iterator[Import]:
        """Yield every import, those inside functions and type-checking blocks included."""
        package = self.module.split(".")
        if not self.place.endswith("__init__.py"):
            package = package[:-1]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(node.lineno, alias.name)
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                start = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield Import(node.lineno, f"{start}.{alias.name}")


def read_sources(root: Path, folders: Sequence[str]) -> list[Source]:
    """Parse every Python file of the folders; a folder that is not there holds none."""
    return [source for folder in folders for source in _parsed(root, folder)]


@cache
def _parsed(root: Path, folder: str) -> list[Source]:
    found = []
    for path in sorted((root / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        place = path.relative_to(root).as_posix()
        found.append(Source(place, text, ast.parse(text, filename=place)))
    return found


def within(name: str, prefix: str) -> bool:
    """Whether a dotted name is `prefix` or lies below it."""
    return name == prefix or name.startswith(f"{prefix}.")

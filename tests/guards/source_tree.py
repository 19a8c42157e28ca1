"""The project's Python sources as syntax trees, and what each of them imports."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
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
    """One Python file: its place below the root and its text, parsed when a guard asks for it."""

    place: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.place)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree, in the order of `ast.walk`."""
        return list(ast.walk(self.tree))

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
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(node.lineno, alias.name)
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                start = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield Import(node.lineno, f"{start}.{alias.name}")


def read_sources(root: Path, folders: Sequence[str]) -> list[Source]:
    """Read every Python file of the folders; a folder that is not there holds none."""
    return [source for folder in folders for source in _read(root, folder)]


@cache
def _read(root: Path, folder: str) -> list[Source]:
    return [
        Source(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted((root / folder).rglob("*.py"))
    ]


def within(name: str, prefix: str) -> bool:
    """Whether a dotted name is `prefix` or lies below it."""
    return name == prefix or name.startswith(f"{prefix}.")

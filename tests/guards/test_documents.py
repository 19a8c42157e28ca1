"""Files, folders and modules that documents name exist, and their links lead somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guards.floors import FLOORS
from tests.guards.source_tree import PACKAGE, ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Guides that quote the package; that of a signal adds a kind, and tests/unit/signals run it.
GUIDES = [
    ROOT / "docs" / "extending" / f"adding_a_{kind}.md"
    for kind in ("divergence", "model_family", "feature_loss", "teacher", "command")
]
FOLDERS = ("benchmarks", "configs", "docs", "launch", "tests", "tools", PACKAGE)
FRONT_PAGE_LINES = 140
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
MODULE = re.compile(rf"\b{PACKAGE}(?:\.[a-z_0-9]+)+")
PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)+/?")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOCUMENT = re.compile(r"\bdocs/[\w/]+\.md\b")
# Figures of the log, and folders of a user that are called like a package.
NOT_PATHS = ("train/sources/", "models/distilled", "models/Llama", "models/Qwen", "models/first")


def roots() -> set[str]:
    """The first parts of paths in this repository: its own folders, and the package's."""
    return {*FOLDERS, *(place.name for place in (ROOT / PACKAGE).iterdir() if place.is_dir())}


def named_paths(text: str) -> Iterator[str]:
    """Paths of this repository in code spans, and every python file that is named."""
    starts = roots()
    for span in CODE.findall(FENCE.sub("", text)):
        for word in span.split():
            if PATH.fullmatch(word) is None or word.startswith(NOT_PATHS):
                continue
            if word.partition("/")[0] in starts or word.endswith(".py"):
                yield word


def exists(path: str) -> bool:
    found = [*ROOT.glob(path), *(ROOT / PACKAGE).glob(path)]
    return bool(found)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def module_exists(name: str) -> bool:
    """Whether a dotted name is a module, or names something within one."""
    parts = name.split(".")
    place = ROOT
    for index, part in enumerate(parts):
        if (place / f"{part}.py").is_file():
            return index >= len(parts) - 2
        place /= part
        if not place.is_dir():
            return index == len(parts) - 1 and (place.parent / "__init__.py").is_file()
    return True


def test_the_paths_that_a_page_names_exist() -> None:
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        missing += [(page.name, path) for path in named_paths(text) if not exists(path)]
        missing += [(page.name, n) for n in MODULE.findall(text) if not module_exists(n)]
    assert missing == []


def test_the_links_of_a_page_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            target, _, anchor = link.partition("#")
            if target.startswith(("http://", "https://")):
                continue
            place = page.parent / target if target else page
            if not place.exists() or (anchor and anchor not in anchors(place)):
                broken.append((page.name, link))
    assert broken == []


def test_documents_that_the_sources_name_exist() -> None:
    missing = []
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*")):
        if path.suffix in {".py", ".yaml", ".sbatch"}:
            named = DOCUMENT.findall(path.read_text(encoding="utf-8"))
            missing += [(path.name, name) for name in named if not (ROOT / name).is_file()]
    assert missing == []


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_the_code_of_a_guide_is_that_of_the_tree(page: Path) -> None:
    blocks = PYTHON.findall(page.read_text(encoding="utf-8"))
    assert blocks
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / PACKAGE).rglob("*.py")]
    for block in blocks:
        assert any(block in source for source in sources), f"not in the package:\n{block}"


def test_contributing_lists_the_floors_that_are_held() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = {
        re.sub(r"/.*", "", name): int(floor)
        for floor, names in re.findall(r"^    F(\d)  (.*?)(?:  +\S.*)?$", text, re.MULTILINE)
        for name in names.split(", ")
    }
    assert listed == FLOORS


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {link.partition("#")[0] for link in LINK.findall(index.read_text(encoding="utf-8"))}
    folder = index.parent
    pages = {str(page.relative_to(folder)) for page in folder.rglob("*.md")} - {index.name}
    assert pages - linked == set()


def test_the_front_page_stays_short_and_lists_missing_measurements() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= FRONT_PAGE_LINES
    assert "not yet measured on several GPUs" in " ".join(lines[:25])

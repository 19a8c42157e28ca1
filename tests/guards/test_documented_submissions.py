"""Every command of the pages that submits, plans or shows a run has words that it takes."""

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

from megatron_distill.cli import COMMANDS, Entry, Group
from tests.guards.source_tree import ROOT

NAMES = ("submit", "plan", "status", "calibrate")
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def documented() -> Iterator[tuple[str, str]]:
    """The page and the line of every such command, without what it is piped into."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\|", "|").replace("\\\n", " ")
        fenced = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        lines = "\n".join([*fenced, *re.findall(r"^    (\S.*)$", text, re.MULTILINE)])
        for line in re.findall(r"^megatron-distill (.*)$", lines, re.MULTILINE):
            if line.startswith(NAMES):
                yield page.name, re.split(r" [|#] ", line)[0]


COMMAND_LINES = list(documented())


def test_the_pages_show_every_way_to_submit() -> None:
    shown = {" ".join(line.split()[:2]) for _, line in COMMAND_LINES}
    assert {"submit slurm", "submit kubernetes", "submit ssh"} <= shown


@pytest.mark.parametrize(("page", "line"), COMMAND_LINES)
def test_a_documented_command_takes_its_words(page: str, line: str) -> None:
    name, *words = shlex.split(line)
    entry = COMMANDS[name]
    if isinstance(entry, Group):
        entry = entry.entries[words.pop(0)]
    assert isinstance(entry, Entry)
    given = entry.load().parse(argparse.ArgumentParser(prog=page, allow_abbrev=False), words)
    assert vars(given)

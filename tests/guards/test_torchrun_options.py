"""Documented commands: options of torchrun, and words of submissions."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Iterator

import pytest
from torch.distributed.run import get_args_parser

from megatron_distill.cli import COMMANDS, Entry, Group
from megatron_distill.commands.job import REPORTS
from megatron_distill.runtime.torchrun import protect_script_options
from tests.guards.source_tree import ROOT, read_sources

# Taken by evaluate.py and generate.py beside the positional folder, without torchrun only.
BESIDE_TORCHRUN = {"--run"}
TORCHRUN_OPTIONS = sorted(
    option for action in get_args_parser()._actions for option in action.option_strings
)
WITHOUT_VALUE = sorted(
    option
    for action in get_args_parser()._actions
    for option in action.option_strings
    if action.nargs == 0
)


def script_options() -> set[tuple[str, str]]:
    """File and name of every option that an argument parser of the project adds."""
    found = {("job.py", option) for option, _, _ in REPORTS.values()}
    for source in read_sources(ROOT, ("launch", "tools", "megatron_distill")):
        for node in source.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr != "add_argument":
                    continue
                for word in node.args:
                    if isinstance(word, ast.Constant) and str(word.value).startswith("-"):
                        found.add((source.place.rpartition("/")[2], str(word.value)))
    return found


def documented_commands() -> Iterator[str]:
    """Every torchrun command of the README, the pages, the scripts and the configurations."""
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").glob("*.yaml")]
    files += [*(ROOT / "launch").glob("*"), *(ROOT / "tools").glob("*.py")]
    for path in sorted(files):
        if path.is_dir():
            continue
        text = path.read_text(encoding="utf-8").replace("\\\\\n", "\\\n").replace("\\\n", " ")
        yield from re.findall(r"^[#\s]*(torchrun .*\.py.*)$", text, re.MULTILINE)


def test_no_option_of_a_script_begins_one_of_torchruns() -> None:
    options = script_options()
    assert {"--config", "--print-config", "--json", "--prompt", "--hf"} <= {o for _, o in options}
    taken = [
        (file, option, longer)
        for file, option in sorted(options)
        for longer in TORCHRUN_OPTIONS
        if option not in BESIDE_TORCHRUN and longer != option and longer.startswith(option)
    ]
    assert not taken, "torchrun reads these as abbreviations of its own options"


def test_the_option_beside_torchrun_is_in_no_documented_command() -> None:
    for command in documented_commands():
        assert not BESIDE_TORCHRUN & set(shlex.split(command)), command


def test_every_word_of_a_documented_command_reaches_its_script() -> None:
    commands = list(documented_commands())
    assert any("launch/evaluate.py" in command for command in commands)
    assert any("launch/generate.py" in command for command in commands)
    for command in commands:
        words = shlex.split(command)[1:]
        script = next(place for place, word in enumerate(words) if word.endswith(".py"))
        parsed = get_args_parser().parse_args(words)
        assert parsed.training_script == words[script], command
        assert parsed.training_script_args == words[script + 1 :], command


@pytest.mark.parametrize(
    "before",
    [
        "--nproc-per-node 2",
        "--nproc-per-node=2 --standalone",
        "--stand --nnod 2",
        "-t 3 --redirects 1 --standalone",
        "-t3 --no-python",
        "--nnodes=1 --rdzv-id=a --rdzv-backend c10d --rdzv-endpoint=h:1 -m",
        "",
    ],
)
def test_the_wrapper_gives_a_script_every_word_behind_its_name(before: str) -> None:
    words = [*before.split(), "launch/x.py", "--run", "runs/a", "parallel.tensor=2", "--re", "--"]
    with pytest.raises(SystemExit):
        get_args_parser().parse_args(words)
    plain = get_args_parser().parse_args([*before.split(), "launch/x.py"])
    expected = argparse.Namespace(**{**vars(plain), "training_script_args": words[-5:]})
    assert get_args_parser().parse_args(protect_script_options(words)) == expected


def test_the_wrapper_knows_which_options_of_torchrun_take_a_value() -> None:
    for option in TORCHRUN_OPTIONS:
        value = [] if option in WITHOUT_VALUE else ["1"]
        words = [option, *value, "x.py", "--run", "a"]
        expected = [option, *value, "--", "x.py", "--run", "a"]
        assert protect_script_options(words) == expected, option


@pytest.mark.parametrize("words", [[], ["--help"], ["--", "x.py", "--run"], ["--nnodes"]])
def test_the_wrapper_leaves_arguments_without_a_script_alone(words: list[str]) -> None:
    assert protect_script_options(words) == words


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

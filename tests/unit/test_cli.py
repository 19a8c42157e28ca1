"""The program's table of commands, and each command beside its script."""

from __future__ import annotations

import argparse
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_distill.cli import COMMANDS, Entry, Group, _without_processes, main
from tests.guards.source_tree import ROOT

PATHS = [
    *((name,) for name in COMMANDS),
    *((name, below) for name, one in COMMANDS.items() if isinstance(one, Group)
      for below in one.entries),
    *(("convert", action) for action in ("import", "export", "verify")),
    *(("data", "vocabulary-map", action) for action in ("build", "inspect", "verify")),
    *(("store", action) for action in ("inspect", "verify", "stats", "repair", "convert")),
]  # fmt: skip
CONFIG = str(ROOT / "configs" / "tiny.yaml")


def status_of(call: Callable[[], int]) -> int:
    """Exit status of a main function, that of wrong arguments included."""
    try:
        return call()
    except SystemExit as end:
        return int(str(end.code))


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_every_command_has_help(path: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(lambda: main([*path, "--help"])) == 0
    text = capsys.readouterr()
    assert text.out.startswith(f"usage: megatron-distill {' '.join(path)} ")
    assert text.err == ""


def test_the_help_has_a_line_for_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, entry in COMMANDS.items():
        assert f"  {name:<9} {entry.summary}" in lines
    assert main([]) == 2
    assert capsys.readouterr().err.splitlines() == lines
    assert status_of(lambda: main(["--version"])) == 0
    assert capsys.readouterr().out == "megatron-distill 0.1.0\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["trian"], "megatron-distill: 'trian' is not a command; did you mean train? "),
        (["evalaute", "runs/a"], "'evalaute' is not a command; did you mean evaluate? "),
        (
            ["data", "tokenise"],
            "megatron-distill data: 'tokenise' is not a command; did you mean tok",
        ),
        (
            ["quantise"],
            "megatron-distill: 'quantise' is not a command; the commands are train, plan",
        ),
    ],
)
def test_a_misspelt_command_gets_the_nearest_name(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["convert", "--help"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    program = (
        "import sys; from megatron_distill.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: sys.stderr.write(' '.join(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    loaded = set(done.stderr.split())
    assert "megatron_distill.cli" in loaded
    assert not loaded & {"torch", "numpy", "pydantic", "transformers", "rich"}
    chosen = {f"megatron_distill.commands.{words[0]}"} if words[0] != "--help" else set()
    assert {name for name in loaded if name.startswith("megatron_distill.commands.")} & {
        f"megatron_distill.commands.{name}" for name in COMMANDS
    } == chosen


def examples() -> list[str]:
    """Every `megatron-distill` line of the page and of the help texts."""
    found = [
        (one,) if isinstance(one, Entry) else one.entries.values() for one in COMMANDS.values()
    ]
    texts = [entry.load().description for entries in found for entry in entries]
    texts.append((ROOT / "docs" / "command_line.md").read_text(encoding="utf-8"))
    lines = "\n".join(texts).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.startswith("    megatron-distill ")]


def test_the_documented_examples_are_understood() -> None:
    found = examples()
    assert len(found) >= 2 * len(COMMANDS)
    for example in found:
        words = shlex.split(example)[1:]
        entry = COMMANDS[words.pop(0)]
        if isinstance(entry, Group):
            entry = entry.entries[words.pop(0)]
        command, parser = entry.load(), argparse.ArgumentParser(exit_on_error=False)
        if command.in_ranks:
            _, words = _without_processes(parser, words)
        assert not command.parse(parser, words).is_script, example


# A command, its script, and words that both take; each case ends in another way.
TWINS = {
    "train": ("train", "launch/pretrain_distill.py"),
    "capture": ("capture", "launch/cache_teacher.py"),
    "evaluate": ("evaluate", "launch/evaluate.py"),
    "generate": ("generate", "launch/generate.py"),
    "rollout": ("rollout", "launch/rollout.py"),
    "convert": ("convert", "tools/convert_checkpoint.py"),
    "store": ("store", "tools/teacher_store.py"),
    "preview": ("data preview", "tools/preview_data.py"),
    "tokenize": ("data tokenize", "tools/tokenize_corpus.py"),
    "vocabulary": ("data vocabulary-map", "tools/vocabulary_map.py"),
}
CASES: list[tuple[str, list[str], int]] = [
    ("train", ["--config", CONFIG, "--print-config", "train.steps=7"], 0),
    ("train", [CONFIG, "train.steps=7", "--print-config"], 0),
    ("train", ["--config", CONFIG, "--print-config", "train.stops=7"], 1),
    ("train", ["--config", "nowhere.yaml"], 1),
    ("train", [], 2),
    ("train", ["train.steps=7"], 2),
    ("capture", ["--config", "cache.yaml", "--print-config"], 0),
    ("capture", ["--config", CONFIG, "--print-config"], 1),
    ("evaluate", ["nowhere"], 1),
    ("evaluate", [], 2),
    ("generate", ["--hf", "nowhere"], 1),
    ("generate", ["--hf", "nowhere", "--system", "a"], 2),
    ("generate", [], 2),
    ("rollout", ["--hf", "nowhere", "--prompts", "a.jsonl", "--output", "b"], 1),
    ("rollout", ["--hf", "nowhere", "--prompts", "a.jsonl"], 2),
    ("rollout", ["runs/a", "--prompts", "a", "--output", "b", "--samples", "0"], 2),
    ("rollout", ["runs/a", "--prompts=a", "--output=b", "--samples=2", "--temperature=0"], 2),
    ("store", ["inspect", "nowhere"], 1),
    ("store", [], 2),
    ("preview", ["nowhere.yaml"], 1),
    ("preview", [], 2),
    ("tokenize", ["--tokenizer", "nowhere", "--output", "pair", "a.jsonl"], 1),
    ("tokenize", ["--output", "pair"], 2),
    ("vocabulary", ["inspect", "nowhere.safetensors"], 1),
    ("vocabulary", ["build", "--student", "a", "--teacher", "b"], 2),
    ("convert", ["export", "--hf", "a"], 2),
    ("convert", ["mend"], 2),
]


@pytest.mark.parametrize(("name", "words", "status"), CASES)
def test_a_command_ends_as_its_script_does(
    name: str,
    words: list[str],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path, script = TWINS[name]
    assert status_of(lambda: main([*path.split(), *words])) == status
    by_command = capsys.readouterr()
    script_main = runpy.run_path(str(ROOT / script))["main"]
    assert status_of(lambda: script_main(words)) == status
    by_script = capsys.readouterr()
    assert by_command.out == by_script.out
    assert "Traceback" not in by_command.err
    reported = [text.strip().rpartition("error: ")[2] for text in (by_command.err, by_script.err)]
    if status:
        assert reported[0] == reported[1] != ""
    assert list(tmp_path.iterdir()) == []


def test_ranks_are_not_started_in_a_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert status_of(lambda: main(["train", CONFIG, "--processes", "2"])) == 2
    text = capsys.readouterr().err
    assert "--processes 2: torchrun has started this process already (rank 1 of 2)" in text
    assert text.endswith("leave --processes out\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["train", CONFIG, "--processes", "0"], "--processes 0: must be 1 or more"),
        (["train", "--processes=many", CONFIG], "--processes: many: give a whole number, as 2"),
        (["store", "inspect", "a", "--processes", "2"], "unrecognized arguments: --processes 2"),
    ],
)
def test_a_wrong_number_of_processes_is_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(lambda: main(words)) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["train", CONFIG, "train.steps=7", "--print-config", "--processes", "1"],
        ["train", "--processes=1", CONFIG, "train.steps=7", "--print-config"],
        ["train", CONFIG, "--processes", "1", "--print-config", "train.steps=7"],
    ],
)
def test_the_number_of_processes_stands_anywhere(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    assert "  steps: 7\n" in capsys.readouterr().out

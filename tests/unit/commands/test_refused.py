"""Submissions and files that are refused before anything starts."""

from __future__ import annotations

import argparse
import re
import signal
from pathlib import Path

import pytest

from megatron_distill.cli import main
from megatron_distill.commands.command import Command, write_result
from megatron_distill.errors import ConfigError
from megatron_distill.launching.ssh import ranks_on
from tests.guards.source_tree import ROOT

_TASKS = ("evaluate", "runs/first", "--tasks", "quiz.yaml")
_HARNESS = ("evaluate", "runs/first", "--lm-eval", "quiz")
_TEXT = ("generate", "runs/first")
_ROLLOUT = ("rollout", "runs/first", "--prompts", "a.jsonl", "--output")
_REFUSED: dict[tuple[str, ...], str] = {
    (*_TASKS, "--json", "{folder}"): "{folder} is a folder; name a file in it",
    (*_TASKS, "--items", "{folder}/none/x.json"): "the folder {folder}/none is not there; make it",
    (*_TASKS, "--limit", "0"): "--limit 0: give 1 item or more, or leave it out for all",
    (*_TASKS, "--limit", "abc"): "argument --limit: abc: give a whole number, as 500",
    ("evaluate", "runs/first", "--speculative", "2", "x"): "--speculative: x: give a whole number",
    (*_TEXT, "--temperature", "inf"): "--temperature inf: give 0 (greedy) or a finite number",
    ("evaluate", "a", "--speculative", "2", "b.c=1"): "write settings (key=value) before the opti",
    (*_TEXT, "--temperature", "warm"): "argument --temperature: warm: give a number, as 0.7",
    ("submit", "slurm", "a.yaml", "--nodes", "abc"): "--nodes: abc: give a whole number, as 4",
    ("submit", "slurm", "a.yaml", "--nodes", "1", "--grace-seconds", "5m"): "5m: give a number, as",
    ("submit", "ssh", "a.yaml", "--hosts", "a", "--pause", "no"): "--pause: no: give a number, as",
    ("submit", "ssh", "a.yaml", "--hosts", "a", "--pause", "nan"): "--pause nan: must be a finite",
    ("submit", "ssh", "a.yaml", "--hosts", "a", "--", "--processes", "8"): "give --ranks-per-node",
    ("submit", "slurm", "a.yaml", "--nodes", "1", "--", "--processes=8"): "give --ranks-per-node",
    ("submit", "slurm", "a.yaml", "--nodes", "1", "--", "--print-layout", "8"): "train` with it",
    ("submit", "kubernetes", "a.yaml", "--nodes", "1.5"): "--nodes: 1.5: give a whole number, as",
    ("plan", "a.yaml", "--devices", "8.0"): "--devices: 8.0: give a whole number, as 64",
    ("calibrate", "--run", "a", "--document-length", "x"): "x: give a whole number, as 512",
    ("evaluate", "runs/first", "--limit", "3"): "--limit is the number of items of tasks; add --ta",
    (
        *_TASKS,
        "--json",
        "{folder}/x",
        "--items",
        "{folder}/../{name}/x",
    ): "--json and --items are",
    (
        "evaluate",
        "runs/first",
        "--hf",
        "a",
        "--tasks",
        "quiz.yaml",
    ): "give one of a run, --hf",
    (
        "evaluate",
        "a=1",
        "runs/first",
        "--hf",
        "a",
        "--tasks",
        "q.yaml",
    ): "give one of a run, --hf",
    (
        *_TASKS,
        "--against",
        "{folder}/x",
        "--items",
        "{folder}/../{name}/x",
    ): "/x: would replace the file of --against; name another",
    (*_TASKS, "--include", "{folder}"): "--include has tasks of lm-evaluation-harness; add --lm-ev",
    (*_HARNESS, "--include", "{folder}/none"): "--include {folder}/none: there is no such folder",
    (*_TEXT, "--text", "{folder}"): "{folder} is a folder; name a file in it",
    (*_TEXT, "--text", "{folder}/none/x.txt"): "the folder {folder}/none is not there; make it",
    (*_TEXT, "--tokens", "-1"): "--tokens -1: give 1 or more",
    (*_TEXT, "--temperature", "-1"): "--temperature -1.0: give 0 (greedy) or a finite number",
    (*_TEXT, "--top-k", "0"): "--top-k 0: give 1 or more, or leave it out for all tokens",
    (*_TEXT, "--top-p", "2"): "--top-p 2.0: give a number above 0, at most 1",
    (*_TEXT, "--min-p", "nan"): "--min-p nan: give a number from 0 to 1",
    (*_TEXT, "--seed", str(2**64)): f"--seed {2**64}: give a number of 64 bits",
    (*_TEXT, "--seed", str(-(2**63) - 1)): f"--seed {-(2**63) - 1}: give a number of 64 bits",
    (*_TEXT, "--stop", "a", "--stop", ""): "a --stop text is empty; leave it out",
    (*_TEXT, "--tokenizer", "a"): "--tokenizer goes with --checkpoint or --hf",
    (*_ROLLOUT, "a", "--part-rows", "0"): "--part-rows 0: give 1 or more",
    (*_ROLLOUT, "a", "--check-texts", "-1"): "--check-texts -1: give 0 (none) or more",
    (*_ROLLOUT, "a", "--samples", "2", "--temperature", "0"): "--samples: greedy texts of one prom",
    (*_ROLLOUT, "{folder}/file"): "--output {folder}/file: it is a file; name a folder",
    (*_ROLLOUT, "{folder}"): "--output {folder}: it is the folder of a run (config.yaml); name ano",
}


@pytest.mark.parametrize("words", _REFUSED, ids=" ".join)
def test_a_file_that_cannot_be_written_or_a_number_out_of_range_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "config.yaml").touch()
    with pytest.raises(SystemExit) as ended:
        main([word.format(folder=tmp_path, name=tmp_path.name) for word in words])
    assert ended.value.code == 2
    assert _REFUSED[words].format(folder=tmp_path) in capsys.readouterr().err


def test_a_file_that_the_system_refuses_is_named() -> None:
    with pytest.raises(ConfigError, match="^/proc/x.json: cannot be written .*; name another file"):
        write_result(Path("/proc/x.json"), "{}")


@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("config.json", "it is a Hugging Face folder: give it as --hf {folder}"),
        ("description.json", "it is a checkpoint: give it as --checkpoint {folder}"),
        ("notes.txt", "give the output folder of a run, e.g. runs/first"),
    ],
)
def test_a_folder_of_another_kind_is_named_by_its_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, remedy: str
) -> None:
    (tmp_path / file).write_text("{}")
    assert main(["generate", str(tmp_path)]) == 1
    wanted = f"{tmp_path}: not a run folder (no config.yaml); {remedy.format(folder=tmp_path)}\n"
    assert capsys.readouterr().err.endswith(wanted)


TINY = str(ROOT / "configs" / "tiny.yaml")
PAIR = str(ROOT / "configs" / "llama31_8b_to_1b.yaml")  # of models that are not here
CAPTURE = str(ROOT / "configs" / "llama31_8b_pruned_topk_store_capture.yaml")


def test_a_layout_that_does_not_fit_the_hosts_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "ssh", TINY, f"output={tmp_path}/a", "parallel.tensor=4"]
    assert main([*words, "--hosts", "a,b", "--shell", "env HOST={host}"]) == 78
    error = capsys.readouterr().err
    assert error.startswith("error: this configuration on 2 processes: 1 problem")
    assert "parallel.context = 4 * 1 * 1: " in error
    assert not (tmp_path / "a").exists()


def test_a_host_that_does_not_count_its_gpus_is_named() -> None:
    with pytest.raises(ConfigError, match=r"announce=False\)\): no route$"):
        ranks_on(["sh", "-c", "echo no route >&2; exit 255"])
    traceback = "Traceback:\n  line 1\nmegatron_distill.errors.TrainingError: it hangs"
    with pytest.raises(ConfigError, match=r"announce=False\)\): it hangs$"):
        ranks_on(["sh", "-c", f"echo '{traceback}' >&2; exit 1"])


@pytest.mark.parametrize(
    ("words", "tensor"),
    [
        (["kubernetes", "--image", "i", PAIR, "--gpus-per-node", "6"], 4),
        (["kubernetes", "--image", "i", TINY, "parallel.tensor=2"], 2),
        (["slurm", TINY, "parallel.tensor=2", "--ranks-per-node", "1"], 2),
        (["slurm", "--command", "capture", CAPTURE, "--gpus-per-node", "6"], 4),
    ],
    ids=["pods of six GPUs", "pods of one rank", "one rank", "a capture on six GPUs"],
)
def test_a_layout_that_does_not_fit_is_one_error(
    words: list[str], tensor: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", *words, "--nodes", "1", "--dry-run"]) == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.count("error: ") == 1
    assert "1 problem" in found.err
    assert f"parallel.context = {tensor} * 1 * 1: " in found.err


def test_models_on_the_claims_of_pods_need_not_be_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["submit", "kubernetes", PAIR, "--nodes", "2", "--gpus-per-node", "8", "--image", "i"]
    words += ["output=/data/runs/a", "--claim", "data:/data"]
    assert main([*words, "--dry-run"]) == 0
    assert "--ranks-per-node" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "status"), [(None, 130), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_an_interruption_ends_with_the_status_of_its_signal(
    number: int | None, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(given: argparse.Namespace) -> int:
        raise KeyboardInterrupt(*([] if number is None else [number]))

    command = Command(description="", add_arguments=lambda parser: None, run=run)
    assert command.execute(argparse.Namespace()) == status
    assert capsys.readouterr().err == "stopped\n"


def test_every_number_of_a_command_has_an_error_with_an_example() -> None:
    package = ROOT / "megatron_distill"
    files = [package / "cli.py", package / "launching" / "slurm_job.py"]
    files += (package / "commands").rglob("*.py")
    bare = re.compile(r"\btype=(int|float)\b")
    # A batch script writes the options of preflight.py.
    found = {file.name for file in files if bare.search(file.read_text())} - {"preflight.py"}
    assert found == set()

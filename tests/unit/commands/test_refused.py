"""Arguments of `evaluate`, `generate` and `rollout` that are refused before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.cli import main
from megatron_distill.commands.command import write_result
from megatron_distill.errors import ConfigError

_TASKS = ("evaluate", "runs/first", "--tasks", "quiz.yaml")
_HARNESS = ("evaluate", "runs/first", "--lm-eval", "quiz")
_TEXT = ("generate", "runs/first")
_ROLLOUT = ("rollout", "runs/first", "--prompts", "a.jsonl", "--output")
_REFUSED: dict[tuple[str, ...], str] = {
    (*_TASKS, "--json", "{folder}"): "{folder} is a folder; name a file in it",
    (*_TASKS, "--items", "{folder}/none/x.json"): "the folder {folder}/none is not there; make it",
    (*_TASKS, "--limit", "0"): "--limit 0: give 1 item or more, or leave it out for all",
    (*_TASKS, "--include", "{folder}"): "--include has tasks of lm-evaluation-harness; add --lm-ev",
    (*_HARNESS, "--include", "{folder}/none"): "--include {folder}/none: there is no such folder",
    (*_TEXT, "--text", "{folder}"): "{folder} is a folder; name a file in it",
    (*_TEXT, "--text", "{folder}/none/x.txt"): "the folder {folder}/none is not there; make it",
    (*_TEXT, "--tokens", "-1"): "--tokens -1: give 0 or more",
    (*_TEXT, "--temperature", "-1"): "--temperature -1.0: give 0 (greedy) or more",
    (*_TEXT, "--top-k", "0"): "--top-k 0: give 1 or more, or leave it out for all tokens",
    (*_TEXT, "--top-p", "2"): "--top-p 2.0: give a number above 0, at most 1",
    (*_TEXT, "--min-p", "nan"): "--min-p nan: give a number from 0 to 1",
    (*_TEXT, "--stop", "a", "--stop", ""): "a --stop text is empty; leave it out",
    (*_TEXT, "--tokenizer", "a"): "--tokenizer goes with --checkpoint or --hf",
    (*_ROLLOUT, "a", "--part-rows", "0"): "--part-rows 0: give 1 or more",
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
        main([word.format(folder=tmp_path) for word in words])
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

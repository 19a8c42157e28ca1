"""Arguments of `evaluate` and `generate` that are refused before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.cli import main
from megatron_distill.commands.command import write_result
from megatron_distill.errors import ConfigError

_TASKS = ("evaluate", "runs/first", "--tasks", "quiz.yaml")
_HARNESS = ("evaluate", "runs/first", "--lm-eval", "quiz")
_TEXT = ("generate", "runs/first")
_REFUSED: dict[tuple[str, ...], str] = {
    (*_TASKS, "--json", "{folder}"): "{folder} is a folder; name a file in it",
    (*_TASKS, "--items", "{folder}/none/x.json"): "the folder {folder}/none is not there; make it",
    (*_TASKS, "--limit", "0"): "--limit 0: give 1 item or more, or leave it out for all",
    (*_TASKS, "--include", "{folder}"): "--include has tasks of lm-evaluation-harness; add --lm-ev",
    (*_HARNESS, "--include", "{folder}/none"): "--include {folder}/none: there is no such folder",
    (*_TEXT, "--text", "{folder}"): "{folder} is a folder; name a file in it",
    (*_TEXT, "--text", "{folder}/none/x.txt"): "the folder {folder}/none is not there; make it",
    (*_TEXT, "--tokens", "-1"): "--tokens -1: give 0 or more",
}


@pytest.mark.parametrize("words", _REFUSED, ids=" ".join)
def test_a_file_that_cannot_be_written_or_a_number_out_of_range_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word.format(folder=tmp_path) for word in words])
    assert ended.value.code == 2
    assert _REFUSED[words].format(folder=tmp_path) in capsys.readouterr().err


def test_a_file_that_the_system_refuses_is_named() -> None:
    with pytest.raises(ConfigError, match="^/proc/x.json: cannot be written .*; name another file"):
        write_result(Path("/proc/x.json"), "{}")

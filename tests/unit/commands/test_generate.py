"""What generate shows as text comes, and which teachers evaluate leaves out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_distill import cli
from megatron_distill.cli import main
from megatron_distill.commands.evaluate import _write_out
from megatron_distill.commands.generate import _Terminal
from megatron_distill.data.tokenizers.open import train_bpe
from megatron_distill.evaluation import generate as transformers_text


def test_each_call_shows_certain_text_and_the_end_shows_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Of single bytes, so that the accented letter is two ids.
    tokenizer = train_bpe(["a"], vocab_size=260)
    ids = [int(one) for one in tokenizer.encode_batch(["b\u00e9\n\nc"])[0]]
    accented = len(ids) - 4, len(ids) - 3
    terminal = _Terminal(tokenizer, (), ("\n\nQ",), "the prompt: ")
    shown = [capsys.readouterr().out]
    with terminal:
        for token in ids:
            terminal.show(0, [token])
            shown.append(capsys.readouterr().out)
    shown.append(capsys.readouterr().out)
    assert "".join(shown) == "the prompt: b\u00e9\n\nc\n"
    assert shown[0] == "the prompt: "
    first, second = (shown[place] for place in accented)
    assert (first, second) == ("", "\u00e9"), "no half of a character is shown"
    assert shown[-4:] == ["", "", "\n\nc", "\n"], "a stop string may begin"


def test_an_interruption_ends_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = _Terminal(train_bpe(["a"], vocab_size=260), (), (), "def ")

    def interrupted() -> None:
        with terminal:
            terminal.show(0, [100])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.parametrize("kind", ["--checkpoint", "--hf"])
def test_a_tokenizer_that_is_not_there_is_named_by_its_option(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    other = tmp_path / "other"
    status = main(["generate", kind, str(tmp_path), "--tokenizer", str(other), "--prompt", "a"])
    assert status == 1
    message = " ".join(capsys.readouterr().err.split())
    assert f"--tokenizer {other}: no tokenizer is there; give a folder with" in message


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        (["--temperature", "0", "--top-k", "3"], "--top-k"),
        (["--temperature", "0", "--top-k", "3", "--min-p", "0.1"], "--top-k, --min-p"),
        (["--temperature", "0"], None),
        (["--top-k", "3"], None),
    ],
)
def test_options_of_draws_without_effect_warn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], idle: str | None
) -> None:
    """Before the model is opened, which is not there."""
    assert main(["generate", "--hf", str(tmp_path), *words]) == 1
    told = capsys.readouterr().err
    warning = f"warning: {idle}: no effect with --temperature 0\n"
    assert warning in told if idle else "no effect" not in told


@pytest.mark.parametrize(
    ("has_gpu", "stated", "place"),
    [
        (False, "bfloat16", ("cpu", torch.float32)),
        (True, "bfloat16", ("cuda", torch.bfloat16)),
        (True, "float32", ("cuda", torch.bfloat16)),
    ],
)
def test_transformers_has_the_device_and_the_precision_of_our_own_text(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_gpu: bool,
    stated: str,
    place: tuple[str, torch.dtype],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": stated}))
    found: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(
        transformers_text, "write_text", lambda *_, **given: found.update(given) or "text"
    )
    assert main(["generate", "--hf", str(tmp_path), "--transformers"]) == 0
    assert (found["device"], found["dtype"]) == place
    assert (f"{tmp_path}: read in bf16 (" in capsys.readouterr().err) == has_gpu


def test_an_interruption_while_a_command_is_imported_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        assert name == "megatron_distill.commands.generate"
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    assert main(["generate"]) == 130
    assert capsys.readouterr().err == "stopped\n"


_SHAPE = "{num_layers: 1, hidden_size: 8, ffn_hidden_size: 8, num_attention_heads: 1}"
_MODEL = f"{{architecture: {_SHAPE}}}"
_TEACHERS = {
    "one": f"teacher: {_MODEL}\nobjective: {{terms: [{{divergence: forward_kl}}]}}\n",
    "several": f"teachers: {{near: {_MODEL}, far: {_MODEL}}}\n"
    "objective: {terms: [{divergence: forward_kl}], routing_weights: {near: 1, far: 2}}\n",
}


@pytest.mark.parametrize("teachers", _TEACHERS)
def test_the_teachers_of_a_run_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], teachers: str
) -> None:
    """Tasks are read once the configuration is right."""
    (tmp_path / "config.yaml").write_text(
        f"student: {_MODEL}\n{_TEACHERS[teachers]}train: {{steps: 1, global_batch_size: 1}}\n"
        "data: {sources: [{format: python_stdlib}], sequence_length: 8, "
        "tokenizer: {train_vocab_size: 300}}\noutput: runs/first\n"
    )
    assert main(["evaluate", str(tmp_path), "--tasks", "none"]) == 1
    assert "error: none: there is no such task" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path), "seeed=1", "--tasks", "none"]) == 1
    named = f"error: {tmp_path / 'config.yaml'} with seeed=1: 1 problem\n"
    assert named in capsys.readouterr().err, "of the changes those of the user alone"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "quiz.yaml", "--num-fewshot", "2"], "are of --lm-eval; a task of --tasks has"),
        (["--tasks", "quiz.yaml", "--apply-chat-template"], "are of --lm-eval; a task of --tasks"),
        (["--lm-eval", "quiz", "--num-fewshot", "-1"], "--num-fewshot -1: give 0 examples or more"),
        (["--speculative", "2", "0"], "--speculative takes lengths of drafts, 1 or more tokens"),
    ],
)
def test_options_out_of_place_or_range_are_errors(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", "runs/first", *words])
    assert message in " ".join(capsys.readouterr().err.split())


def test_results_are_json_also_where_a_figure_is_no_number(tmp_path: Path) -> None:
    found = {"a": {"word_perplexity,none": math.inf, "n": 3}, "b": [math.nan, (-math.inf, 0.5)]}
    _write_out(found, tmp_path / "results.json")

    def refused(name: str) -> None:
        raise AssertionError(name)

    plain = json.loads((tmp_path / "results.json").read_text(), parse_constant=refused)
    assert plain == {"a": {"word_perplexity,none": None, "n": 3}, "b": [None, [None, 0.5]]}

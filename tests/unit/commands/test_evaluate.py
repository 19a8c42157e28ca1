"""Arguments of `evaluate`, the student that it takes alone, and its results as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_distill.cli import main
from megatron_distill.commands.evaluate import _write_out

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

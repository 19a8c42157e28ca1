"""The configurations of which `evaluate --tasks` takes the student alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.cli import main

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

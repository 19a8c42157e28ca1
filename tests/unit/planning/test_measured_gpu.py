"""Plans of what was measured on one GPU, against benchmarks/results/gpu.json."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml

from megatron_distill.commands.plan import make_plan
from megatron_distill.config import load_config
from megatron_distill.planning.device import load_device
from megatron_distill.planning.memory import chunk_bytes
from megatron_distill.planning.search import Search
from tests.guards.source_tree import ROOT
from tests.unit.planning.shapes import choice_of, llama, run_of

GIB = 2**30
DEVICE = load_device("h100-80gb-torch")
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text(encoding="utf-8"))
# Llama 3.2 1B and Llama 3.1 8B.
STUDENT, TEACHER = (16, 2048, 8192), (32, 4096, 14_336)


def parts(name: str) -> list[dict[str, Any]]:
    """A part's figures in each run that has it."""
    return [run["parts"][name] for run in MEASURED["runs"] if name in run["parts"]]


def steps() -> dict[int, dict[str, Any]]:
    """The figures by sequence length."""
    (found,) = parts("step")
    return {step["sequence_length"]: step for step in found["steps"] if step["subject"] == "ours"}


def shape(layers: int, hidden: int, ffn: int, positions: int) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": 32,
        "num_kv_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": positions,
    }


@pytest.mark.parametrize("length", steps())
def test_a_measured_step_is_planned_within_15_percent(length: int, tmp_path: Path) -> None:
    measured = steps()[length]
    run = {
        "output": str(tmp_path / "run"),
        "student": {"architecture": shape(*STUDENT, length)},
        "teacher": {"architecture": shape(*TEACHER, length)},
        "parallel": {"tensor": 1, "pipeline": 1},
        "data": {
            "sources": [{"format": "python_stdlib"}],
            "tokenizer": {"train_vocab_size": 8192},
            "sequence_length": length,
            "isolate_documents": False,
        },
        "objective": {"ce_weight": 1.0, "terms": [{"divergence": "forward_kl"}]},
        "train": {
            "steps": 10,
            "global_batch_size": 2,
            "micro_batch_size": 1,
            "precision": "bf16",
        },
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    plan = make_plan(load_config(path, []), 1, "h100-80gb-torch", shown=1)
    assert plan.configured.time.total == pytest.approx(median(measured["seconds"]), rel=0.15)
    (rank,) = measured["ranks"]
    peak = sum(rank["persistent"].values()) + rank["peak"]["tensors"]
    planned = plan.configured.memory.total - plan.device.reserved_gib * GIB
    assert 0.95 * peak <= planned <= 1.10 * peak


def test_measured_losses_need_the_planned_memory() -> None:
    """Cross-entropy and forward KL from hidden states, the head's gradient added to a buffer."""
    losses = [row for part in parts("losses") for row in part.get("hidden", ())]
    rows = [row for row in losses if row["subject"] == "ours, into a buffer"]
    assert [row["family"] for row in rows] == [f"fused linear, width {n}" for n in (2048, 4096)]
    for row in rows:
        one = llama(1, int(row["family"].split()[-1]), 512, 16, 4)
        run = run_of(one, teacher=one, sequence_length=8192, row_blocks=False)
        choice = choice_of((1,), (1,))
        assert chunk_bytes(run, choice, DEVICE) == pytest.approx(row["extra_bytes"], rel=0.01)


def test_blocks_of_rows_are_those_that_adaptive_kl_took_beside_reverse_kl() -> None:
    logits = [row for part in parts("losses") for row in part.get("logits", ())]
    took = {row["family"]: row["extra_bytes"] for row in logits if row["subject"] == "ours"}
    one = llama(1, 2048, 512, 16, 4)
    choice = choice_of((1,), (1,))
    with_blocks, without = (
        chunk_bytes(run_of(one, teacher=one, row_blocks=blocks), choice, DEVICE)
        for blocks in (True, False)
    )
    blocks = took["adaptive_kl"] - took["reverse_kl"]
    assert with_blocks - without == pytest.approx(blocks, rel=0.05)


def test_a_measured_capture_is_planned_within_15_percent() -> None:
    (measured,) = (part["capture"] for part in parts("capture"))
    teacher = llama(*TEACHER, 32, 8, max_position_embeddings=8192)
    run = run_of(teacher, teacher=teacher, global_batch_size=2, chunk_tokens=2048, store_ids=64)
    assert run.tokens == measured["tokens"]
    planned = Search(run, DEVICE, 1, lambda role, layout: None, ("shared",)).capture()
    assert planned.seconds_per_step == pytest.approx(measured["capture"], rel=0.15)

"""Plans of the steps that were measured on one GPU, against benchmarks/results/gpu.json."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml

from megatron_distill.commands.plan import make_plan
from megatron_distill.config import load_config
from tests.guards.source_tree import ROOT

GIB = 2**30
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text(encoding="utf-8"))
# Llama 3.2 1B and Llama 3.1 8B.
STUDENT, TEACHER = (16, 2048, 8192), (32, 4096, 14_336)


def steps() -> dict[int, dict[str, Any]]:
    """The figures by sequence length."""
    (found,) = (run["parts"]["step"] for run in MEASURED["runs"] if "step" in run["parts"])
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
    assert plan.configured is not None
    assert plan.configured.time.total == pytest.approx(median(measured["seconds"]), rel=0.15)
    (rank,) = measured["ranks"]
    peak = sum(rank["persistent"].values()) + rank["peak"]["tensors"]
    planned = plan.configured.memory.total - plan.device.reserved_gib * GIB
    assert planned == pytest.approx(peak, rel=0.1)

"""Models and runs that the tests of the planner share."""

from __future__ import annotations

from typing import Any

from megatron_distill.models.architecture import Architecture
from megatron_distill.planning.run import Choice, PlannedRun
from megatron_distill.runtime.layout import Layout


def llama(layers: int, hidden: int, ffn: int, heads: int, keys: int, **more: Any) -> Architecture:
    """Return a Llama's shape."""
    fields: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_kv_heads": keys,
        "head_size": hidden // heads,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
    }
    return Architecture(**{**fields, **more})


TEACHER = llama(80, 8192, 28_672, 64, 8)
STUDENT = llama(32, 4096, 14_336, 32, 8)


def run_of(student: Architecture = STUDENT, **changes: Any) -> PlannedRun:
    """Return a run of 8 Ki tokens per sequence, 256 of them per step."""
    fields: dict[str, Any] = {"teacher": None, "sequence_length": 8192, "global_batch_size": 256}
    return PlannedRun(student=student, **{**fields, **changes})


ONE_RANK = Layout()


def choice_of(
    layers: tuple[int, ...],
    teacher_layers: tuple[int, ...],
    layout: Layout = ONE_RANK,
    own: Layout | None = None,
    **changes: Any,
) -> Choice:
    """Return the choice of one replica whose ranks run a teacher, in a layout of its own or not."""
    fields = {"ranks": layout.model_ranks, "micro_batch_size": 1, "place": "shared", **changes}
    return Choice(
        layout=layout,
        layers=layers,
        teacher_layout=own or layout,
        teacher_layers=teacher_layers,
        **fields,
    )

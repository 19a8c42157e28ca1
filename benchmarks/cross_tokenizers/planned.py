"""The planner's prediction of the rows of `benchmarks/cross_tokenizer.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benchmarks.cross_tokenizers.texts import BATCH, LENGTH, MODELS
from megatron_distill.models.architecture import Architecture
from megatron_distill.planning.device import DeviceProfile
from megatron_distill.planning.run import Choice, ChunkLoss, PlannedRun
from megatron_distill.planning.search import Planned, planned
from megatron_distill.runtime.layout import Layout

__all__ = ["LOSSES", "planned_row"]

# Each is one row of the tables.
LOSSES: Final[Mapping[str, ChunkLoss]] = {
    "likelihood": ChunkLoss("likelihood"),
    "common": ChunkLoss("common"),
    "common, top 64": ChunkLoss("common", top_k=64),
    "projection": ChunkLoss("projection"),
    "gold": ChunkLoss("gold"),
    "uld": ChunkLoss("uld"),
}


def planned_row(name: str, device: DeviceProfile) -> Planned:
    """Predict time and memory of a row's step, in one process with all cores of the device."""
    run = PlannedRun(
        student=_shape("student"),
        teacher=_shape("teacher"),
        sequence_length=LENGTH,
        global_batch_size=BATCH,
        precision="fp32",
        chunk_losses=(LOSSES[name],),
    )
    choice = Choice(
        layout=Layout(),
        ranks=1,
        micro_batch_size=BATCH,
        layers=(run.student.num_layers,),
        place="shared",
        teacher_layout=Layout(),
        teacher_layers=(MODELS["teacher"].layers,),
    )
    return planned(run, choice, device.shared_by(1))


def _shape(role: str) -> Architecture:
    shape = MODELS[role]
    return Architecture(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_kv_heads=shape.heads,
        head_size=shape.hidden // shape.heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=LENGTH,
    )

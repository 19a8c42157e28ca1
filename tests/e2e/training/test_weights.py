"""The weights of a run: the teacher's are left alone.

The student's by the seed: tests/distributed/models/test_initial_weights.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.distributed.pool import Pool
from tests.e2e.runs import SEQUENCE, TENSOR, assembled, train_parts


def train_and_look_at_the_teacher(
    rank: int, world: int, config_path: Path, overrides: list[str]
) -> dict[str, int]:
    """Train, and count what must be zero and what the optimizer and the student hold."""
    with assembled(rank, world, config_path, overrides) as (config, parts):
        from megatron_distill.train.teachers.live import OnlineTeacher

        assert isinstance(parts.teacher, OnlineTeacher)
        model = parts.teacher.model
        before = {name: tensor.clone() for name, tensor in model.named_parameters()}
        student = {
            name: tensor.clone()
            for chunk in parts.state.student.chunks
            for name, tensor in chunk.named_parameters()
        }
        assert train_parts(config, parts) == ""
        own = {id(parameter) for parameter in model.parameters()}
        wrapped = [p for chunk in parts.state.student.wrapped for p in chunk.parameters()]
        held = [
            parameter
            for group in parts.state.optimizer.param_groups
            for parameter in group["params"]
        ]
        storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        return {
            "changed": sum(
                not torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8))
                for name, tensor in model.named_parameters()
            ),
            "with gradient": sum(
                p.requires_grad or p.grad is not None or hasattr(p, "main_grad")
                for p in model.parameters()
            ),
            "in data parallelism": sum(id(p) in own for p in wrapped),
            "in the optimizer": sum(p.untyped_storage().data_ptr() in storages for p in held),
            "student changed": sum(
                not torch.equal(tensor, student[name])
                for chunk in parts.state.student.chunks
                for name, tensor in chunk.named_parameters()
            ),
            "student": len(student),
        }


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        pytest.param(2, (TENSOR, SEQUENCE), id="TP2+sequence"),
        pytest.param(2, ("train.precision=bf16",), id="DP2 in bf16", marks=pytest.mark.slow),
    ],
)
def test_the_teacher_is_left_alone(
    pool: Pool, dense: Path, tmp_path: Path, world: int, overrides: tuple[str, ...]
) -> None:
    arguments = [f"output={tmp_path}", "train.steps=3", "schedule.warmup_steps=1"]
    arguments += ["checkpoint.save=true", *overrides]
    found = pool.run(world, train_and_look_at_the_teacher, dense, arguments)
    for counts in found:
        for name in ("changed", "with gradient", "in data parallelism", "in the optimizer"):
            assert counts[name] == 0, name
        assert counts["student changed"] == counts["student"]
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    shapes = {key: tuple(entry.size) for key, entry in saved.items() if hasattr(entry, "size")}
    assert {32, 48} <= {width for shape in shapes.values() for width in shape}
    assert not any(40 in shape for shape in shapes.values()), "as wide as the teacher alone"

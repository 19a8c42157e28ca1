"""The weights of a run: drawn alike in every layout, and the teacher's left alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.distributed.pool import Pool
from tests.e2e.runs import Inputs, assembled

VOCABULARY = 301
Part = tuple[str, tuple[int, ...], int, tuple[int, ...], torch.Tensor]


def held_parts(rank: int, world: int, config: Path, overrides: list[str]) -> dict[str, list[Part]]:
    """Where each tensor of this rank belongs: name, whole shape, leading axes, offset, values."""
    with assembled(rank, world, config, overrides) as (_, parts):
        from megatron_distill.models.weights import sharded_tensors
        from megatron_distill.train.teachers.live import OnlineTeacher

        assert isinstance(parts.teacher, OnlineTeacher)
        groups = parts.state.student.groups
        models = {"student": parts.state.student.chunks, "teacher": [parts.teacher.model]}
        return {
            role: [
                (part.key, part.global_shape, part.prepend_axis_num, part.global_offset, part.data)
                for part in sharded_tensors(chunks, groups)
                if part.data is not None
            ]
            for role, chunks in models.items()
        }


def whole_weights(found: Sequence[dict[str, list[Part]]], role: str) -> dict[str, torch.Tensor]:
    """Put the parts of all ranks together; where two ranks hold the same, they must agree."""
    whole: dict[str, torch.Tensor] = {}
    for of_rank in found:
        for key, shape, layers, offset, data in of_rank[role]:
            tensor = whole.setdefault(key, torch.full(shape, torch.nan))
            place = tuple(offset[:layers]) + tuple(
                slice(start, start + length)
                for start, length in zip(offset[layers:], data.shape, strict=True)
            )
            known = ~tensor[place].isnan()
            assert torch.equal(tensor[place][known], data[known]), key
            tensor[place] = data
    for key, tensor in whole.items():
        assert not tensor.isnan().any(), f"no rank holds all of {key}"
    return whole


def without_padding(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut the rows of vocabulary padding, which must be zero, off."""
    cut = dict(weights)
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert not weights[key][VOCABULARY:].any()
        cut[key] = weights[key][:VOCABULARY]
    return cut


TENSOR = "parallel.tensor=2"
SEQUENCE = "parallel.sequence=true"
PIPELINE = "parallel.pipeline=2"
VIRTUAL = "parallel.virtual_pipeline=2"
EXPERT = "parallel.expert=2"


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        (
            "dense",
            [(2, ()), (2, (TENSOR,)), (2, (PIPELINE, VIRTUAL)), (4, (TENSOR, PIPELINE))],
        ),
        ("moe", [(2, (EXPERT,)), (4, (TENSOR, SEQUENCE, EXPERT)), (4, (EXPERT, PIPELINE))]),
    ],
)
def test_one_seed_draws_the_same_weights_in_every_layout(
    pool: Pool, inputs: Inputs, tmp_path: Path, name: str, layouts: Any
) -> None:
    config = inputs.folder / f"{name}.yaml"
    output = f"output={tmp_path}"
    alone = pool.run(1, held_parts, config, [output])
    expected = {
        role: without_padding(whole_weights(alone, role)) for role in ("student", "teacher")
    }
    spread = {key: float(tensor.detach().std()) for key, tensor in expected["student"].items()}
    assert sum(value > 0.01 for value in spread.values()) >= 5
    for world, overrides in layouts:
        found = pool.run(world, held_parts, config, [output, *overrides])
        for role, weights in expected.items():
            ours = without_padding(whole_weights(found, role))
            assert set(ours) == set(weights)
            for key, tensor in weights.items():
                assert torch.equal(ours[key], tensor), (overrides, role, key)


def test_another_seed_draws_other_weights(pool: Pool, inputs: Inputs, tmp_path: Path) -> None:
    config = inputs.folder / "dense.yaml"
    found = [
        whole_weights(
            pool.run(1, held_parts, config, [f"output={tmp_path}", f"seed={seed}"]),
            "student",
        )
        for seed in (7, 8)
    ]
    drawn = [key for key, tensor in found[0].items() if tensor.std() > 0]
    assert drawn
    assert not any(torch.equal(found[0][key], found[1][key]) for key in drawn)
    # No two tensors of one model are drawn from one stream either.
    openings = {tuple(found[0][key].flatten()[:4].tolist()) for key in drawn}
    assert len(openings) == len(drawn)


def train_and_look_at_the_teacher(
    rank: int, world: int, config_path: Path, overrides: list[str]
) -> dict[str, int]:
    """Train, and count what must be zero and what the optimizer and the student hold."""
    with assembled(rank, world, config_path, overrides) as (config, parts):
        from megatron_distill.runtime.termination import TerminationRequest
        from megatron_distill.train.assemble.run import loop_plan
        from megatron_distill.train.loop import train
        from megatron_distill.train.teachers.live import OnlineTeacher

        assert isinstance(parts.teacher, OnlineTeacher)
        model = parts.teacher.model
        before = {name: tensor.clone() for name, tensor in model.named_parameters()}
        student = {
            name: tensor.clone()
            for chunk in parts.state.student.chunks
            for name, tensor in chunk.named_parameters()
        }
        train(
            parts,
            loop_plan(config),
            TerminationRequest(),
        )
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
        pytest.param(1, (), id="one rank", marks=pytest.mark.slow),
        pytest.param(2, (TENSOR, SEQUENCE), id="TP2+sequence"),
        pytest.param(2, (PIPELINE,), id="PP2", marks=pytest.mark.slow),
        pytest.param(2, ("train.precision=bf16",), id="DP2 in bf16", marks=pytest.mark.slow),
    ],
)
def test_the_teacher_is_left_alone(
    pool: Pool, inputs: Inputs, tmp_path: Path, world: int, overrides: tuple[str, ...]
) -> None:
    config = inputs.folder / "dense.yaml"
    arguments = [f"output={tmp_path}", "train.steps=3", "schedule.warmup_steps=1"]
    arguments += ["checkpoint.save=true", *overrides]
    found = pool.run(world, train_and_look_at_the_teacher, config, arguments)
    for counts in found:
        for name in ("changed", "with gradient", "in data parallelism", "in the optimizer"):
            assert counts[name] == 0, name
        assert counts["student changed"] == counts["student"]
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    shapes = {key: tuple(entry.size) for key, entry in saved.items() if hasattr(entry, "size")}
    assert {32, 48} <= {width for shape in shapes.values() for width in shape}
    assert not any(40 in shape for shape in shapes.values()), "as wide as the teacher alone"

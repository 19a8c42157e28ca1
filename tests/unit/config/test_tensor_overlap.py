"""Rules on the overlap of tensor-parallel messages: each one broken alone, and each just kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sample_configs import TAUGHT, complaints, load_tree, read_table

# Overrides, and how the only complaint begins.
BROKEN = read_table(
    """
runtime.tp_comm_overlap=true
train.precision=bf16
    -> runtime.tp_comm_overlap = true: parallel.tensor = 1 has no tensor-parallel messages; set
       runtime.tp_comm_overlap=false or parallel.tensor to 2 or more
runtime.tp_comm_overlap=true
train.precision=bf16
parallel.tensor=2
    -> runtime.tp_comm_overlap = true: needs sequence parallelism; set parallel.sequence=true or
       runtime.tp_comm_overlap=false
runtime.tp_comm_overlap=true
parallel={tensor: 2, sequence: true}
    -> runtime.tp_comm_overlap = true: needs train.precision = 'bf16', not 'fp32'; set
       train.precision=bf16 or runtime.tp_comm_overlap=false
runtime={tp_comm_overlap: true, transformer_engine: off}
train.precision=bf16
parallel={tensor: 2, sequence: true}
    -> runtime.tp_comm_overlap = true: needs Transformer Engine, and
       runtime.transformer_engine = 'off'; set it to auto or runtime.tp_comm_overlap=false
runtime={tp_comm_overlap: true, device: cpu}
train.precision=bf16
parallel={tensor: 2, sequence: true}
    -> runtime.tp_comm_overlap = true: needs GPUs, and runtime.device = 'cpu'; set
       runtime.tp_comm_overlap=false
runtime.tp_comm_overlap=true
train.precision=bf16
parallel={tensor: 2, sequence: true}
teacher.parallel={tensor: 4, sequence: true}
    -> runtime.tp_comm_overlap = true: Transformer Engine has buffers for one tensor-parallel
       size, and teacher.parallel.tensor = 4 differs from parallel.tensor = 2. Set one size, give
       the teacher ranks of its own, or set runtime.tp_comm_overlap=false
"""
)
KEPT = [
    ["parallel={tensor: 2, sequence: true}"],
    # A teacher on one rank sends nothing, and one elsewhere has buffers of its own.
    ["parallel={tensor: 2, sequence: true}", "teacher.parallel={tensor: 1}"],
    [
        "parallel={tensor: 2, sequence: true}",
        "teacher={ranks: 4, parallel: {tensor: 4, sequence: true}}",
    ],
]
ON = ("runtime.tp_comm_overlap=true", "train.precision=bf16")


@pytest.mark.parametrize(("overrides", "text"), BROKEN)
def test_a_broken_rule_is_the_only_complaint(
    tmp_path: Path, overrides: list[str], text: list[str]
) -> None:
    found = complaints(load_tree, tmp_path, TAUGHT, *overrides)
    (words,) = text
    assert [line[: len(words)] for line in found] == [words]


@pytest.mark.parametrize("overrides", KEPT)
def test_layouts_whose_messages_can_be_overlapped_are_taken(
    tmp_path: Path, overrides: list[str]
) -> None:
    assert load_tree(tmp_path, TAUGHT, *ON, *overrides).runtime.tp_comm_overlap

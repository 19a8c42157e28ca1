"""Rules on a teacher with ranks of its own, and the division of a launch in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.config import check_layout, teacher_ranks
from tests.support.sample_configs import TAUGHT, complaints, load_tree, read_table

APART = {"teacher": {**TAUGHT["teacher"], "ranks": 2}}
TREE = TAUGHT | APART

# Overrides, and how the only complaint begins.
BROKEN = """
teacher.nodes=1
    -> teacher.ranks = 2 and teacher.nodes = 1: give only one of the two
student.ranks=1
    -> student.ranks: of a teacher only; remove it
objective.features=[{student: 1, teacher: 1, loss: attention}]
    -> objective.features.0.loss = 'attention': needs queries and keys of the same heads on each
       rank of both models, and this teacher has ranks of its own
objective.terms=[]
objective.features=[{student: 1, teacher: 1, loss: cosine}]
teacher.transfer={what: top_k, k: 8}
    -> teacher.transfer.what = 'top_k': objective.terms = [], so that no loss uses the ids
teacher.transfer.what=top_k
    -> teacher.transfer.k is required with teacher.transfer.what = 'top_k'
teacher.transfer={what: top_k, k: 8}
    -> objective.terms.0 compares the whole vocabulary, and teacher.transfer.what = 'top_k' with
       k = 8 sends few ids; set objective.terms.0.top_k to 8 or less
teacher.transfer={what: top_k, k: 8}
objective.terms=[{top_k: 9}]
    -> objective.terms.0.top_k = 9: more than the 8 ids of teacher.transfer.k
teacher.transfer={what: top_k, k: 8}
objective.terms=[{alignment: common, top_k: 8}]
    -> objective.terms.0.alignment = 'common': teacher.transfer.what = 'top_k' with k = 8 sends
       the teacher's ids for the student's positions
teacher.transfer={what: top_k, k: 8}
objective.balance.mode=schedule
objective.terms=[{top_k: 4, temperature_schedule: {to: 2.0, steps: 2}}]
    -> objective.terms.0.temperature_schedule: teacher.transfer.what = 'top_k' with k = 8 sends
       normalisers at fixed temperatures only
teacher.transfer.backend=nccl
runtime.device=cpu
    -> teacher.transfer.backend = 'nccl' needs GPUs, and runtime.device = 'cpu'
"""


@pytest.mark.parametrize(("overrides", "expected"), read_table(BROKEN))
def test_each_rule_broken_alone(tmp_path: Path, overrides: list[str], expected: list[str]) -> None:
    found = complaints(load_tree, tmp_path, TREE, *overrides)
    assert len(found) == len(expected), found
    for text, start in zip(found, expected, strict=True):
        assert text.startswith(start), text


def test_keys_of_own_ranks_have_no_effect_without_them(tmp_path: Path) -> None:
    changes = ("teacher.steps_ahead=2", "teacher.transfer={what: top_k, k: 4}")
    config = load_tree(tmp_path, TAUGHT, *changes)
    assert config.teacher == load_tree(tmp_path, TAUGHT).teacher


@pytest.mark.parametrize(
    ("ranks", "teachers", "expected"),
    [
        (5, 2, "parallel.tensor * parallel.pipeline * parallel.context = 1 * 2 * 1"),
        (5, 3, "teacher.parallel.tensor * teacher.parallel.pipeline"),
        (2, 2, "teacher.ranks gives the teacher 2 ranks, but the launch has 2 processes"),
    ],
)
def test_both_layouts_must_fit_their_ranks(
    tmp_path: Path, ranks: int, teachers: int, expected: str
) -> None:
    config = load_tree(tmp_path, TREE, "teacher.parallel={tensor: 2}", "parallel.pipeline=2")
    assert teacher_ranks(config, ranks_per_node=8) == 2
    check_layout(config, 4, teachers=2)
    (text,) = complaints(lambda: check_layout(config, ranks, teachers=teachers))
    assert text.startswith(expected)


def test_whole_nodes_are_ranks_of_this_launch(tmp_path: Path) -> None:
    config = load_tree(tmp_path, TAUGHT, "teacher.nodes=3")
    assert teacher_ranks(config, ranks_per_node=8) == 24

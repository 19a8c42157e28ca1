"""Rules on a teacher with its own layout: they name its keys, not the student's."""

from __future__ import annotations

import pytest

from megatron_distill.config import ParallelConfig, teacher_parallel
from tests.support.sample_configs import TAUGHT, complaints, load_tree

MAPS = "objective.features=[{student: 1, teacher: 1, loss: attention}]"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["teacher.parallel.virtual_pipeline=2"],
            "teacher.parallel.virtual_pipeline = 2: a teacher runs forward only",
        ),
        (["teacher.parallel.tensor=2", MAPS], "objective.features.0.loss = 'attention': needs"),
        (
            ["teacher.parallel.tensor=3"],
            "teacher.parallel.tensor = 3: does not divide teacher.architecture.num_attention_heads",
        ),
        (
            ["teacher.parallel={context: 2}", "data.sequence_length=30"],
            "data.sequence_length = 30: with teacher.parallel.context = 2 it must be a multiple of "
            "2 * teacher.parallel.context = 4",
        ),
        (
            ["teacher.parallel.pipeline=2", "parallel.layers_per_stage.teacher=[2]"],
            "parallel.layers_per_stage.teacher = [2]: 1 number, but teacher.parallel.pipeline = 2 "
            "needs one",
        ),
        (
            ["teacher.parallel={tensor: 1}", "teacher.offload=true"],
            "teacher.offload = true: a teacher with a layout of its own keeps its weights",
        ),
        (["student.parallel.tensor=2"], "student.parallel: the student's layout is parallel"),
    ],
)
def test_a_problem_names_the_teachers_key(tmp_path, overrides, words):
    found = complaints(load_tree, tmp_path, TAUGHT, *overrides)
    assert any(line.startswith(words) for line in found), found


def test_the_students_problems_keep_their_keys(tmp_path):
    found = complaints(load_tree, tmp_path, TAUGHT, "parallel.tensor=3", "teacher.parallel={}")
    assert all(line.startswith("parallel.tensor = 3") for line in found), found


def test_the_layout_is_the_students_without_chunks_or_the_own(tmp_path):
    shared = load_tree(tmp_path, TAUGHT, "parallel={pipeline: 2, virtual_pipeline: 2}")
    assert teacher_parallel(shared) == ParallelConfig(pipeline=2)
    own = load_tree(tmp_path, TAUGHT, "parallel.pipeline=2", "teacher.parallel.tensor=2")
    assert teacher_parallel(own) == ParallelConfig(tensor=2)


def test_experts_of_a_dense_teacher_have_no_effect(tmp_path):
    config = load_tree(tmp_path, TAUGHT, "teacher.parallel.expert=2")
    assert teacher_parallel(config).expert == 1

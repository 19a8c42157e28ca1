"""A teacher with its own layout. The rules on its keys are in test_rules.py."""

from __future__ import annotations

from megatron_distill.config import ParallelConfig, teacher_parallel
from tests.support.sample_configs import TAUGHT, complaints, load_tree


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

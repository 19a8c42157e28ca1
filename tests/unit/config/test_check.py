"""Rules on the number of processes, and on shapes that only a checkpoint tells; all together.

Rules that are checked at loading are in test_rules.py.
"""

import re

import pytest

from megatron_distill.config import (
    ArchitectureConfig,
    ParallelConfig,
    check_architecture,
    check_layout,
    teacher_ranks,
)
from tests.support.sample_configs import ARCHITECTURE, EXPERTS, TAUGHT, complaints, load_tree


@pytest.mark.parametrize(
    ("overrides", "world_size", "words"),
    [
        (
            ["parallel={tensor: 2, pipeline: 2}"],
            6,
            "parallel.tensor * parallel.pipeline * parallel.context = 2 * 2 * 1: the layout "
            "needs a multiple of 4 processes; there are 6. Set --processes",
        ),
        (
            ["parallel.context=2"],
            1,
            "parallel.tensor * parallel.pipeline * parallel.context = 1 * 1 * 2: the layout "
            "needs a multiple of 2 processes; there is 1. Set --processes",
        ),
        (
            [EXPERTS, "parallel.expert=2"],
            1,
            "parallel.expert = 2: must divide data-parallel size * parallel.context = 1 * 1 on 1 "
            "process",
        ),
        (
            ["train={global_batch_size: 6, micro_batch_size: 2}"],
            2,
            "train.global_batch_size = 6: must be a multiple of train.micro_batch_size * "
            "data-parallel size = 2 * 2 on 2 processes",
        ),
        (
            ["parallel={pipeline: 2, virtual_pipeline: 2}", "train.global_batch_size=6"],
            4,
            "train.global_batch_size = 6 makes 3 micro-batches on each data-parallel rank; "
            "parallel.virtual_pipeline needs a multiple of parallel.pipeline = 2",
        ),
        (
            ["teacher.parallel={tensor: 2, pipeline: 2}"],
            2,
            "teacher.parallel.tensor * teacher.parallel.pipeline * teacher.parallel.context = "
            "2 * 2 * 1: the layout needs a multiple of 4 processes; there are 2. Set",
        ),
    ],
)
def test_a_layout_that_does_not_fit_the_processes_is_named(tmp_path, overrides, world_size, words):
    found = complaints(check_layout, load_tree(tmp_path, TAUGHT, *overrides), world_size)
    assert [line[: len(words)] for line in found] == [words]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["teacher.ranks=3", "teacher.parallel.tensor=2"],
            "the layout needs a multiple of 2 ranks; the teacher has 3. Set teacher.ranks or one",
        ),
        (
            ["teacher.ranks=1", "parallel.tensor=2", "teacher.parallel={tensor: 1}"],
            "the layout needs a multiple of 2 ranks; the student has 3. Set --processes (of "
            "torchrun --nproc-per-node, of a submission --ranks-per-node), teacher.ranks or one of "
            "these keys",
        ),
        (
            ["teacher.ranks=1"],
            "train.micro_batch_size * data-parallel size = 1 * 3 on the 3 ranks of the student",
        ),
        (
            ["teacher.ranks=3", EXPERTS.replace("student", "teacher"), "teacher.parallel.expert=2"],
            "must divide data-parallel size * teacher.parallel.context = 3 * 1 on the 3 ranks of "
            "the teacher",
        ),
    ],
)
def test_the_role_whose_ranks_do_not_fit_is_named_with_its_key(tmp_path, overrides, words):
    config = load_tree(tmp_path, TAUGHT, *overrides)
    teachers = teacher_ranks(config, ranks_per_node=4)
    (found,) = complaints(lambda: check_layout(config, 4, teachers=teachers))
    assert words in found


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ([], 1),
        ([], 4),
        (["parallel={tensor: 2, pipeline: 2}"], 4),
        (["parallel={tensor: 2, pipeline: 2}"], 8),
        ([EXPERTS, "parallel={context: 2, expert: 2}"], 2),
        ([EXPERTS, "parallel.expert=4"], 4),
        (["parallel={pipeline: 2, virtual_pipeline: 2}"], 4),
        (["parallel.pipeline=2", "train.global_batch_size=3"], 2),
        (["parallel.pipeline=2", "teacher.parallel={tensor: 4, sequence: true}"], 4),
    ],
)
def test_a_layout_that_fits_passes(tmp_path, overrides, world_size):
    check_layout(load_tree(tmp_path, TAUGHT, *overrides), world_size)


def test_check_layout_reports_rules_and_processes_together(tmp_path):
    good = load_tree(tmp_path, TAUGHT)
    bad = good.model_copy(
        update={
            "parallel": ParallelConfig(tensor=3),
            "train": good.train.model_copy(update={"micro_batch_size": 3}),
        }
    )
    found = complaints(check_layout, bad, 4)
    starts = [re.split(r" = |: ", line)[0] for line in found]
    assert starts.count("parallel.tensor") == 4
    assert "train.global_batch_size" in starts
    assert "parallel.tensor * parallel.pipeline * parallel.context" in starts


def test_a_shape_from_a_checkpoint_is_checked_by_the_same_rules():
    shape = ArchitectureConfig(
        **ARCHITECTURE | {"num_layers": 3, "ffn_hidden_size": 130},
        max_position_embeddings=64,
        vocab_size=100,
    )
    layout = ParallelConfig(tensor=4, pipeline=2, virtual_pipeline=2)
    assert check_architecture(shape, "student", ParallelConfig(), 64) == []
    student = check_architecture(shape, "student", layout, 65)
    teacher = check_architecture(shape, "teacher", layout, 65)
    starts = ["data.sequence_length = 65", "parallel.tensor = 4"]
    assert [text.split(":")[0] for text in teacher] == starts
    starts.append("parallel.pipeline = 2 times parallel.virtual_pipeline = 2")
    assert [text.split(":")[0] for text in student] == starts
    assert "teacher.architecture.ffn_hidden_size = 130" in teacher[1]

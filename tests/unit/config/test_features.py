"""Rules of feature losses, and which layers an entry means.

Regimes: each rule broken alone; all reported together; depths that the file tells and such that it
does not; a student deeper than its teacher, one of the same depth, and one that does not divide it.
"""

import pytest

from megatron_distill.config import check_features, matched_layers
from megatron_distill.config.schema import FeatureConfig
from tests.support.sample_configs import TAUGHT, complaints, load_tree

ONE = "objective.features=[{student: 1, teacher: 2}]"
BROKEN = {
    "a store": (
        ["teacher={architecture: null, store: stores/t}", ONE],
        "objective.features: 1 feature loss, but teacher.store has no hidden states; "
        "set teacher.hf or teacher.checkpoint in its place, or objective.features=[]",
    ),
    "neither layers nor match": (
        ["objective.features=[{student: 1}]"],
        "objective.features.0: set objective.features.0.student and "
        "objective.features.0.teacher, or objective.features.0.match for all layers",
    ),
    "layer and match": (
        ["objective.features=[{match: last, teacher: 2}]"],
        "objective.features.0.match = 'last' pairs all layers, but objective.features.0.teacher",
    ),
    "no such layer of the student": (
        ["objective.features=[{student: 5, teacher: 2}]"],
        "objective.features.0.student = 5: the student has layers 1 to 4, counted from 1; lower it",
    ),
    "no such layer of the teacher": (
        ["objective.features=[{student: 4, teacher: 3}]", "teacher.architecture.num_layers=2"],
        "objective.features.0.teacher = 3: the teacher has layers 1 to 2, counted from 1; lower it",
    ),
    "last layers of a shallower teacher": (
        ["objective.features=[{match: last}]", "teacher.architecture.num_layers=3"],
        "objective.features.0.match = 'last': the teacher has 3 layers, fewer than the student's 4",
    ),
    "the same pair twice": (
        ["objective.features=[{student: 2, teacher: 2}, {match: uniform}]"],
        "objective.features.1 and objective.features.0 both have the mse loss of "
        "student layer 2 and teacher layer 2; keep one of them, with the sum of the "
        "weights",
    ),
    "all pairs twice": (
        ["objective.features=[{match: last}, {match: uniform}]"],
        "objective.features.1 and objective.features.0 both have the mse loss of "
        "student layer 1 and teacher layer 1; keep one of them, with the sum of the "
        "weights",
    ),
}
KEPT = [
    [ONE, "objective.projector={kind: mlp, hidden_size: 8}"],
    ["objective.features=[{student: 4, teacher: 4}, {student: 4, teacher: 4, loss: cosine}]"],
    ["objective={ce_weight: 0, terms: [], features: [{student: 1, teacher: 2}]}"],
    ["objective.features=[{match: last}]", "teacher={architecture: null, checkpoint: runs/t}"],
]


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_the_only_complaint(tmp_path, case):
    overrides, words = BROKEN[case]
    found = complaints(load_tree, tmp_path, TAUGHT, *overrides)
    assert [line[: len(words)] for line in found] == [words]


@pytest.mark.parametrize("overrides", KEPT)
def test_a_rule_that_is_just_kept_says_nothing(tmp_path, overrides):
    load_tree(tmp_path, TAUGHT, *overrides)


def test_all_problems_come_together(tmp_path):
    found = complaints(
        load_tree, tmp_path, TAUGHT,
        "objective.features=[{student: 5, teacher: 9}, {match: last, student: 1}]",
    )  # fmt: skip
    assert [line.split(" = ")[0] for line in found] == [
        "objective.features.1.match",
        "objective.features.0.student",
        "objective.features.0.teacher",
    ]
    whole = FeatureConfig(student=5, teacher=9)
    last = FeatureConfig(match="last")
    found = complaints(check_features, (whole, last, last), 4, 2)
    starts = [line.split(":")[0].split(" = ")[0] for line in found]
    assert starts == [
        "objective.features.0.student",
        "objective.features.0.teacher",
        "objective.features.1.match",
        "objective.features.2.match",
    ]


@pytest.mark.parametrize(
    ("match", "student", "teacher", "expected"),
    [
        ("uniform", 4, 4, [1, 2, 3, 4]),
        ("uniform", 4, 12, [3, 6, 9, 12]),
        ("uniform", 4, 6, [2, 3, 5, 6]),  # 1.5 and 4.5 are rounded up
        ("uniform", 3, 8, [3, 5, 8]),
        ("uniform", 4, 2, [1, 1, 2, 2]),
        ("uniform", 6, 2, [1, 1, 1, 1, 2, 2]),  # a third of a layer is the first
        ("last", 3, 8, [6, 7, 8]),
        ("last", 4, 4, [1, 2, 3, 4]),
    ],
)
def test_depths_are_matched(match, student, teacher, expected):
    found = matched_layers(FeatureConfig(match=match), student, teacher)
    assert found == tuple(enumerate(expected, start=1))

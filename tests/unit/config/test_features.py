"""Rules of feature losses, and which layers an entry means."""

import pytest

from megatron_distill.config import check_features, matched_layers
from megatron_distill.config.schema import FeatureConfig
from tests.support.sample_configs import TAUGHT, complaints, load_tree


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

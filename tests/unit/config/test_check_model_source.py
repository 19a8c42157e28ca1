"""Rules on where a model comes from: each one broken alone, for student and teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.sample_configs import ARCHITECTURE, MINIMAL, complaints, load_tree

HF = {"hf": "folder"}
CHECKPOINT = {"checkpoint": "folder"}
SHAPE = {"architecture": ARCHITECTURE}
NEEDS = "takes layers from student.hf or student.checkpoint; set one of these and remove"
# student, teacher -> the complaint
BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "hf and shape": (
        HF | SHAPE, None, "student.hf = 'folder' and student.architecture are both given",
    ),
    "hf and checkpoint": (
        HF | CHECKPOINT, None, "student.hf = 'folder' and student.checkpoint are both given",
    ),
    "the teacher's": (
        HF, HF | SHAPE, "teacher.hf = 'folder' and teacher.architecture are both given",
    ),
    "nothing": ({}, None, "neither student.hf nor student.architecture nor student.checkpoint"),
    "layers of a shape": (SHAPE | {"num_layers": 2}, None, f"student.num_layers = 2: {NEEDS}"),
    "layers of a shape, listed": (
        SHAPE | {"keep_layers": [0, 1]}, None, f"student.keep_layers = [0, 1]: {NEEDS}",
    ),
    "layers of a shape with weights": (
        SHAPE | CHECKPOINT | {"num_layers": 2}, None, f"student.num_layers = 2: {NEEDS}",
    ),
    "layers of a teacher": (
        HF, HF | {"num_layers": 2}, "teacher.num_layers = 2: only a student can be pruned",
    ),
    "listed layers of a teacher": (
        HF, HF | {"keep_layers": [0]}, "teacher.keep_layers = [0]: only a student can be pruned",
    ),
    "both": (
        HF | {"num_layers": 2, "keep_layers": [0, 1]}, None,
        "student.keep_layers and student.num_layers are both given; set only one of the two",
    ),
    "out of order": (HF | {"keep_layers": [2, 1]}, None, "student.keep_layers = [2, 1]: list"),
    "twice": (HF | {"keep_layers": [1, 1]}, None, "student.keep_layers = [1, 1]: list"),
    "negative": (HF | {"keep_layers": [-1, 1]}, None, "student.keep_layers = [-1, 1]: list"),
}  # fmt: skip


def tree(student: dict[str, Any], teacher: dict[str, Any] | None) -> dict[str, Any]:
    return MINIMAL | {"student": student} | ({"teacher": teacher} if teacher else {})


@pytest.mark.parametrize("case", BROKEN)
def test_a_contradiction_is_reported(tmp_path: Path, case: str) -> None:
    student, teacher, expected = BROKEN[case]
    assert any(expected in text for text in complaints(load_tree, tmp_path, tree(student, teacher)))


@pytest.mark.parametrize(
    "student",
    [
        HF, CHECKPOINT, SHAPE | CHECKPOINT, HF | {"num_layers": 1}, HF | {"keep_layers": [0, 5, 7]},
        CHECKPOINT | {"keep_layers": [3]},
    ],
)  # fmt: skip
def test_values_without_contradiction_pass(tmp_path: Path, student: dict[str, Any]) -> None:
    config = load_tree(tmp_path, tree(student, None))
    assert config.student.keep_layers is None or config.student.keep_layers[-1] >= 0


@pytest.mark.parametrize("count", [0, -2, "two"])
def test_a_number_of_layers_is_positive(tmp_path: Path, count: object) -> None:
    (text,) = complaints(load_tree, tmp_path, tree(HF | {"num_layers": count}, None))
    assert "student.num_layers" in text


def test_a_list_without_a_layer_is_refused(tmp_path: Path) -> None:
    (text,) = complaints(load_tree, tmp_path, tree(HF | {"keep_layers": []}, None))
    assert "student.keep_layers" in text

"""The configuration of a trained run whose teachers had layouts and ranks that are gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_distill.config import own_layouts, teacher_ranks
from megatron_distill.train.assemble.trained_config import STUDENT_ALONE, load_trained_run
from tests.support.sample_configs import ARCHITECTURE, MINIMAL

MODEL = {"architecture": ARCHITECTURE}
APART = {**MODEL, "ranks": 2, "parallel": {"tensor": 2}, "steps_ahead": 3}
SEVERAL = {
    "teachers": {
        "math": {**APART, "transfer": {"backend": "gloo"}},
        "code": {**MODEL, "nodes": 1},
        "law-2": {**MODEL, "parallel": {"pipeline": 2}},
    },
    "objective": {"routing_weights": {"math": 1, "code": 1, "law-2": 2}},
}


@pytest.mark.parametrize("tree", [{"teacher": APART}, SEVERAL], ids=["one", "several"])
def test_every_teacher_runs_in_one_process(tmp_path: Path, tree: dict) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(MINIMAL | tree))
    config = load_trained_run(str(tmp_path), [], world_size=1)
    assert list(own_layouts(config)) == []
    assert teacher_ranks(config, ranks_per_node=8) == ()
    teachers = [model for role, model in config.models.items() if role != "student"]
    assert len(teachers) == len(tree.get("teachers", [0]))
    assert all(model.steps_ahead == 1 for model in teachers)
    assert not load_trained_run(str(tmp_path), STUDENT_ALONE, world_size=1).has_teacher


def test_a_layout_of_two_ranks_is_given_again(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(MINIMAL | SEVERAL))
    given = ["teachers.law-2.parallel={tensor: 2}", "train.global_batch_size=2"]
    config = load_trained_run(str(tmp_path), given, world_size=2)
    assert [role for role, _ in own_layouts(config)] == ["teachers.law-2"]

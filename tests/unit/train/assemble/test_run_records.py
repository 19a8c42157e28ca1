"""A run's records, and the configuration of a trained run."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
import yaml

from megatron_distill.config import KeepBestConfig, own_layouts, teacher_ranks
from megatron_distill.data.blending import next_source
from megatron_distill.train.assemble.evaluation import _logged, best_rule
from megatron_distill.train.assemble.stores.source import most_samples
from megatron_distill.train.assemble.trained_config import STUDENT_ALONE, load_trained_run
from megatron_distill.train.validation import logged_validation
from tests.support.sample_configs import ARCHITECTURE, MINIMAL


def test_a_source_named_evaluation_is_none_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    records = [
        {"step": 1, "sources": {"evaluation": {"ce_loss": 2.0}, "web": {"ce_loss": 3.0}}},
        {"step": 2, "evaluation": {"student": {}, "teacher": {}}},
    ]
    log.write_text("".join(json.dumps(one) + "\n" for one in records) + '{"step": 3, "evaluation"')
    assert _logged(log) == {("student", 2), ("teacher", 2)}
    assert _logged(tmp_path / "none.jsonl") == frozenset()


def test_a_validation_is_that_of_its_step_in_a_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    records = [
        {"step": 2, "validation": {"ce_loss": 3.0}},
        {"step": 4, "sources": {"validation": {"ce_loss": 2.0}}},
        {"step": 4, "validation": {"ce_loss": 1.0}},
    ]
    log.write_text("\n".join(map(json.dumps, records)))  # a kill came before the last line's end
    assert logged_validation(tmp_path, 2) == {"ce_loss": 3.0}
    assert logged_validation(tmp_path, 4) is None
    assert logged_validation(tmp_path / "none", 2) is None


@pytest.mark.parametrize("weights", [(1, 1), (2, 1), (0.1, 0.2, 0.7), (1, 1, 1, 1), (5, 3, 1, 1)])
def test_a_store_of_one_source_must_have_all_that_the_run_reads_of_it(
    weights: tuple[float, ...],
) -> None:
    taken = [0] * len(weights)
    for total in range(1, 400):
        taken[next_source(taken, weights)] += 1
        for count, weight in zip(taken, weights, strict=True):
            most = most_samples(weight / sum(weights), total)
            assert count <= most <= count + 1, total
            # A whole share is read exactly, whatever rounding makes of the product.
            share = Fraction(str(weight)) / sum(Fraction(str(one)) for one in weights) * total
            if share.denominator == 1:
                assert most == count == share
    assert most_samples(0.5, 2999) == 1500
    assert most_samples(1.0, 2999) == 2999


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("validation.ce_loss", "min"),
        ("validation.forward_kl_t2", "min"),
        ("validation.forward_kl_top64_renormalized", "min"),
        ("validation.total_variation", "min"),
        ("validation.uld", "min"),
        ("validation.top1_agreement", "max"),
        ("validation.topk_mass", "max"),
        ("prose.bits_per_byte", "min"),
        ("prose.word_perplexity", "min"),
        ("mmlu.acc", "max"),
        ("mmlu.calibration_error", "min"),
        ("gsm8k.exact_match", "max"),
    ],
)
def test_the_best_value_of_a_metric_is_the_one_that_a_user_means(metric: str, mode: str) -> None:
    assert best_rule(KeepBestConfig(metric=metric)).mode == mode
    assert best_rule(KeepBestConfig(metric=metric, mode="max")).mode == "max"


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

"""Settings of the top-k that a teacher on ranks of its own sends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_distill.errors import ConfigError
from megatron_distill.runtime.roles import Roles
from megatron_distill.train.assemble.answers.plan import answer_plan, answer_settings, terms_of
from megatron_distill.train.assemble.models import build_terms, read_model
from megatron_distill.train.assemble.routing import members
from tests.support.sample_configs import ARCHITECTURE, MINIMAL, TAUGHT, load_tree

APART = TAUGHT | {"teacher": {**TAUGHT["teacher"], "ranks": 1, "sequence_length": 24}}
SENT = "transfer={what: top_k, k: 8}"


def test_records_of_chunks_are_of_the_teachers_tokens(tmp_path: Path) -> None:
    # The temperature of the first is of texts.
    terms = (
        "[{alignment: likelihood, temperature: 6.0}, "
        "{alignment: common, top_k: 4, temperature: 2.0}]"
    )
    config = load_tree(tmp_path, APART, f"teacher.{SENT}", f"objective.terms={terms}")
    built = build_terms(config.objective.terms, 100)
    found = answer_settings(config, "teacher", built, tokens=50)
    assert (found.k, found.vocab_size, found.sequence_length) == (8, 50, 24)
    assert found.temperatures == (2.0,)
    with pytest.raises(ConfigError, match=r"^teacher\.transfer\.k = 8: its tokenizer has 7 tokens"):
        answer_settings(config, "teacher", built, tokens=7)


def test_each_of_several_teachers_sends_the_numbers_of_its_terms(tmp_path: Path) -> None:
    teachers = {name: {"architecture": ARCHITECTURE, "ranks": 1} for name in ("code", "math")}
    tree = MINIMAL | {"teachers": teachers, "objective": {"routing_weights": {"code": 1}}}
    # A mean of renormalised probabilities needs the normaliser of each teacher.
    terms = (
        "[{top_k: 4}, {top_k: 4, teacher: math, temperature: 2.0}, {top_k: 4, temperature: 3.0, "
        "support: renormalized}, {top_k: 4, teachers: [code, math], temperature: 4.0, "
        "support: renormalized, mixture: lowest_loss}]"
    )
    changes = [f"teachers.{name}.{SENT}" for name in teachers]
    config = load_tree(tmp_path, tree, *changes, f"objective.terms={terms}")
    built = build_terms(config.objective.terms, 100)
    temperatures = {}
    for name in teachers:
        settings = answer_settings(config, f"teachers.{name}", built, tokens=50)
        temperatures[name] = settings.temperatures
    assert temperatures == {"code": (), "math": (2.0,)}
    code = members(config)["teachers.code"]
    assert terms_of(code, built) == (built[0], built[2], built[3])
    assert terms_of(None, built) == built

    mean = terms.replace("mixture: lowest_loss", "mixture: arithmetic")
    config = load_tree(tmp_path, tree, changes[0], f"objective.terms={mean}")
    built = build_terms(config.objective.terms, 100)
    settings = answer_settings(config, "teachers.code", built, tokens=50)
    assert settings.temperatures == (4.0,)
    assert answer_settings(config, "teachers.math", built, tokens=50) is None


def test_of_several_teachers_one_answers_in_tokens_of_its_own(tmp_path: Path) -> None:
    shape = {"architecture": ARCHITECTURE, "ranks": 1}
    tree = MINIMAL | {
        "teachers": {"far": {**shape, "sequence_length": 24}, "near": shape},
        "objective": {"routing_weights": {"far": 1, "near": 1}},
    }
    terms = (
        "[{top_k: 4, temperature: 2.0}, {alignment: likelihood, temperature: 6.0}, "
        "{alignment: common, top_k: 4, temperature: 3.0, teacher: far}]"
    )
    changes = [f"teachers.{name}.{SENT}" for name in ("far", "near")]
    config = load_tree(tmp_path, tree, *changes, f"objective.terms={terms}")
    built = build_terms(config.objective.terms, 100)
    roles = Roles(3, (("teachers.far", 1), ("teachers.near", 1)))
    student = read_model(config, "student", None).architecture
    found = {}
    for role in roles.teachers:
        teacher = read_model(config, role.name, None).architecture
        settings = answer_settings(config, role.name, built, tokens=50)
        plan = answer_plan(config, role, roles, teacher, student, torch.float32, settings)
        found[role.name] = (settings.temperatures, plan.length, plan.outputs[0].is_whole)
    assert found == {"teachers.far": ((3.0,), 24, True), "teachers.near": ((2.0,), 64, False)}
    far, near = (members(config)[role] for role in found)
    assert terms_of(far, built) == built[1:]
    assert terms_of(near, built) == built[:1]

"""Rules on a teacher with ranks of its own, and the division of a launch in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.config import (
    TransferConfig,
    check_layout,
    has_own_tokenizer,
    teacher_ranks,
)
from tests.support.sample_configs import (
    ARCHITECTURE,
    MINIMAL,
    TAUGHT,
    complaints,
    load_tree,
    read_table,
)

APART = {"teacher": {**TAUGHT["teacher"], "ranks": 2}}
TREE = TAUGHT | APART

# Overrides, and how the only complaint begins.
BROKEN = """
teacher.nodes=1
    -> teacher.ranks = 2 and teacher.nodes = 1: give only one of the two
student.ranks=1
    -> student.ranks: of a teacher only; remove it
objective.features=[{student: 1, teacher: 1, loss: attention}]
parallel.tensor=2
teacher.parallel={tensor: 3}
teacher.architecture={hidden_size: 96, ffn_hidden_size: 192, num_attention_heads: 6,
  num_kv_heads: 3}
    -> objective.features.0.loss = 'attention': sends heads between tensor ranks, and of 2 and 3
       ranks neither number divides the other
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
objective.terms=[{alignment: gold}]
    -> objective.terms.0.alignment = 'gold': needs whole distributions, and
       teacher.transfer.what = 'top_k' with k = 8 sends a part of them
teacher.transfer={what: top_k, k: 8}
objective.terms=[{alignment: common}]
    -> objective.terms.0 compares all common tokens, and teacher.transfer.what = 'top_k' with
       k = 8 sends few ids; set objective.terms.0.top_k to 8 or less
teacher.transfer={what: top_k, k: 8}
objective.terms=[{alignment: common, top_k: 9}]
    -> objective.terms.0.top_k = 9: more than the 8 ids of teacher.transfer.k
teacher.transfer={what: top_k, k: 8}
objective.balance.mode=schedule
objective.terms=[{alignment: common, top_k: 4, temperature_schedule: {to: 2.0, steps: 2}}]
    -> objective.terms.0.temperature_schedule: teacher.transfer.what = 'top_k' with k = 8 sends
       normalisers at fixed temperatures only; remove the schedule
teacher.transfer={what: top_k, k: 8}
objective.balance.mode=schedule
objective.terms=[{top_k: 4, temperature_schedule: {to: 2.0, steps: 2}}]
    -> objective.terms.0.temperature_schedule: teacher.transfer.what = 'top_k' with k = 8 sends
       normalisers at fixed temperatures only
teacher.transfer.backend=nccl
runtime.device=cpu
    -> teacher.transfer.backend = 'nccl' needs GPUs, and runtime.device = 'cpu'
"""


# Of the rules on terms, those that a sent top-k serves.
SERVED = (
    "[{alignment: likelihood, temperature: 6.0, temperature_schedule: {to: 2.0, steps: 2}}, "
    "{alignment: common, top_k: 8, temperature: 2.0}]",
    "[{top_k: 8, temperature: 2.0}, {top_k: 4, support: renormalized, "
    "temperature_schedule: {to: 2.0, steps: 2}}]",
)


@pytest.mark.parametrize("terms", SERVED)
def test_terms_of_a_sent_top_k_load(tmp_path: Path, terms: str) -> None:
    changes = ("teacher.transfer={what: top_k, k: 8}", "objective.balance.mode=schedule")
    config = load_tree(tmp_path, TREE, *changes, f"objective.terms={terms}")
    check_layout(config, 4, teachers=(("teacher", 2),))
    assert len(config.objective.terms) == 2


def test_a_sent_top_k_does_not_go_by_nccl(tmp_path: Path) -> None:
    sent = "teacher.transfer={what: top_k, k: 8, backend: nccl}"
    config = load_tree(tmp_path, TREE, sent, "objective.terms=[{top_k: 8}]")
    assert config.teacher.transfer.backend == "gloo"


MOVED = ("teacher.transfer={what: top_k, k: 8, backend: ipc}", "teacher.parallel={tensor: 2}")


def test_a_teacher_with_its_own_layout_moves_a_top_k_that_its_terms_need(tmp_path: Path) -> None:
    terms = "objective.terms=[{top_k: 8}]"
    config = load_tree(tmp_path, TAUGHT, *MOVED, terms)
    # It moves with the collectives of the ranks.
    assert config.teacher.transfer == TransferConfig(what="top_k", k=8)
    (text,) = complaints(lambda: load_tree(tmp_path, TAUGHT, *MOVED))
    assert text.startswith("objective.terms.0 compares the whole vocabulary, and teacher.transfer")
    (text,) = complaints(lambda: load_tree(tmp_path, TAUGHT, *MOVED, terms.replace("8", "9")))
    assert text.startswith("objective.terms.0.top_k = 9: more than the 8 ids of teacher.transfer.k")
    # In the student's layout nothing moves.
    same = load_tree(tmp_path, TAUGHT, *MOVED, terms, "parallel.tensor=2")
    assert same.teacher.transfer == TransferConfig()


def test_a_moved_top_k_is_in_no_mean_with_another_one(tmp_path: Path) -> None:
    sent = "transfer: {what: top_k, k: 8}"
    changes = (
        f"teachers.law={{parallel: {{tensor: 2}}, {sent}}}",
        f"teachers.math={{{sent}}}",
        "objective.terms=[{top_k: 4}, {top_k: 4, teachers: [math, law]}]",
    )
    (text,) = complaints(lambda: load_tree(tmp_path, SEVERAL, *changes))
    assert "teachers.math.transfer.k and teachers.law.transfer.k: none has probabilities" in text


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
    assert teacher_ranks(config, ranks_per_node=8) == (("teacher", 2),)
    check_layout(config, 4, teachers=(("teacher", 2),))
    given = (("teacher", teachers),)
    (text,) = complaints(lambda: check_layout(config, ranks, teachers=given))
    assert text.startswith(expected)


def test_whole_nodes_are_ranks_of_this_launch(tmp_path: Path) -> None:
    config = load_tree(tmp_path, TAUGHT, "teacher.nodes=3")
    assert teacher_ranks(config, ranks_per_node=8) == (("teacher", 24),)


# `law` is on the student's ranks.
SEVERAL = MINIMAL | {
    "teachers": {
        "math": {"architecture": ARCHITECTURE, "ranks": 2},
        "code": {"architecture": ARCHITECTURE, "nodes": 1},
        "law": {"architecture": ARCHITECTURE},
    },
    "objective": {"routing_weights": {"math": 1, "code": 1, "law": 1}},
}
OF_SEVERAL = """
teachers.math.transfer={what: top_k, k: 8}
    -> objective.terms.0 compares the whole vocabulary, and teachers.math.transfer.what = 'top_k'
       with k = 8 sends few ids; set objective.terms.0.top_k to 8 or less
teachers.math.transfer.what=top_k
objective.terms=[{top_k: 8}]
    -> teachers.math.transfer.k is required with teachers.math.transfer.what = 'top_k'
teachers.math.transfer={what: top_k, k: 8}
objective.terms=[{top_k: 8}, {top_k: 9, teachers: [math, law]}, {top_k: 9, teacher: law}]
    -> objective.terms.1.top_k = 9: more than the 8 ids of teachers.math.transfer.k
teachers.math.transfer={what: top_k, k: 8}
objective.terms=[{top_k: 8}, {top_k: 8, teachers: [math, law], mixture: geometric}]
    -> objective.terms.1.mixture = 'geometric': its normaliser is a sum over the whole vocabulary,
       of which teachers.math.transfer.k gives some ids
teachers.math.transfer={what: top_k, k: 8}
teachers.code.transfer={what: top_k, k: 8}
objective.terms=[{top_k: 8}, {top_k: 8, teachers: [math, code]}]
    -> objective.terms.1.mixture = 'arithmetic' of teachers.math.transfer.k and
       teachers.code.transfer.k: none has probabilities of another's ids
teachers.math.nodes=1
    -> teachers.math.ranks = 2 and teachers.math.nodes = 1: give only one of the two
teachers.math={sequence_length: 30, parallel: {context: 2}}
objective.terms=[{}, {alignment: uld}]
    -> teachers.math.sequence_length = 30: with teachers.math.parallel.context = 2 and
       teachers.math.parallel.tensor = 1 it must be a multiple of 4
teachers.math={sequence_length: 32, transfer: {what: top_k, k: 8}}
objective.terms=[{}, {alignment: uld}]
    -> objective.terms.1.alignment = 'uld': needs whole distributions, and
       teachers.math.transfer.what = 'top_k' with k = 8 sends a part of them
teachers.code.transfer.backend=nccl
runtime.device=cpu
    -> teachers.code.transfer.backend = 'nccl' needs GPUs, and runtime.device = 'cpu'
"""


CASES = [
    (tree, *case)
    for tree, text in ((TREE, BROKEN), (SEVERAL, OF_SEVERAL))
    for case in read_table(text)
]


@pytest.mark.parametrize(("tree", "overrides", "expected"), CASES)
def test_each_rule_broken_alone(tmp_path, tree, overrides, expected):
    found = complaints(load_tree, tmp_path, tree, *overrides)
    starts = [text[: len(start)] for text, start in zip(found, expected, strict=False)]
    assert (starts, len(found)) == (expected, len(expected))


@pytest.mark.parametrize(
    ("terms", "changes"),
    [
        ("[{}, {alignment: uld}]", ["teachers.math.parallel={tensor: 2, sequence: true}"]),
        ("[{}, {alignment: gold, teacher: math}, {alignment: likelihood}]", []),
        (
            "[{top_k: 8}, {alignment: likelihood}, {alignment: common, top_k: 4}]",
            ["teachers.math.transfer={what: top_k, k: 64}",
             "teachers.code={parallel: {tensor: 2}, transfer: {what: top_k, k: 8}}"],
        ),
    ],
)  # fmt: skip
def test_teachers_of_both_tokenizers_have_ranks_of_their_own(
    tmp_path: Path, terms: str, changes: list[str]
) -> None:
    changes = [*changes, "teachers.math.sequence_length=32", f"objective.terms={terms}"]
    config = load_tree(tmp_path, SEVERAL, *changes)
    given = teacher_ranks(config, ranks_per_node=2)
    check_layout(config, 5, teachers=given)
    assert [has_own_tokenizer(config, role) for role, _ in given] == [False, True]


@pytest.mark.parametrize(
    "mixture", ["arithmetic", "geometric, support: renormalized", "lowest_loss"]
)
def test_each_mixture_takes_a_sent_top_k(tmp_path: Path, mixture: str) -> None:
    term = f"{{top_k: 8, teachers: [math, law], mixture: {mixture}}}"
    changes = (
        "teachers.math.transfer={what: top_k, k: 8}",
        f"objective.terms=[{{top_k: 4}}, {term}]",
    )
    config = load_tree(tmp_path, SEVERAL, *changes)
    assert config.objective.terms[1].mixture == mixture.partition(",")[0]


def test_each_of_several_teachers_must_fit_its_ranks(tmp_path: Path) -> None:
    config = load_tree(tmp_path, SEVERAL, "teachers.math.parallel={tensor: 2}")
    given = teacher_ranks(config, ranks_per_node=2)
    assert given == (("teachers.code", 2), ("teachers.math", 2))
    check_layout(config, 8, teachers=given)
    other = (("teachers.code", 2), ("teachers.math", 3))
    (text,) = complaints(lambda: check_layout(config, 9, teachers=other))
    assert text.startswith("teachers.math.parallel.tensor * teachers.math.parallel.pipeline"), text
    (text,) = complaints(lambda: check_layout(config, 4, teachers=given))
    assert text.startswith(
        "teachers.code.nodes and teachers.math.ranks give the teachers 4 ranks, but the launch has "
        "4 processes in all, and the student needs at least one"
    ), text


def test_memory_shared_with_a_student_has_no_effect_on_ranks_of_its_own(tmp_path: Path) -> None:
    changes = ("teachers.math.offload=true", "teachers.law.steps_ahead=3")
    assert load_tree(tmp_path, SEVERAL, *changes) == load_tree(tmp_path, SEVERAL)

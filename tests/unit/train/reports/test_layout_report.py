"""The division of a launch in words, where layers of the teacher are sent too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_distill.config import RunConfig, check_layout, teacher_ranks
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.flops import head_flops_per_token, step_flops_per_token
from megatron_distill.train.reports.layout_report import layout_report
from tests.support.sample_configs import ARCHITECTURE, MINIMAL, TAUGHT, load_tree

TREE = TAUGHT | {"teacher": {**TAUGHT["teacher"], "ranks": 2, "parallel": {"pipeline": 2}}}


def test_layers_have_routes_and_slots_on_their_stages(tmp_path: Path) -> None:
    features = "objective.features=[{match: uniform, loss: cosine}]"
    sizes = ("train.global_batch_size=8", "train.micro_batch_size=2", "data.sequence_length=32")
    layers = ("student.architecture.num_layers=2", "teacher.architecture.num_layers=4")
    config = load_tree(tmp_path, TREE, "parallel.pipeline=2", features, *sizes, *layers)
    text = layout_report(config, ranks=4, teachers=(("teacher", 2),))
    width = config.models["teacher"].architecture.hidden_size * 4
    assert f"layer 2 of the teacher: from its stage 0 to the student's stage 0, {width:,}" in text
    assert f"layer 4 of the teacher: from its stage 1 to the student's stage 1, {width:,}" in text
    assert "teacher.0 to student.0" in text
    assert "teacher.0 to student.1" not in text
    # A layer on the first stage; a layer and the last hidden state on the last one.
    step = 8 * 32 * width
    assert f"answers: {3 * step / 1e3:.3g} kB per step" in text, text
    assert f"slots: {2 * step / 1e3:.3g} kB on each rank of the student's stage 0" in text
    assert f"slots: {4 * step / 1e3:.3g} kB on each rank of the student's last stage" in text


def test_every_world_of_several_teachers_has_its_ranks_and_answers(tmp_path: Path) -> None:
    shape = {"architecture": ARCHITECTURE}
    teachers = {
        "math": {**shape, "ranks": 2, "parallel": {"tensor": 2}},
        "code": {**shape, "ranks": 1},
    }
    tree = MINIMAL | {
        "teachers": {**teachers, "law": shape},
        "objective": {
            "routing_weights": {"law": 1, "code": 1},
            "terms": [{"divergence": "forward_kl"}, {"teacher": "math", "weight": 0.5}],
        },
    }
    config = load_tree(tmp_path, tree)
    ranks = (("teachers.code", 1), ("teachers.math", 2))
    lines = layout_report(config, ranks=5, teachers=ranks).splitlines()
    assert lines[1].startswith("student: 2 ranks = tensor 1 x context 1 x pipeline 1 x data 2")
    assert lines[4].startswith("teachers.code: 1 rank = tensor 1"), lines
    assert " ".join(lines[5].split()) == "teachers.code.0 (rank 2): replica 0, stage 0"
    assert lines[6].startswith("teachers.math: 2 ranks = tensor 2")
    own = "teachers.math.0 to teachers.math.1 (rank 3 to 4): replica 0, stage 0"
    assert " ".join(lines[7].split()) == own
    step = 4 * 64 * ARCHITECTURE["hidden_size"] * 4 / 1e3
    # A term names `math`, which runs on every sample; the samples of `code` are routed.
    (code, math) = [line for line in lines if line.startswith("answers of ")]
    assert code.startswith(f"answers of teachers.code: at most {step:.3g} kB per step, "), code
    assert math.startswith(f"answers of teachers.math: {step:.3g} kB per step, "), math
    assert "  teachers.code.0 to student.1: at most " in "\n".join(lines)
    weights = [line.split(":")[0] for line in lines if line.startswith("weights of ")]
    assert weights == [f"weights of teachers.{name}" for name in ("code", "law", "math")]
    # The student's two ranks also run `law`, and the heads of the teachers elsewhere.
    shape = Architecture.from_dict(config.models["student"].architecture.resolved(64, 512))
    flops, head = (
        step_flops_per_token(shape, shape, sequence_length=64),
        head_flops_per_token(shape),
    )
    forward = flops.teacher_forward
    student = flops.student_forward + flops.student_backward + forward + 2 * head
    at = lines.index("balance, with every teacher on every sample:")
    of_code, of_math = lines[at + 1 : at + 3]
    waits = "the student's step takes {:.2f} times the other's: {} waits for the student"
    assert waits.format(student / 2 / (forward - head), "teachers.code") in of_code, of_code
    assert waits.format(student / (forward - head), "teachers.math") in of_math, of_math
    assert of_code.endswith(f"; balanced on {2 * (forward - head) / student:.1f} ranks"), of_code
    # A tall one is too slow for one rank, but not with some of the samples.
    tall = load_tree(tmp_path, tree, "teachers.code.architecture.num_layers=60")
    (line,) = [
        line
        for line in layout_report(tall, ranks=5, teachers=ranks).splitlines()
        if line.startswith("  1 of teachers.code and 2 of the student; ")
    ]
    found = re.search(r"balanced on ([\d.]+) ranks, or here with (\d+)% of the samples$", line)
    assert found is not None, line
    assert "the student waits for teachers.code" in line
    assert float(found[1]) * int(found[2]) == pytest.approx(100, rel=0.05)


SENT = ("teacher.transfer={what: top_k, k: 8}", "objective.terms=[{top_k: 8}]")
# What moves, in words and in bytes per token.
OUTPUTS = {
    (): ("hidden states", ARCHITECTURE["hidden_size"] * 4),
    SENT: ("the 8 most probable ids", 8 * 8 + 16),
}


@pytest.mark.parametrize("given", OUTPUTS, ids=["hidden states", "top-k"])
def test_a_layout_on_the_same_ranks_has_routes_and_their_bytes(
    tmp_path: Path, given: tuple[str, ...]
) -> None:
    # Each rank trains on whole sequences; of each the teacher has one half on the other rank.
    config = load_tree(tmp_path, TAUGHT, "teacher.parallel={context: 2}", *given)
    lines = layout_report(config, ranks=2, teachers=()).splitlines()
    what, width = OUTPUTS[given]
    moved = config.train.global_batch_size * 64 // 2 * width
    (at,) = [index for index, line in enumerate(lines) if line.startswith("movement of teacher: ")]
    assert f": {moved / 1e3:.3g} kB of {what} per step" in lines[at], lines[at]
    assert f", {width:,} bytes per token of another rank" in lines[at]
    assert lines[at + 1 : at + 3] == [
        f"  rank {one} to rank {1 - one}: {moved / 2e3:.3g} kB per step" for one in (0, 1)
    ]
    same = load_tree(tmp_path, TAUGHT)
    assert "movement" not in layout_report(same, ranks=2, teachers=())


# A teacher whose work is about twice the student's, and a batch of 32 sequences.
LARGE = ("teacher.architecture.num_layers=24", "train.global_batch_size=32")
EXPERTS = "teacher.architecture.moe={num_experts: 8, top_k: 2, ffn_hidden_size: 128}"
BEST = re.compile(r"best division: teacher\.(ranks|nodes)=(\d+), ([\d.]+) times")


def _report(config: RunConfig, ranks: int, per_node: int) -> str:
    teachers = teacher_ranks(config, ranks_per_node=per_node)
    check_layout(config, ranks, teachers=teachers)
    return layout_report(config, ranks=ranks, teachers=teachers)


@pytest.mark.parametrize(
    "own",
    [
        (),
        ("teacher.ranks=8",),
        ("teacher.nodes=2",),
        ("teacher.ranks=8", "teacher.parallel={expert: 4}", EXPERTS),
        ("teacher.ranks=8", "teacher.parallel={tensor: 2}", "parallel.tensor=2"),
    ],
)
@pytest.mark.parametrize("ranks", [12, 24])
def test_the_best_division_is_one_that_starts(
    tmp_path: Path, own: tuple[str, ...], ranks: int
) -> None:
    """Sequences of the batch are divided among the student's ranks, experts among the teacher's."""
    config = load_tree(tmp_path, TAUGHT, *LARGE, *own)
    text = _report(config, ranks, 4) if own else layout_report(config, ranks=ranks, teachers=())
    found = BEST.search(text)
    assert found is not None, text
    key, number = found[1], int(found[2])
    changed = load_tree(tmp_path, TAUGHT, *LARGE, *own, f"teacher.{key}={number}")
    assert BEST.search(_report(changed, ranks, 4)) is not None
    assert (key == "nodes") == ("teacher.nodes=2" in own)


@pytest.mark.parametrize(
    ("given", "of_student", "of_teacher"),
    [
        ((), 1, -1),
        (SENT, 0, 0),
        (("objective.terms=[]", "objective.features=[{match: last}]"), 0, -1),
    ],
)
def test_the_balance_counts_the_teachers_head_where_it_runs(
    tmp_path: Path, given: tuple[str, ...], of_student: int, of_teacher: int
) -> None:
    config = load_tree(tmp_path, TAUGHT, "teacher.ranks=1", *given)
    text = _report(config, 2, 2)
    shapes = (
        Architecture.from_dict(config.models[role].architecture.resolved(64, 512))
        for role in ("student", "teacher")
    )
    student, teacher = shapes
    flops = step_flops_per_token(student, teacher, sequence_length=64)
    head = head_flops_per_token(teacher)
    sides = (
        flops.student_forward + flops.student_backward + of_student * head,
        flops.teacher_forward + of_teacher * head,
    )
    assert f"the student's step takes {sides[0] / sides[1]:.2f} times the other's" in text, text
    assert ("the teacher's head runs on the student's" in text) == bool(of_student)
    assert f"teacher's share is {2 * sides[1] / sum(sides):.1f}; " in text


def test_a_vocabulary_that_is_not_known_is_named(tmp_path: Path) -> None:
    known = load_tree(tmp_path, TAUGHT)  # its tokenizer will have 512 tokens
    sizes = [f"{role}.architecture.vocab_size" for role in ("student", "teacher")]
    given = load_tree(tmp_path, TAUGHT, *(f"{key}=512" for key in sizes))
    text = layout_report(known, ranks=2, teachers=())
    assert text == layout_report(given, ranks=2, teachers=())
    assert "Assumed" not in text
    unknown = load_tree(tmp_path, TAUGHT, "data.tokenizer={path: x, train_vocab_size: null}")
    last = layout_report(unknown, ranks=2, teachers=()).splitlines()[-1]
    assert last.startswith("Assumed: a vocabulary of 32,768 rows"), last
    assert last.endswith(f"set {' and '.join(sizes)}")


def test_a_large_launch_fits_a_screen(tmp_path: Path) -> None:
    given = ("teacher.ranks=192", "teacher.parallel={tensor: 4}", "train.global_batch_size=256")
    text = _report(load_tree(tmp_path, TAUGHT, *given), 256, 8)
    lines = text.splitlines()
    assert len(lines) < 60, text
    assert lines[10].split() == ["...", "55", "more", "in", "this", "order", "..."]
    assert lines[11].split()[:3] == ["student.63", "(rank", "63):"]
    assert lines[22].split()[:5] == ["teacher.188", "to", "teacher.191", "(rank", "252"]
    (routes,) = [index for index, line in enumerate(lines) if line.startswith("answers: ")]
    assert lines[routes + 1].startswith("  teacher.0 to student.0: ")
    assert lines[routes + 10].startswith("  teacher.")
    # 64 replicas of the student get their units from 48 of the teacher.
    plan = (line for line in lines[routes:] if line.startswith("  ... "))
    assert int(next(plan).split()[1]) > 40

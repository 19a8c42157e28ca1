"""The division of a launch in words, where layers of the teacher are sent too."""

from __future__ import annotations

from pathlib import Path

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

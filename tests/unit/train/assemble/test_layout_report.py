"""The division of a launch in words, where layers of the teacher are sent too."""

from __future__ import annotations

from pathlib import Path

from megatron_distill.train.assemble.layout_report import layout_report
from tests.support.sample_configs import TAUGHT, load_tree

TREE = TAUGHT | {"teacher": {**TAUGHT["teacher"], "ranks": 2, "parallel": {"pipeline": 2}}}


def test_layers_have_routes_and_slots_on_their_stages(tmp_path: Path) -> None:
    features = "objective.features=[{match: uniform, loss: cosine}]"
    sizes = ("train.global_batch_size=8", "train.micro_batch_size=2", "data.sequence_length=32")
    layers = ("student.architecture.num_layers=2", "teacher.architecture.num_layers=4")
    config = load_tree(tmp_path, TREE, "parallel.pipeline=2", features, *sizes, *layers)
    text = layout_report(config, ranks=4, teachers=2)
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

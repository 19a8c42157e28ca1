"""`calibrate --run`: a device refined by a run predicts the phases that the run measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.cli import main
from megatron_distill.config import load_config
from megatron_distill.planning.device import load_device, write_device
from megatron_distill.planning.parameters import stage_numbers
from megatron_distill.planning.refine import read_steps, refined_for
from megatron_distill.planning.step_time import phase_seconds
from megatron_distill.train.reports.planned_run import configured_choice, open_shapes, planned_run
from tests.distributed.pool import Pool
from tests.e2e.runs import COMMON, STUDENT, Inputs, run
from tests.e2e.teachers.test_several_teachers import teachers_section

RANKS = 2
# About the rates of a core, so that no phase is too short to be compared.
CORE = {
    "kind": "cpu",
    "cores": RANKS,
    "peak_tflops": {"fp32": 0.05, "bf16": 0.05},
    "memory_gb_per_s": 10.0,
    "kernel_us": 5.0,
    "logit_ns": {"fp32": 1.0},
}


@pytest.mark.slow
def test_a_run_with_several_teachers_refines_a_device(
    pool: Pool, inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = COMMON.format(
        corpus=inputs.corpus,
        tokenizer=inputs.tokenizer,
        steps=7,
        terms="    - {divergence: forward_kl}\n"
        "    - {divergence: forward_kl, weight: 0.2, teacher: law}",
    ).replace("objective:\n", "objective:\n  routing_weights: {code: 1, math: 3}\n")
    config, output = tmp_path / "several.yaml", tmp_path / "run"
    config.write_text(STUDENT + teachers_section() + common)
    run(pool, RANKS, config, output)
    core, file = tmp_path / "core.yaml", tmp_path / "refined.yaml"
    write_device(load_device("l40s").model_copy(update=CORE), core)
    words = ["calibrate", "--run", str(output), "--device", str(core), "--output", str(file)]
    assert main(words) == 0
    text = capsys.readouterr().out
    # The log has the number of devices by the operations alone, and these by the tokenizer's size.
    assert f" on {RANKS} devices; factors:" in text
    trained = load_config(output / "config.yaml", [])
    roles = ("student", *(f"teachers.{name}" for name in ("code", "law", "math")))
    planned = planned_run(trained, open_shapes(trained, rows=dict.fromkeys(roles, 301)))
    assert [(one.name, one.share) for one in planned.several] == [
        ("code", 0.25), ("law", 1.0), ("math", 0.75)
    ]  # fmt: skip
    choice = configured_choice(trained, planned, ranks=RANKS, teachers=0)
    numbers = stage_numbers(planned.student, choice.layout, choice.layers)
    device = refined_for(load_device(str(file)).shared_by(RANKS), planned, choice)
    predicted = phase_seconds(planned, choice, device, numbers)
    measured = read_steps(output / "metrics.jsonl")
    for phase in ("teacher", "forward", "backward"):
        assert predicted[phase] == pytest.approx(measured.phases[phase], rel=1e-3)

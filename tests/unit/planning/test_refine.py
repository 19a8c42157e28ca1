"""A run's log as a correction of a device: afterwards its phases are predicted as measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_distill.errors import DataError
from megatron_distill.planning.device import DeviceProfile, load_device
from megatron_distill.planning.parameters import stage_numbers
from megatron_distill.planning.refine import (
    MeasuredSteps,
    Sample,
    lower_quartile,
    read_steps,
    refined,
    refined_by_steps,
    refined_for,
    with_layer_seconds,
    with_logit_rate,
)
from megatron_distill.planning.run import Choice, ChunkLoss, PlannedRun
from megatron_distill.planning.step_time import phase_seconds, step_time
from megatron_distill.runtime.groups import Layout
from tests.unit.planning.shapes import STUDENT, TEACHER, llama, run_of

DEVICE = load_device("h100-80gb")
RUN = run_of(teacher=TEACHER)
CHOICE = Choice(
    layout=Layout(8),
    ranks=64,
    micro_batch_size=1,
    layers=(32,),
    place="shared",
    teacher_layout=Layout(8),
    teacher_layers=(80,),
)
NUMBERS = stage_numbers(STUDENT, CHOICE.layout, CHOICE.layers)
SPEED = {"teacher": 1.3, "forward": 0.8, "loss": 2.0, "backward": 1.1, "optimizer": 1.5}


def log(path: Path, steps: int, **changes: float) -> Path:
    predicted = phase_seconds(RUN, CHOICE, DEVICE, NUMBERS)
    timers = {phase: 1e3 * seconds * SPEED.get(phase, 1.0) for phase, seconds in predicted.items()}
    total = sum(timers.values()) / 1e3
    record = {
        "step_seconds": total,
        "timers": timers,
        "tokens_per_second": RUN.tokens / total,
        "tflops_per_device": 2.0 * RUN.tokens / total / 64 / 1e12,
        **changes,
    }
    slow = {**record, "timers": {phase: 9 * time for phase, time in timers.items()}}
    lines = [json.dumps(slow if step < 3 else record) for step in range(steps)]
    path.write_text("\n".join([*lines, '{"step": 7, "tim']), encoding="utf-8")
    return path


def test_the_refined_device_predicts_the_measured_phases(tmp_path: Path) -> None:
    measured = read_steps(log(tmp_path / "metrics.jsonl", 9))
    assert measured.count == 6
    device = refined_for(refined(DEVICE, RUN, CHOICE, measured, shared_by=64), RUN, CHOICE)
    assert device.factors["teacher"] == pytest.approx(1.3, rel=1e-3)
    after = phase_seconds(RUN, CHOICE, device, NUMBERS)
    for phase in ("teacher", "forward", "loss", "backward"):
        assert after[phase] == pytest.approx(measured.phases[phase], rel=1e-3)  # type: ignore[index,literal-required]
    before = step_time(RUN, CHOICE, DEVICE, NUMBERS).total
    now = step_time(RUN, CHOICE, device, NUMBERS).total
    assert abs(now - measured.step) < abs(before - measured.step)
    assert now == pytest.approx(measured.step, rel=0.01)


def test_a_run_of_a_cpu_refines_runs_like_it_and_a_second_run_further_ones() -> None:
    fields = DEVICE.model_dump() | {"kind": "cpu", "cores": 2, "kernel_us": 5.0}
    calibrated = {"one rank": {"fp32": {"loss": 1.25}}}
    cpu = DeviceProfile.model_validate(fields | {"step_factors": calibrated})
    run = run_of(llama(4, 256, 704, 8, 4, vocab_size=32_768), precision="fp32")
    numbers = stage_numbers(run.student, Layout(), (4,))
    one = Choice(layout=Layout(), ranks=1, micro_batch_size=1, layers=(4,), place="none")
    two = Choice(layout=Layout(), ranks=2, micro_batch_size=1, layers=(4,), place="none")

    def measured(choice: Choice, speed: float) -> MeasuredSteps:
        predicted = phase_seconds(run, choice, cpu.shared_by(choice.ranks), numbers)
        phases = {phase: speed * seconds for phase, seconds in predicted.items()}
        return MeasuredSteps(phases, sum(phases.values()), 1, 1.0, 1.0)

    first = refined(cpu, run, one, measured(one, 1.5), shared_by=1)
    both = refined(first, run, two, measured(two, 1.2), shared_by=2)
    again = refined(both, run, one, measured(one, 1.8), shared_by=1)
    for device, alone, beside in ((first, 1.5, 1.0), (both, 1.5, 1.2), (again, 1.8, 1.2)):
        for choice, speed in ((one, alone), (two, beside)):
            shared = refined_for(device.shared_by(choice.ranks), run, choice)
            now = phase_seconds(run, choice, shared, numbers)
            wanted = measured(choice, speed).phases
            assert now["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
            assert now["backward"] == pytest.approx(wanted["backward"], rel=1e-3)
    assert len(again.runs) == 2
    assert again.step_factors == calibrated


def test_steps_of_one_sharing_leave_the_factors_of_another_as_they_are() -> None:
    """In either order, and again: a factor is a ratio of times of its own sharing."""
    cpu = DeviceProfile.model_validate(DEVICE.model_dump() | {"kind": "cpu", "cores": 2})
    run = run_of(llama(4, 256, 704, 8, 4, vocab_size=32_768), precision="bf16")
    numbers = stage_numbers(run.student, Layout(), (4,))
    found = []
    for order in ((1, 2), (2, 1), (1, 2, 1, 2)):
        device = cpu
        for ranks in order:
            choice = Choice(
                layout=Layout(), ranks=ranks, micro_batch_size=1, layers=(4,), place="none"
            )
            phases = phase_seconds(run, choice, cpu.shared_by(ranks), numbers)
            speed = 0.5 + ranks / 8
            own = {phase: speed * seconds for phase, seconds in phases.items()}
            measured = MeasuredSteps(own, sum(own.values()), 1, 1.0, 1.0)
            device = refined_by_steps(device, Sample(run, choice, measured), shared_by=ranks)
        found.append(device.step_factors)
    assert found[0] == found[1] == found[2]
    assert found[0]["one rank"]["bf16"]["loss"] == pytest.approx(0.625, rel=1e-3)
    assert found[0]["several ranks"]["bf16"]["loss"] == pytest.approx(0.75, rel=1e-3)


@pytest.mark.parametrize(
    ("ranks", "threads", "sharing"),
    [(1, 2, "one rank"), (2, 1, "several ranks"), (1, 1, "idle cores")],
)
@pytest.mark.parametrize("added", [0.0, 300.0], ids=["work alone", "each layer"])
def test_steps_of_two_sizes_tell_a_layer_s_own_time_from_its_work(
    added: float, ranks: int, threads: int, sharing: Any
) -> None:
    """The rates of a machine of known factors, found again, plan a run of another size."""
    fields = DEVICE.model_dump() | {"kind": "cpu", "cores": 2, "kernel_us": 2.0}
    cpu = DeviceProfile.model_validate(fields)
    factors = {"teacher": 1.25, "forward": 1.5, "backward": 0.75, "loss": 1.1}
    more = {"teacher": added, "forward": 2 * added, "backward": added / 2}
    own = {"step_factors": {sharing: {"fp32": factors}}, "layer_us": {sharing: more}}
    if not added:
        own["layer_us"] = {sharing: {}}
    truth = DeviceProfile.model_validate(fields | own)
    layout = Layout()

    def seconds(device: DeviceProfile, hidden: int) -> tuple[PlannedRun, Choice, dict[Any, float]]:
        shape = llama(4, hidden, 3 * hidden, 8, 4, vocab_size=4096)
        run = run_of(shape, teacher=shape, sequence_length=512, precision="fp32",
                     global_batch_size=ranks)  # fmt: skip
        choice = Choice(
            layout=layout, ranks=ranks, micro_batch_size=1, layers=(4,), place="shared",
            teacher_layout=layout, teacher_layers=(4,),
        )  # fmt: skip
        shared = device.shared_by(ranks, threads=threads)
        numbers = stage_numbers(shape, layout, (4,))
        return run, choice, phase_seconds(run, choice, shared, numbers)

    large, small = (
        Sample(run, choice, MeasuredSteps(phases, sum(phases.values()), 1, 1.0, 1.0))
        for run, choice, phases in (seconds(truth, hidden) for hidden in (512, 256))
    )

    def refined_again(device: DeviceProfile) -> DeviceProfile:
        device = with_layer_seconds(device, large, small, shared_by=ranks, threads=threads)
        return refined_by_steps(device, large, shared_by=ranks, threads=threads)

    found = refined_again(cpu)
    for phase, us in more.items():
        assert found.layer_us[sharing].get(phase, 0.0) == pytest.approx(us, rel=1e-2, abs=1), phase  # type: ignore[call-overload]
    *_, expected = seconds(truth, 128)
    *_, planned = seconds(found, 128)
    for phase in ("teacher", "forward", "backward", "loss"):
        assert planned[phase] == pytest.approx(expected[phase], rel=1e-2), phase
    # Measured again, nothing of the first time is left in it.
    again = refined_again(found)
    assert (again.layer_us, again.step_factors) == (found.layer_us, found.step_factors)


@pytest.mark.parametrize(("hidden", "part"), [(320, 1.0), (160, 1.0), (80, 0.5), (20, 0.125)])
def test_a_small_layer_takes_its_share_of_the_time_of_any_layer(hidden: int, part: float) -> None:
    """Of states of 384 tokens and so many numbers: `calibrate` measured 160 and 320."""
    fields = DEVICE.model_dump() | {"kind": "cpu", "cores": 1, "kernel_us": 2.0}
    plain = DeviceProfile.model_validate(fields)
    own = {"layer_us": {"one rank": {"forward": 300.0, "backward": 900.0}}}
    measured = DeviceProfile.model_validate(fields | own)
    shape = llama(4, hidden, 3 * hidden, 4, 4, vocab_size=4096)
    run = run_of(shape, sequence_length=384, precision="fp32", global_batch_size=1)
    choice = Choice(layout=Layout(), ranks=1, micro_batch_size=1, layers=(4,), place="none")
    numbers = stage_numbers(shape, Layout(), (4,))
    before, after = (
        phase_seconds(run, choice, one.shared_by(1), numbers) for one in (plain, measured)
    )
    for phase, us in (("forward", 300.0), ("backward", 900.0)):
        added = after[phase] - before[phase]  # type: ignore[index]
        assert added == pytest.approx(4 * us * 1e-6 * part, rel=1e-6), phase


@pytest.mark.parametrize(
    ("ranks", "threads", "sharing"),
    [(1, 1, "idle cores"), (1, 2, "one rank"), (2, 1, "several ranks")],
)
@pytest.mark.parametrize("layer_us", [0.0, 900.0], ids=["calls alone", "evicted calls"])
def test_the_losses_of_steps_have_the_rate_of_a_logit(
    layer_us: float, ranks: int, threads: int, sharing: str
) -> None:
    """In rows that are aliased and others, whatever rates and factors were known before."""
    fields = DEVICE.model_dump() | {"kind": "cpu", "cores": 2, "kernel_us": 2.0}
    if layer_us:
        fields["layer_us"] = {sharing: {"forward": layer_us}}
    rates = {"logit_ns": {"fp32": 4.0, "bf16": 6.0}, "aliased_logit_ns": {"fp32": 5.0}}
    truth = DeviceProfile.model_validate(fields | rates)
    before = {"logit_ns": {"bf16": 6.0}, "step_factors": {"one rank": {"fp32": {"loss": 3.0}}}}
    device = DeviceProfile.model_validate(fields | before)

    def sample(vocabulary: int, speed: float = 1.0) -> Sample:
        shape = llama(4, 256, 704, 8, 4, vocab_size=vocabulary)
        run = run_of(shape, teacher=shape, sequence_length=512, precision="fp32",
                     global_batch_size=ranks)  # fmt: skip
        choice = Choice(
            layout=Layout(), ranks=ranks, micro_batch_size=1, layers=(4,), place="shared",
            teacher_layout=Layout(), teacher_layers=(4,),
        )  # fmt: skip
        numbers = stage_numbers(shape, Layout(), (4,))
        phases = phase_seconds(run, choice, truth.shared_by(ranks, threads=threads), numbers)
        taken = {phase: speed * seconds for phase, seconds in phases.items()}
        return Sample(run, choice, MeasuredSteps(taken, sum(taken.values()), 1, 1.0, 1.0))

    for vocabulary in (20_480, 32_768):
        device = with_logit_rate(device, sample(vocabulary), shared_by=ranks, threads=threads)
    assert device.logit_ns == pytest.approx(rates["logit_ns"], rel=1e-6)
    assert device.aliased_logit_ns == pytest.approx(rates["aliased_logit_ns"], rel=1e-6)
    refined = refined_by_steps(device, sample(20_480), shared_by=ranks, threads=threads)
    loss = refined.step_factors[sharing]["fp32"]["loss"]  # type: ignore[index]
    assert loss == pytest.approx(1.0, abs=1e-4)
    # Losses shorter than their products have a rate too.
    fast = with_logit_rate(device, sample(20_480, 0.01), shared_by=ranks, threads=threads)
    assert 0 < fast.logit_ns["fp32"] < 0.1


def test_steps_are_counted_after_the_first_ones_by_the_value_that_is_asked_for(
    tmp_path: Path,
) -> None:
    path = log(tmp_path / "metrics.jsonl", 9)
    records = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
    for number, record in enumerate(records):
        record["step_seconds"] = [9.0, 4.0, 1.0, 1.2, 1.1, 8.0, 1.3, 1.4, 1.5][number]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read_steps(path).step == pytest.approx(1.35)
    assert read_steps(path, warm=1).step == pytest.approx(1.35)
    assert read_steps(path, warm=2, middle=lower_quartile).step == pytest.approx(1.15)
    path.write_text("".join(json.dumps(record) + "\n" for record in records[:3]))
    assert read_steps(path, warm=1, middle=lower_quartile).step == pytest.approx(1.75)


def test_the_first_steps_of_each_of_equal_runs_are_not_counted(tmp_path: Path) -> None:
    paths = [log(tmp_path / f"{number}.jsonl", 9) for number in range(2)]
    for path, steps in zip(paths, ([9.0, 4.0, 3.0], [8.0, 1.0, 2.0]), strict=True):
        records = [json.loads(line) for line in path.read_text().splitlines()[:3]]
        changed = [
            record | {"step_seconds": own} for record, own in zip(records, steps, strict=True)
        ]
        path.write_text("".join(json.dumps(record) + "\n" for record in changed))
    found = read_steps(*paths, warm=1)
    assert (found.count, found.step) == (4, pytest.approx(2.5))
    assert read_steps(*paths, warm=1, middle=lower_quartile).step == pytest.approx(1.75)
    with pytest.raises(DataError, match=r"1\.jsonl: has no step"):
        read_steps(paths[0], log(tmp_path / "1.jsonl", 2), warm=2)


NEAR = {"sequence_length": 2400, "num_layers": 38, "vocab_size": 150_000}
FAR = {"sequence_length": 2600, "num_layers": 41, "vocab_size": 164_000}


def changed(key: str, value: int) -> PlannedRun:
    """A run over short sequences, with one size changed."""
    run = run_of(teacher=TEACHER, sequence_length=2048)
    if key == "sequence_length":
        return replace(run, sequence_length=value)
    return replace(run, student=replace(STUDENT, **{key: value}))


def test_factors_hold_for_runs_whose_work_differs_by_a_quarter_at_most() -> None:
    run = changed("sequence_length", 2048)
    phases = phase_seconds(run, CHOICE, DEVICE, NUMBERS)
    measured = MeasuredSteps({key: 1.5 * time for key, time in phases.items()}, 1e-9, 1, 1.0, 1.0)
    device = refined(DEVICE, run, CHOICE, measured, shared_by=64)
    assert refined_for(device, run, CHOICE).factors["loss"] == 1.5
    for key in NEAR:
        assert refined_for(device, changed(key, NEAR[key]), CHOICE).factors["loss"] == 1.5, key
        assert not refined_for(device, changed(key, FAR[key]), CHOICE).factors, key
    # The positions that a token attends to are those of its document.
    assert refined_for(device, replace(run, document_length=1700), CHOICE).factors
    assert not refined_for(device, replace(run, document_length=1500), CHOICE).factors


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp32"},
        {"teacher": None},
        {"losses": ("forward_kl top-k 64 tail",)},
        {"chunk_losses": (ChunkLoss("uld"),)},
        {"measures": "gradients"},
        {"student_fp8": True},
        {"teacher_fp8": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_factors_do_not_hold_for_runs_that_compute_something_else(changes: Any) -> None:
    device = DEVICE.model_copy(update={"runs": refined_by(1.5).runs})
    assert refined_for(device, RUN, CHOICE).factors
    assert not refined_for(device, replace(RUN, **changes), CHOICE).factors


def test_factors_of_a_gpu_hold_for_the_measured_layout_and_place_of_the_teacher() -> None:
    device = refined_by(1.5)
    for other in (
        replace(CHOICE, layout=Layout(4)),
        replace(CHOICE, teacher_layout=Layout(4)),
        replace(CHOICE, place="own ranks"),
        None,
    ):
        assert not refined_for(device, RUN, other).factors
    more = replace(CHOICE, ranks=128)
    assert refined_for(device, RUN, more).factors


def refined_by(speed: float, length: int = 8192, device: DeviceProfile = DEVICE) -> DeviceProfile:
    """The device after a run that took `speed` times of the predicted phases."""
    run = replace(RUN, sequence_length=length)
    phases = phase_seconds(run, CHOICE, DEVICE, NUMBERS)
    measured = MeasuredSteps({key: speed * time for key, time in phases.items()}, 1e-9, 1, 1.0, 1.0)
    return refined(device, run, CHOICE, measured, shared_by=64)


def test_the_nearest_run_counts_and_is_the_one_that_is_replaced() -> None:
    """Of lengths each like the next, the first is not like the last."""
    short, between, long = 8192, 9600, 11_000

    def factor(device: DeviceProfile, length: int) -> float | None:
        run = replace(RUN, sequence_length=length)
        return refined_for(device, run, CHOICE).factors.get("loss")

    both = refined_by(1.2, short, refined_by(1.5, long))
    assert [factor(both, length) for length in (short, 9000, 10_200, long)] == [1.2, 1.2, 1.5, 1.5]
    third = refined_by(1.3, between, both)
    assert [factor(third, length) for length in (short, between, long)] == [1.2, 1.3, 1.3]
    assert len(third.runs) == 2
    assert len(refined_by(1.4, between, third).runs) == 2


def test_factors_of_a_file_stay_for_runs_unlike_the_measured_one() -> None:
    given = DEVICE.model_copy(update={"factors": {"loss": 3.0, "communication": 2.0}})
    device = refined_by(1.5, device=given)
    assert device.factors == given.factors
    now = refined_for(device, RUN, CHOICE).factors
    # Of a predicted time without any factor.
    assert now["loss"] == 1.5
    assert refined_for(device, changed("sequence_length", 2048), CHOICE).factors == given.factors


def test_weights_that_no_pass_hides_are_gathered_in_the_optimizer_s_phase() -> None:
    plain, hidden = (
        run_of(teacher=TEACHER, overlaps_parameters=overlaps) for overlaps in (False, True)
    )
    choice = replace(CHOICE, layout=Layout(), teacher_layout=Layout())
    numbers = stage_numbers(STUDENT, choice.layout, choice.layers)
    for run in (plain, hidden):
        time = step_time(run, choice, DEVICE, numbers)
        phases = phase_seconds(run, choice, DEVICE, numbers)
        assert sum(phases.values()) == pytest.approx(time.total - time.data, rel=1e-6)
        gathered = phases["optimizer"] - time.optimizer
        assert (gathered > 0.0) == (run is plain)
        assert phases["communication"] + gathered == pytest.approx(time.data_parallel, rel=1e-6)


def test_the_log_has_the_number_of_devices(tmp_path: Path) -> None:
    assert read_steps(log(tmp_path / "metrics.jsonl", 9)).devices(2.0) == 64


def test_a_log_without_steps_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="metrics.jsonl: has no step"):
        read_steps(log(tmp_path / "metrics.jsonl", 3))

"""Devices as files: each shipped one is complete, a wrong one is an error that names the key."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import yaml

from megatron_distill.commands import calibration_steps
from megatron_distill.errors import ConfigError
from megatron_distill.models.architecture import Architecture
from megatron_distill.planning.curves import share
from megatron_distill.planning.device import (
    DeviceProfile,
    Precision,
    device_names,
    load_device,
    write_device,
)
from megatron_distill.planning.end_operations import CALLS_OF_PASSES
from megatron_distill.planning.layers import (
    CALIBRATED_STUDENT,
    CALIBRATED_TEACHER,
    CALIBRATED_TOKENS,
)
from megatron_distill.planning.links import Link, NearMessages
from megatron_distill.planning.run import Choice
from megatron_distill.planning.step_time import student_stages, teacher_stages
from megatron_distill.runtime.layout import Layout
from megatron_distill.train.throughput import peak_flops_per_second
from tests.unit.planning.shapes import choice_of, llama, run_of

NAMES = {
    "a100-80gb": "NVIDIA A100-SXM4-80GB",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "b200": "NVIDIA B200",
    "h100-80gb": "NVIDIA H100 80GB HBM3",
    "h100-80gb-torch": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "l40s": "NVIDIA L40S",
}


def test_the_shipped_devices_are_those_of_the_documentation() -> None:
    assert set(device_names()) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_device_has_its_name_and_the_peak_that_a_run_reports(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    known = peak_flops_per_second(NAMES[name], precision="bf16")
    assert device.peak_tflops["bf16"] * 1e12 == known
    assert device.source
    assert device.date


@pytest.mark.parametrize("name", NAMES)
def test_shares_grow_with_the_size_and_stay_below_one(name: str) -> None:
    device = load_device(name)
    for curve in (device.product_efficiency, device.memory_efficiency):
        sizes, shares = zip(*curve, strict=True)
        assert list(sizes) == sorted(sizes)
        assert list(shares) == sorted(shares)
        assert 0 < shares[0] <= shares[-1] <= 1


def test_a_share_is_linear_in_the_logarithm_of_the_size() -> None:
    curve = ((1.0, 0.2), (100.0, 0.6))
    assert share(curve, 0.5) == 0.2
    assert share(curve, 10.0) == pytest.approx(0.4)
    assert share(curve, 1e6) == 0.6


def test_a_device_survives_its_file(tmp_path: Path) -> None:
    device = load_device("h200").model_copy(update={"factors": {"loss": 1.25}})
    write_device(device, tmp_path / "mine.yaml")
    assert load_device(str(tmp_path / "mine.yaml")) == device
    assert load_device(str(tmp_path / "mine")) == device


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("memory: 80", "memory: Extra inputs are not permitted; correct"),
        ("[", "not valid YAML"),
        ("memory_gib: -1", "memory_gib: Input should be greater than 0, but is -1"),
        ("memory_gib: .inf", "memory_gib: Input should be a finite number, but is inf"),
        ("memory_gib: .nan", "memory_gib: Input should be a finite number, but is nan"),
        ("reserved_gib: 200", "reserved_gib: must be less than memory_gib, 139.8"),
        ("peak_tflops: {fp8: 10}", "peak_tflops: needs bf16 or fp32"),
        (
            "product_efficiency: [[3, 0.35], [0.3, 0.1]]",
            "product_efficiency: the sizes, first of each pair, must ascend, but 0.3 follows 3",
        ),
        ("product_efficiency: [[48, 0.5], [48, 0.6]]", "but 48 follows 48"),
        ("product_efficiency: [[0, 0.1], [3, 0.35]]", "[0, 0.1] must be a size above 0"),
        ("memory_efficiency: [[1, 0.5], [9, 6.5]]", "[9, 6.5] must be a size above 0 and a share"),
        ("memory_efficiency: [[1, 0.0]]", "[1, 0] must be a size above 0 and a share"),
        ("thread_efficiency: [[1, .nan]]", "Input should be a finite number"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_file_and_key(
    tmp_path: Path, change: str, message: str
) -> None:
    path = tmp_path / "mine.yaml"
    write_device(load_device("h200"), path)
    path.write_text(f"{path.read_text()}{change}\n")
    with pytest.raises(ConfigError, match="mine.yaml") as error:
        load_device(str(path))
    assert message in str(error.value)


@pytest.mark.parametrize(("text", "problem"), [("", "is empty"), ("[1, 2]", "has no keys")])
def test_a_file_without_keys_is_an_error_that_says_where_they_are(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"mine.yaml: {problem}.*copy one of them") as error:
        load_device(str(path))
    assert "DeviceProfile" not in str(error.value)


@pytest.mark.parametrize(
    ("known", "run", "wanted"),
    [
        ("fp32", {}, "bf16"),
        ("bf16", {"precision": "fp32"}, "fp32"),
        ("bf16", {"student_fp8": True}, "fp8"),
    ],
)
def test_a_device_without_the_rates_of_a_precision_says_what_to_add(
    known: Precision, run: dict[str, Any], wanted: str
) -> None:
    device = load_device("h200").model_copy(update={"peak_tflops": {known: 100.0}})
    with pytest.raises(ConfigError, match=f"device h200: .* has {known}, .*; add `{wanted}`"):
        student_stages(run_of(**run), choice_of((32,), (32,)), device)


def test_devices_that_compute_fp8_by_transformer_engine_have_its_rate() -> None:
    rated = {name for name in NAMES if "fp8" in load_device(name).peak_tflops}
    assert rated == {"b200", "h100-80gb", "h200", "l40s"}
    assert rated == {name for name in NAMES if load_device(name).transformer_engine}


def test_an_unknown_device_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="a100-40gb, a100-80gb, b200, .*calibrate"):
        load_device("h100-96gb")


def test_ranks_of_a_cpu_share_its_cores() -> None:
    fields = load_device("h200").model_dump() | {"kind": "cpu", "cores": 8}
    rates = {
        "thread_efficiency": [[0.5, 0.75], [50.0, 0.95]],
        "logit_ns": {"fp32": 3.0},
        "choice_ns": {"fp32": 6.0},
    }
    machine = DeviceProfile.model_validate(
        fields | rates | {"product_efficiency": [[0.5, 0.5], [50, 1]]}
    )
    four, sixteen = machine.shared_by(4), machine.shared_by(16)
    peak = machine.peak_tflops["bf16"]
    assert four.peak_tflops["bf16"] == pytest.approx(peak * 2)
    assert four.product_efficiency == ((0.5, 0.5 * 0.75), (50.0, 0.95))
    assert four.memory_gb_per_s == pytest.approx(machine.memory_gb_per_s * 2 * 0.75)
    assert four.logit_ns["fp32"] == pytest.approx(3.0 / (2 * 0.75))
    assert four.choice_ns["fp32"] == pytest.approx(6.0 / (2 * 0.75))
    assert sixteen.peak_tflops["bf16"] == pytest.approx(peak / 2)
    assert sixteen.product_efficiency == machine.product_efficiency
    assert sixteen.memory_gib == machine.memory_gib / 16
    assert load_device("h200").shared_by(8) == load_device("h200")


def test_ranks_of_few_threads_leave_cores_idle() -> None:
    steps = {"one rank": {"fp32": {"loss": 1.5}}, "idle cores": {"fp32": {"loss": 0.75}}}
    fields = load_device("h200").model_dump() | {"kind": "cpu", "cores": 8, "step_factors": steps}
    machine = DeviceProfile.model_validate(fields | {"thread_efficiency": [[0.5, 0.75]]})
    one, three, all_of_two = (
        machine.shared_by(ranks, threads=threads) for ranks, threads in ((1, 1), (2, 3), (2, 4))
    )
    peak = machine.peak_tflops["bf16"]
    assert [each.peak_tflops["bf16"] / peak for each in (one, three, all_of_two)] == [1, 3, 4]
    assert [each.threads for each in (one, three, all_of_two)] == [1, 3, 4]
    assert [each.sharing for each in (one, three)] == ["idle cores"] * 2
    assert one.memory_gb_per_s == machine.memory_gb_per_s
    assert three.memory_gb_per_s == pytest.approx(machine.memory_gb_per_s * 3 * 0.75)
    assert one.memory_gib == machine.memory_gib
    assert one.factor("loss", "fp32") == 0.75
    assert all_of_two == machine.shared_by(2)
    assert machine.shared_by(3, threads=9) == machine.shared_by(3)


def test_gathers_and_scatters_have_measured_costs_beside_that_of_a_sum() -> None:
    link = Link(devices=2, gb_per_s=1.0, efficiency=1.0, latency_us=100.0, gather=2.0, scatter=3.0)
    one = 1e-4
    assert link.summed(1e9, ranks=2) == pytest.approx(one + 1.0)
    assert link.gathered(1e9, ranks=2) == pytest.approx(one + 1.0)
    assert link.scattered(1e9, ranks=2) == pytest.approx(one + 1.5)
    plain = Link(devices=2, gb_per_s=1.0, efficiency=1.0, latency_us=0.0)
    assert plain.gathered(1e9, ranks=4) == plain.scattered(1e9, ranks=4) == pytest.approx(0.75)
    assert plain.summed(1e9, ranks=1) == 0.0


@pytest.mark.parametrize(
    ("after", "latency"),
    [(None, 900.0), (0.0, 300.0), (1e-4, 300.0), (6e-4, 600.0), (1.1e-3, 900.0), (4.4e-3, 1800.0)],
)
def test_messages_that_follow_each_other_closely_take_less(
    after: float | None, latency: float
) -> None:
    """From 0.1 ms of work on they take longer, after 1.1 ms as long as others, then as its root."""
    near = NearMessages(latency_us=300.0, after_us=100.0, far_us=1100.0, gather_wait=1.0)
    link = Link(devices=2, gb_per_s=1.0, efficiency=1.0, latency_us=900.0, near=near)
    for collective in (link.summed, link.gathered, link.scattered):
        of_bytes = collective(1e9, ranks=2) - 900e-6
        took = collective(1e9, ranks=2, after=after)
        assert took - of_bytes == pytest.approx(latency * 1e-6, rel=1e-6)
        assert collective(1e9, ranks=1, after=after) == 0.0


def test_a_gather_after_little_work_waits_for_a_measured_part_of_a_sum_s_time() -> None:
    """Its ranks wait for each other once; after much work all wait for the later rank."""
    near = NearMessages(latency_us=300.0, after_us=100.0, far_us=1100.0, gather_wait=0.6)
    link = Link(devices=2, gb_per_s=1.0, efficiency=1.0, latency_us=900.0, near=near)
    for after, latency in (
        (0.0, 0.6 * 300e-6),
        (6e-4, 0.8 * 600e-6),
        (4.4e-3, 1800e-6),
        (None, 900e-6),
    ):
        assert link.gathered(1e9, ranks=2, after=after) == pytest.approx(latency + 0.5, rel=1e-9)
    before = {"latency_us": 300.0, "after_us": 100.0, "far_us": 1100.0}
    assert NearMessages.model_validate(before).gather_wait == 0.67


@pytest.mark.parametrize(("ranks", "nearer"), [(2, True), (4, False)])
def test_ranks_that_share_a_core_wait_as_long_for_close_messages(ranks: int, nearer: bool) -> None:
    """Two cores: four ranks wait until their peers have one."""
    layout = Layout(tensor=2, sequence=True)
    fields = load_device("h200").model_dump() | {"kind": "cpu", "cores": 2}
    far, near = {"latency_us": 900.0}, {"latency_us": 300.0, "after_us": 100.0, "far_us": 5e6}
    link = fields["node"] | far
    machines = (
        DeviceProfile.model_validate(fields | {"node": {**link, "near": own}}).shared_by(ranks)
        for own in (None, near)
    )
    run = run_of(llama(4, 64, 128, 4, 4, vocab_size=128), sequence_length=128, precision="fp32")
    choice = choice_of((4,), (4,), layout, ranks=ranks, place="none")
    plain, close = (student_stages(run, choice, one)[0].layers.tensor for one in machines)
    assert (close < 0.6 * plain) is nearer
    assert nearer or close == plain


def test_factors_of_steps_are_those_of_who_has_the_cores_and_of_the_precision() -> None:
    steps = {"one rank": {"fp32": {"loss": 1.5}}, "several ranks": {"fp32": {"loss": 1.2}}}
    cpu = load_device("h200").model_dump() | {"kind": "cpu", "cores": 4, "step_factors": steps}
    cpu |= {"score_ns": (2.0, 4.0), "thread_efficiency": [[1.0, 0.5]]}
    machine = DeviceProfile.model_validate(cpu | {"factors": {"loss": 2.0}})
    assert machine.shared_by(1).factor("loss", "fp32") == 3.0
    assert machine.shared_by(2).factor("loss", "fp32") == 2.4
    assert machine.shared_by(1).factor("loss", "bf16") == 2.0
    assert machine.shared_by(1).factor("teacher", "fp32") == 1.0
    # One precision was measured with a rank per core alone.
    steps["several ranks"]["bf16"] = {"loss": 0.5}
    emulated = DeviceProfile.model_validate(cpu | {"step_factors": steps})
    for ranks, threads in ((1, None), (1, 1), (4, None)):
        assert emulated.shared_by(ranks, threads=threads).factor("loss", "bf16") == 0.5
    assert machine.shared_by(2).score_ns == (2.0, 4.0)  # two threads at half their speed
    assert machine.shared_by(1).score_ns == (1.0, 2.0)


@pytest.mark.parametrize("factor", [1.2, 0.9])
def test_threads_of_one_rank_add_the_same_time_to_layers_of_every_size(factor: float) -> None:
    """As much as to those of the steps of `calibrate`; factors below one are of all ranks."""
    phases = dict.fromkeys(("teacher", "forward", "backward"), factor)
    steps = {who: {"fp32": phases} for who in ("one rank", "several ranks")}
    fields = load_device("h200").model_dump() | {"kind": "cpu", "cores": 2}
    plain = DeviceProfile.model_validate(fields)
    machine = DeviceProfile.model_validate(fields | {"step_factors": steps})

    def seconds(shape: Architecture, device: DeviceProfile, ranks: int) -> tuple[float, float]:
        run = run_of(shape, teacher=shape, sequence_length=384, precision="fp32")
        choice = choice_of((4,), (4,), ranks=ranks, micro_batch_size=2)
        shared = device.shared_by(ranks)
        (taught,), (own,) = (of(run, choice, shared) for of in (teacher_stages, student_stages))
        return taught.layers.forward, own.layers.forward

    # Layers as of the steps of `calibrate`, and larger ones; small vocabularies: short embeddings.
    teacher, student, large = (
        llama(4, hidden, ffn, 8, 4, vocab_size=128)
        for hidden, ffn in ((448, 1216), (320, 864), (640, 1728))
    )
    for ranks in (1, 2):
        of_teacher = seconds(teacher, plain, ranks)[0]
        of_student = seconds(student, plain, ranks)[1]
        before, after = seconds(large, plain, ranks), seconds(large, machine, ranks)
        sizes = before
        if ranks == 1 and factor > 1:  # calls outside of layers are not those of a layer
            outside = CALLS_OF_PASSES[0] * plain.kernel_us * 1e-6
            sizes = (of_teacher - outside, of_student - outside)
        for now, then, size in zip(after, before, sizes, strict=True):
            assert now - then == pytest.approx((factor - 1) * size, rel=1e-6)


def test_the_layers_of_calibrate_are_those_of_its_run() -> None:
    text = calibration_steps._RUN.format(vocabulary=20_480, folder="here", steps=1)
    run = yaml.safe_load(text)
    planned_layers = {"student": CALIBRATED_STUDENT, "teacher": CALIBRATED_TEACHER}
    for role, shape in planned_layers.items():
        known = run[role]["architecture"]
        assert {key: getattr(shape, key) for key in known} == known
    tokens = run["data"]["sequence_length"], run["train"]["micro_batch_size"]
    assert tokens == CALIBRATED_TOKENS


@pytest.mark.parametrize(
    ("planned", "most", "times", "steps"),
    [
        (0.1, 9, 1, 9),
        (0.5, 9, 1, 5),
        (0.6, 5, 1, 4),
        (1.4, 5, 1, 3),
        (60, 5, 1, 3),
        (0.1, 9, 2, 5),
        (0.6, 5, 2, 3),
        (60, 5, 2, 2),
    ],
)
def test_a_slow_machine_is_calibrated_by_fewer_steps(
    planned: float, most: int, times: int, steps: int
) -> None:
    """After a first one each time, of 2 seconds together, and two at least."""
    run = calibration_steps._Run(1, 1, most=most, times=times)
    assert run.steps(planned) == steps


@pytest.mark.parametrize(
    ("cores", "emulates", "runs"),
    [
        (1, False, [(1, 1, 2, 2)]),
        (2, False, [(1, 1, 1, 0), (1, 2, 2, 2), (2, 1, 2, 2)]),
        (2, True, [(1, 1, 1, 0), (1, 2, 2, 0), (2, 1, 2, 1)]),
        (16, False, [(1, 1, 1, 0), (1, 16, 2, 2), (8, 2, 2, 2)]),
    ],
)
def test_runs_that_use_all_cores_are_made_twice_and_in_bf16(
    cores: int, emulates: bool, runs: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """Ranks, threads, times, and the sequences in bf16; 0 where it is not measured."""
    peaks = {"fp32": 0.1, "bf16": 0.05 if emulates else 0.2}
    device = load_device("h200").model_copy(update={"cores": cores, "peak_tflops": peaks})
    found = calibration_steps._sharings(device, tmp_path)
    assert [
        (one.large.ranks, one.large.threads, one.large.times, one.bf16.sequences if one.bf16 else 0)
        for one in found
    ] == runs
    assert all(one.small.times == one.large.times for one in found)


def test_stages_of_a_cpu_that_wait_lend_their_cores() -> None:
    cpu = DeviceProfile.model_validate(
        load_device("h200").model_dump() | {"kind": "cpu", "cores": 2}
    )
    choice = Choice(layout=Layout(1, 2), ranks=2, micro_batch_size=1, layers=(31, 1))
    alone, shared = (student_stages(run_of(), choice, cpu.shared_by(ranks)) for ranks in (2, 4))
    busy = mean(stage.total for stage in alone) / max(stage.total for stage in alone)
    assert 0.5 < busy < 0.7
    # Half of a core each; the last stage is idle for most of the time.
    for one, other in zip(alone, shared, strict=True):
        assert other.total / one.total == pytest.approx(2 * busy, rel=1e-3)

"""A device's rates refined by the measured steps of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, get_args

from megatron_distill.errors import DataError
from megatron_distill.models.flops import forward_flops_per_token, head_flops_per_token
from megatron_distill.planning.device import ALIASED_COLUMNS, DeviceProfile, MeasuredRun, Phase
from megatron_distill.planning.operations import attended_positions
from megatron_distill.planning.parameters import stage_numbers
from megatron_distill.planning.run import Choice, PlannedRun
from megatron_distill.planning.step_time import phase_seconds, step_time
from megatron_distill.runtime.layout import Layout

__all__ = [
    "MeasuredSteps",
    "Sample",
    "lower_quartile",
    "measured_like",
    "read_steps",
    "refined",
    "refined_by_steps",
    "refined_for",
    "with_layer_seconds",
    "with_logit_rate",
]

_OF_LAYERS: Final[tuple[Phase, ...]] = ("teacher", "forward", "backward")
# Of a small layer's time, the most that a layer of any size takes besides its work.
_MOST_ADDED: Final = 0.5
# The first steps compile, allocate and fill caches.
_WARM: Final = 3
_LEAST_NS: Final = 0.01  # of a logit
# A phase shorter than this share of the step is too short to measure its rate.
_LEAST: Final = 0.005


@dataclass(frozen=True)
class MeasuredSteps:
    """Of a run's steps: seconds of each phase on the first rank, and of the step.

    has_mfu: they have the share of the peak of a GPU that the run knew by its name. ran_on: kind
    and model of the first rank's device, `cpu` or `gpu`, of each start; logs from before have none.
    """

    phases: Mapping[Phase, float]
    step: float
    count: int
    tokens_per_second: float
    tflops_per_device: float
    has_mfu: bool = False
    ran_on: tuple[tuple[str, str], ...] = ()

    def devices(self, flops_per_token: float) -> int:
        """Return the number of devices of the run, which its log has by its FLOPs alone."""
        total = flops_per_token * self.tokens_per_second
        return max(1, round(total / (self.tflops_per_device * 1e12)))


def lower_quartile(values: Sequence[float]) -> float:
    """Return the value that a quarter of few steps are below.

    Other work, also that of other machines on the same processor, only adds to a step's time.
    """
    return quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


def read_steps(
    *logs: Path, warm: int = _WARM, middle: Callable[[Sequence[float]], float] = median
) -> MeasuredSteps:
    """Read the `metrics.jsonl` of a run, or those of equal ones.

    warm: first steps of each, that are not counted. middle: of each phase over the others. Raises
    DataError: one has too few steps with phases.
    """
    records: list[Mapping[str, Any]] = []
    ran_on: list[tuple[str, str]] = []
    for log in logs:
        own = _records(log)
        ran_on += [device for record in own if (device := _device_of(record)) is not None]
        if len(own) <= warm:
            raise DataError(
                f"{log}: has no step with `timers` after the first {warm}; let the run make more"
            )
        records += own[warm:]

    return MeasuredSteps(
        {
            phase: middle([record["timers"].get(phase, 0.0) / 1e3 for record in records])
            for phase in get_args(Phase)
        },
        middle([record["step_seconds"] for record in records]),
        len(records),
        middle([record["tokens_per_second"] for record in records]),
        middle([record["tflops_per_device"] for record in records]),
        any("mfu" in record for record in records),
        tuple(dict.fromkeys(ran_on)),
    )


def _records(log: Path) -> list[Mapping[str, Any]]:
    """Return the steps with phases of a run."""
    found: list[Mapping[str, Any]] = []
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the last line of a run that is being written
        if isinstance(record, dict) and "timers" in record and "step_seconds" in record:
            found.append(record)
    return found


def _device_of(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return kind and model of the device in a step's record; None: it is not a start's first."""
    found = record.get("device")
    if not isinstance(found, Mapping):
        return None
    return str(found.get("kind")), str(found.get("name"))


def refined(
    device: DeviceProfile,
    run: PlannedRun,
    choice: Choice,
    measured: MeasuredSteps,
    *,
    shared_by: int,
    threads: int | None = None,
) -> DeviceProfile:
    """Return the device with factors that make the run's predicted phases the measured ones.

    They hold for runs like this one: `measured_like`. Those of the nearest earlier run like it are
    replaced, but in phases that this one hardly has.

    shared_by, threads: ranks of a machine that share a CPU, and threads of each, as in
    `DeviceProfile.shared_by`.
    """
    shared = device.shared_by(shared_by, threads=threads)
    own = _described(shared, run, choice)
    known = own.nearest(device.runs)
    factors = {} if known is None else dict(known.factors)
    factors |= _ratios(_plain(shared), run, choice, measured)
    others = tuple(one for one in device.runs if one is not known)
    runs = (own.model_copy(update={"factors": factors}), *others)
    return device.model_copy(update={"runs": runs})


def refined_for(device: DeviceProfile, run: PlannedRun, choice: Choice | None) -> DeviceProfile:
    """Return a rank's device with the factors of `measured_like`, where there is such a run."""
    known = measured_like(device, run, choice)
    if known is None:
        return device
    return device.model_copy(update={"factors": {**device.factors, **known.factors}})


def measured_like(
    device: DeviceProfile, run: PlannedRun, choice: Choice | None
) -> MeasuredRun | None:
    """Return the measured run whose factors hold for this one: `MeasuredRun.nearest`.

    A phase's time over its prediction depends on its size, so that factors of a small run make the
    plan of a large one worse; and on what the phase computes.

    device: of a rank. choice: as configured; None: the configured one does not run, and no measured
    run of a GPU is like it.
    """
    return _described(device, run, choice).nearest(device.runs)


@dataclass(frozen=True)
class Sample:
    """A run in one layout, and its measured steps."""

    run: PlannedRun
    choice: Choice
    measured: MeasuredSteps

    def layers(self, phase: Phase) -> int:
        """Return the passes of layers in a phase of a step on one stage."""
        run, choice = self.run, self.choice
        if phase == "teacher":
            if run.teacher is None:
                return 0
            return run.teacher.num_layers * choice.teacher_micro_batches(run)
        return run.student.num_layers * choice.micro_batches(run)


def with_logit_rate(
    device: DeviceProfile, sample: Sample, *, shared_by: int, threads: int
) -> DeviceProfile:
    """Return a CPU with the time of a logit by which a sample's losses take their time.

    Of its precision, and of rows as long as its own: aliased or not. The sample is of one stage,
    and its loss is between whole logits. The device has the `layer_us` of calls in its losses.
    shared_by, threads: as of `refined`.
    """
    run = sample.run
    split = sample.choice.layout.tensor
    is_aliased = run.student.padded_vocab_size(split) // split % ALIASED_COLUMNS == 0
    name = "aliased_logit_ns" if is_aliased else "logit_ns"
    known: dict[str, float] = getattr(device, name)

    def with_rate(each: float) -> DeviceProfile:
        return device.model_copy(update={name: {**known, run.precision: each}})

    def loss(each: float) -> tuple[float, float]:
        plain = with_rate(each).model_copy(update={"step_factors": {}})
        return _seconds(_plain(plain.shared_by(shared_by, threads=threads)), sample)["loss"]

    (without, measured), (more, _) = loss(_LEAST_NS), loss(1.0 + _LEAST_NS)
    return with_rate(_LEAST_NS + max(0.0, (measured - without) / (more - without)))


def with_layer_seconds(
    device: DeviceProfile, large: Sample, small: Sample, *, shared_by: int, threads: int
) -> DeviceProfile:
    """Return a CPU with the `layer_us` by which both samples take their time.

    Of each phase with layers: factor * work + passes of layers * seconds. On a CPU whose caches
    hold little, each operation of a layer finds its code evicted by the data of those before it,
    which takes as long in layers of any size. Both samples are of one stage and one precision.
    """
    plain = device.model_copy(update={"step_factors": {}, "layer_us": {}})
    shared = _plain(plain.shared_by(shared_by, threads=threads))
    of_large, of_small = (_seconds(shared, sample) for sample in (large, small))
    more: dict[Phase, float] = {}
    for phase in _OF_LAYERS:
        (work, whole), (less, part) = of_large[phase], of_small[phase]
        layers, fewer = large.layers(phase), small.layers(phase)
        spread = work * fewer - less * layers
        if not (layers and fewer and spread > 0):
            continue
        # A step that something disturbed would seem to be all of it.
        added = min((work * part - less * whole) / spread, _MOST_ADDED * part / fewer)
        factor = (whole - layers * added) / work
        # The factor is of all of a layer's time.
        if factor > 0 and (own := round(1e6 * added / factor, 1)) > 0:
            more[phase] = own
    return device.model_copy(update={"layer_us": {**device.layer_us, shared.sharing: more}})


def refined_by_steps(
    device: DeviceProfile, sample: Sample, *, shared_by: int, threads: int | None = None
) -> DeviceProfile:
    """Return a CPU with `step_factors` of its calibration's run, which hold for every run.

    They are those of its precision and sharing of the cores; arguments as of `refined`.
    """
    run = sample.run
    shared = device.shared_by(shared_by, threads=threads)
    before = device.step_factors.get(shared.sharing, {})
    factors = dict(before.get(run.precision, {}))
    # Those of other sharings would stand in for those that are to be found.
    own = {shared.sharing: {run.precision: dict(factors)}} if factors else {}
    plain = _plain(shared).model_copy(update={"step_factors": own})
    for phase, ratio in _ratios(plain, run, sample.choice, sample.measured).items():
        factors[phase] = round(factors.get(phase, 1.0) * ratio, 4)
    found = {**device.step_factors, shared.sharing: {**before, run.precision: factors}}
    return device.model_copy(update={"step_factors": found})


def _seconds(device: DeviceProfile, sample: Sample) -> dict[Phase, tuple[float, float]]:
    """Return the predicted and the measured seconds of each phase."""
    run, choice = sample.run, sample.choice
    numbers = stage_numbers(run.student, choice.layout, choice.layers)
    predicted = phase_seconds(run, choice, device, numbers)
    return {phase: (predicted[phase], sample.measured.phases[phase]) for phase in predicted}


def _plain(device: DeviceProfile) -> DeviceProfile:
    return device.model_copy(update={"factors": {}})


def _ratios(
    device: DeviceProfile, run: PlannedRun, choice: Choice, measured: MeasuredSteps
) -> dict[Phase, float]:
    """Return measured over predicted times of the phases that are long enough to tell a rate.

    Where ranks share a core, that of the step for each phase.
    """
    numbers = stage_numbers(run.student, choice.layout, choice.layers)
    predicted = phase_seconds(run, choice, device, numbers)
    if device.core_share < 1.0:
        # A rank waits for a core in any phase: only the time of the whole step is known.
        whole = measured.step / step_time(run, choice, device, numbers).total
        return dict.fromkeys(get_args(Phase), round(whole, 4))
    found: dict[Phase, float] = {}
    for phase, seconds in measured.phases.items():
        enough = min(seconds, predicted[phase]) > _LEAST * measured.step
        # Waiting for other stages is a result of the other phases.
        waits = phase == "communication" and choice.layout.pipeline > 1
        if enough and not waits:
            found[phase] = round(seconds / predicted[phase], 4)
    return found


def _described(device: DeviceProfile, run: PlannedRun, choice: Choice | None) -> MeasuredRun:
    """Return a run on a rank's device, as one that is measured, without factors."""
    return MeasuredRun(
        precision=run.precision,
        ranks=device.ranks,
        threads=device.threads,
        work=_work(run),
        kinds=_kinds(device, run, choice),
    )


def _kinds(device: DeviceProfile, run: PlannedRun, choice: Choice | None) -> dict[str, str]:
    """Return what decides the phases and has no size: losses, fp8; of GPUs layout and teacher.

    On a CPU the number of ranks that share it stands for both.
    """
    aligned = [
        f"{one.alignment} {one.top_k or 'all'} {one.uncommon_top_k}" for one in run.chunk_losses
    ]
    fp8 = {"student": run.student_fp8, "teacher": run.teacher_fp8}
    found = {
        "losses": ", ".join([*run.losses, *aligned]),
        "between_layers": str(len(run.paired_layers)),
        "balance": str(run.measures or "none"),
        "fp8": ", ".join(role for role, is_used in fp8.items() if is_used),
    }
    if device.kind == "gpu":
        found |= {"layout": "none", "teacher": "none"}
        if choice is not None:
            found |= {"layout": _sizes(choice.layout), "teacher": choice.place}
            if choice.teacher_layout is not None:
                found["teacher"] += f", {_sizes(choice.teacher_layout)}"
    return found


def _sizes(layout: Layout) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(layout).items())


def _work(run: PlannedRun) -> dict[str, float]:
    """Return the length of a sequence, the positions that a token attends to without a window, and
    FLOPs per token of each model's layers and head.
    """
    length, document = run.sequence_length, run.document_length
    found = {
        "sequence_length": float(length),
        "attended_positions": attended_positions(length, None, document),
    }
    teachers = [(one.shape, one.share) for one in run.several]
    if not teachers and run.teacher is not None:
        teachers = [(run.teacher, 1.0)]
    roles = {"student": ([(run.student, 1.0)], run.sequence_length)}
    if teachers:
        roles["teacher"] = teachers, run.teacher_length or run.sequence_length
    for role, (shapes, length) in roles.items():
        heads = sum(share * head_flops_per_token(shape) for shape, share in shapes)
        whole = sum(
            share * forward_flops_per_token(shape, sequence_length=length)
            for shape, share in shapes
        )
        found |= {f"{role}_layers": whole - heads, f"{role}_head": heads}
    return found

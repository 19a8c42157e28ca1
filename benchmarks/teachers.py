"""Step time with a teacher on shared ranks, in its own layout, on its own ranks, and serially.

    python benchmarks/teachers.py            # twelve minutes on two idle cores
    python benchmarks/teachers.py --quick    # few tokens: does the harness work?

Subjects take turns, round by round. All but the serial one are runs of launch/pretrain_distill.py.
The machine is calibrated before each round and at the end, and each step predicted for it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.harness.calibrated import (
    PLANNED_COLUMNS,
    calibrated,
    dumped,
    plan_cells,
    planned_seconds,
)
from benchmarks.harness.children import run_child
from benchmarks.harness.environment import ROOT, describe
from benchmarks.harness.launched import launched_steps
from benchmarks.steps.cases import Body, Case, Ranks, Workload
from megatron_distill.config import load_config
from megatron_distill.planning.device import DeviceProfile

_CHILD_SECONDS = 300
_WARMUP = 3
# The teacher has nothing to compute for steps after the last: these are faster.
_LAST = 2
_STUDENT, _TEACHER = Body(4, 256, 704, 8, 4), Body(8, 512, 1408, 8, 4)
_VOCABULARY, _LENGTH, _QUICK_LENGTH, _MICRO_BATCH, _BATCH = 8192, 256, 32, 2, 4
_FEW = "objective.terms=[{divergence: forward_kl, top_k: 64, support: renormalized}]"
_TOP_K = (_FEW, "teacher.transfer={what: top_k, k: 64}")
_OWN = "teacher.ranks=1"
_IPC, _GLOO = "teacher.transfer.backend=ipc", "teacher.transfer.backend=gloo"
_PHASES = ("teacher", "forward", "loss", "backward", "communication", "optimizer")
_TOLERANCE = 1e-5
_DEMAND = 1.1


@dataclass(frozen=True)
class Subject:
    """A run of the command; `sides` names the pair of sides that it is compared with."""

    name: str
    overrides: tuple[str, ...]
    sides: str | None
    processes: int = 2
    has_whole_loss: bool = True  # the same first losses as on shared ranks


SUBJECTS = (
    Subject("shared ranks, DP2", (), None),
    Subject("own layout, teacher TP2, student DP2", ("teacher.parallel={tensor: 2}",), None),
    *(
        Subject(
            f"own ranks, hidden, gloo, {ahead} ahead",
            (_OWN, _GLOO, f"teacher.steps_ahead={ahead}"),
            "hidden",
        )
        for ahead in (0, 1, 2)
    ),
    Subject("own ranks, hidden, ipc, 1 ahead", (_OWN, _IPC), "hidden"),
    Subject(
        "own ranks, top 64, gloo, 1 ahead", (_OWN, *_TOP_K, _GLOO), "top_k", has_whole_loss=False
    ),
    Subject(
        "own ranks, top 64, ipc, 1 ahead", (_OWN, *_TOP_K, _IPC), "top_k", has_whole_loss=False
    ),
    Subject(
        "student without teacher, one rank",
        ("teacher=null", "objective.terms=[]"),
        None,
        processes=1,
        has_whole_loss=False,
    ),
)
_SERIAL = "serial, top 64, two processes"
_NOTE = """\
One global batch of {tokens:,} tokens a step, vocabulary {vocabulary:,}, fp32, one thread per
process. Student: {student.num_layers} layers of width {student.hidden_size}; teacher:
{teacher.num_layers} of width {teacher.hidden_size}. A rank with the whole batch has two
micro-batches. `step` is the median over all timed steps of all rounds; the first three and the last
two of a run are not timed. `teacher` is the time that a step waits for the teacher, or computes it
on shared ranks. All phases are those of the student's first rank. `planned` is the planner's time
of a step on this machine, which was calibrated before each round and at the end: the median of
these plans, with the extremes in parentheses.

`of the slower side` is the step over the slower of the two sides, each measured in the same worker
with answers at hand: alone, and while the other side works too, without messages (memory and caches
are shared). Sides of the top 64 are those of the top-64 rows. `CPU` is the time of a side's threads
on a CPU: where it grows with the other side at work, memory and caches are what they wait for.

The serial step is ROLL's, written from its description on our models and loss: the teacher computes
the whole step's batch, four messages (probabilities fp32, log-probabilities bf16, ids int64, mask)
follow one another, both processes wait for each other after every phase, then the student trains.
Its random tokens have the same shapes.
"""


@dataclass
class Measured:
    """The steps of all rounds, by subject."""

    steps: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    first_losses: dict[str, dict[str, float]] = field(default_factory=dict)
    worker: list[dict[str, Any]] = field(default_factory=list)

    def side(self, kind: str, sides: str, role: str) -> float:
        """Median seconds of a side, or of its threads, `alone` or `beside` the other one."""
        return median(found[kind][sides][role] for found in self.worker)

    def slower(self, kind: str, sides: str) -> float:
        """Median seconds of the slower side."""
        return max(self.side(kind, sides, role) for role in ("student", "teacher"))

    def seconds(self, name: str) -> float:
        """Median seconds of a step."""
        return median(step["step_seconds"] for step in self.steps[name])


def main() -> int:
    """Measure, print and save; return 1 if first losses differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="processes per subject")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per process")
    parser.add_argument("--quick", action="store_true", help="few tokens; figures mean nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    console = Console(width=160)
    environment = describe("benchmarks/teachers.py", sys.argv[1:])
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    length = _QUICK_LENGTH if arguments.quick else _LENGTH
    measured = Measured()
    devices: list[DeviceProfile] = []
    for number in range(rounds):
        devices += [] if arguments.quick else [calibrated()]
        for subject in SUBJECTS if number % 2 == 0 else SUBJECTS[::-1]:
            _run(subject, measured, length=length, steps=steps)
            console.print(
                f"round {number + 1}: {subject.name}: {measured.seconds(subject.name):.3f} s"
            )
        measured.worker.append(_work(length, steps))
    difference = _difference(measured.first_losses)
    devices += [] if arguments.quick else [calibrated()]
    plans = planned_steps(devices)
    table = [*_table(measured, plans), "", *_sides(measured), "", *_verdict(measured, difference)]
    console.print("\n".join(table), markup=False)
    note = _NOTE.format(
        tokens=length * _BATCH, vocabulary=_VOCABULARY, student=_STUDENT, teacher=_TEACHER
    )
    facts = [f"- {key}: {value}" for key, value in environment.items()]
    arguments.output.mkdir(parents=True, exist_ok=True)
    text = "\n".join(["# Teachers on other ranks", "", *facts, "", note, *table, ""])
    (arguments.output / "teachers.md").write_text(text, encoding="utf-8")
    record = {"environment": environment, **vars(measured)}
    record["devices"] = dumped(devices)
    (arguments.output / "teachers.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    return 1 if difference > _TOLERANCE else 0


def _shape(body: Body) -> str:
    values = {name: value for name, value in vars(body).items() if value is not None}
    return json.dumps(values)


def settings(subject: Subject, *, length: int, steps: int) -> list[str]:
    """Return what a subject changes in configs/tiny.yaml."""
    given = [
        "runtime.threads=1",
        f"student.architecture={_shape(_STUDENT)}",
        f"data.sequence_length={length}",
        f"data.tokenizer.train_vocab_size={_VOCABULARY}",
        "data.isolate_documents=false",
        f"train.global_batch_size={_BATCH}",
        f"train.micro_batch_size={_MICRO_BATCH}",
        f"train.steps={steps}",
        "validation={interval: 0, samples: 0}",
        "checkpoint={save: false, resume: false}",
    ]
    if "teacher=null" not in subject.overrides:
        given.append(f"teacher.architecture={_shape(_TEACHER)}")
    return [*given, *subject.overrides]


def planned_steps(devices: Sequence[DeviceProfile]) -> dict[str, list[float]]:
    """Return the planner's seconds of each subject's step, for each device; one thread a process.

    Without devices nothing is planned.
    """
    found = {}
    for subject in SUBJECTS:
        given = settings(subject, length=_LENGTH, steps=_WARMUP + _LAST)
        config = load_config(ROOT / "configs" / "tiny.yaml", given)
        found[subject.name] = planned_seconds(config, devices, ranks=subject.processes)
    return found


def _run(subject: Subject, measured: Measured, *, length: int, steps: int) -> None:
    """Run the command; its steps join those of the earlier rounds."""
    given = settings(subject, length=length, steps=_WARMUP + steps + _LAST)
    with tempfile.TemporaryDirectory() as folder:
        records = launched_steps(
            "tiny.yaml",
            given,
            folder=Path(folder) / "run",
            processes=subject.processes,
            name=subject.name,
            threads=1,
        )
    measured.steps.setdefault(subject.name, []).extend(records[_WARMUP:-_LAST])
    if subject.has_whole_loss:
        measured.first_losses[subject.name] = {
            name: records[0][name] for name in ("ce_loss", "kd_loss")
        }


def _work(length: int, steps: int) -> dict[str, Any]:
    """Run the serial step and the sides."""
    workload = Workload(
        "teachers",
        _STUDENT,
        _TEACHER,
        _VOCABULARY,
        length,
        _MICRO_BATCH,
        _BATCH // _MICRO_BATCH,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.json"
        case = Case(workload, Ranks("own ranks", 1), "fp32")
        path.write_text(json.dumps(case.as_dict()), encoding="utf-8")
        found: dict[str, Any] = run_child(
            "workers/teachers.py",
            ["--case", str(path), "--warmup", str(_WARMUP), "--steps", str(steps)],
            processes=2,
            name=_SERIAL,
            seconds=_CHILD_SECONDS,
            threads=1,
        )
        return found


def _difference(losses: Mapping[str, Mapping[str, float]]) -> float:
    """Largest relative difference of a first loss from that on shared ranks."""
    first = losses[SUBJECTS[0].name]
    return max(
        abs(found[name] - expected) / abs(expected)
        for found in losses.values()
        for name, expected in first.items()
    )


def _table(measured: Measured, plans: Mapping[str, Sequence[float]]) -> list[str]:
    heading = [
        "subject",
        "step (s)",
        *PLANNED_COLUMNS,
        "of the slower side, alone",
        "of it beside the other",
    ]
    heading += [f"{phase} (s)" for phase in _PHASES]
    lines = [f"| {' | '.join(heading)} |", "|---|" + "---:|" * (len(heading) - 1)]
    for subject in SUBJECTS:
        steps = measured.steps[subject.name]
        phases = [median(step["timers"][phase] for step in steps) / 1000 for phase in _PHASES]
        lines.append(_row(measured, subject.name, subject.sides, phases, plans=plans[subject.name]))
    serial = [step for found in measured.worker for step in found["serial"]]
    taken = {name: median(step[name] for step in serial) for name in serial[0]}
    measured.steps[_SERIAL] = [{"step_seconds": step["step"]} for step in serial]
    lines.append(_row(measured, _SERIAL, "top_k", [taken["teacher"]]))
    lines += ["", f"The serial step: {taken['teacher']:.3f} s for the teacher, "]
    lines[-1] += (
        f"{taken['messages']:.3f} s for messages, {taken['student']:.3f} s for the student."
    )
    return lines


def _row(
    measured: Measured,
    name: str,
    sides: str | None,
    phases: Sequence[float],
    *,
    plans: Sequence[float] = (),
) -> str:
    seconds = measured.seconds(name)
    ratios = ["", ""]
    if sides is not None:
        ratios = [f"{seconds / measured.slower(kind, sides):.2f}x" for kind in ("alone", "beside")]
    shown = [f"{value:.3f}" for value in phases] + [""] * (len(_PHASES) - len(phases))
    cells = [f"{seconds:.3f}", *plan_cells(plans, seconds), *ratios, *shown]
    return f"| {name} | {' | '.join(cells)} |"


def _sides(measured: Measured) -> list[str]:
    heading = ["sides (s)", "student", "teacher", "teacher / student", "student CPU", "teacher CPU"]
    lines = [f"| {' | '.join(heading)} |", "|---|" + "---:|" * (len(heading) - 1)]
    for sides, named in (("hidden", "hidden"), ("top_k", "top 64")):
        for kind, when in (("alone", "alone"), ("beside", "at once")):
            student, teacher, *cpu = (
                measured.side(kind, sides, figure)
                for figure in ("student", "teacher", "student_cpu", "teacher_cpu")
            )
            shown = [f"{student:.3f}", f"{teacher:.3f}", f"{teacher / student:.2f}"]
            shown += [f"{value:.3f}" for value in cpu]
            lines.append(f"| {named}, {when} | {' | '.join(shown)} |")
    return lines


def _verdict(measured: Measured, difference: float) -> list[str]:
    """Compare first losses, and the steps of one step ahead with the slower side."""
    lines = [f"First losses differ by at most {difference:.1e} from those on shared ranks."]
    for subject in SUBJECTS:
        if subject.sides is not None and "1 ahead" in subject.name:
            ratios = []
            for kind, when in (("beside", "beside the other"), ("alone", "alone")):
                ratio = measured.seconds(subject.name) / measured.slower(kind, subject.sides)
                relation = "at most" if ratio <= _DEMAND else "more than"
                ratios.append(f"{ratio:.2f} times the slower side {when}, {relation} {_DEMAND}")
            lines.append(f"{subject.name}: {'; '.join(ratios)}.")
    return [f"- {line}" for line in lines]


if __name__ == "__main__":
    sys.exit(main())

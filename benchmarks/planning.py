"""The planner's predictions beside measured steps of this machine: seconds, and peak memory.

    python benchmarks/planning.py --quiet 0.3           # every layout, three times: half an hour
    python benchmarks/planning.py --cases layouts/TP --rounds 1 --steps 2
    python benchmarks/planning.py --only memory         # valid on a busy machine; planning_peaks
    python benchmarks/planning.py --documents --rounds 1 --steps 3      # over packed documents
    python benchmarks/planning.py --again               # new formulas beside the recorded steps
    python benchmarks/planning.py --again --record planning_intel   # the same of another record
    python benchmarks/planning.py --again --device this-cpu.yaml    # a newly calibrated device

The cases are those of benchmarks/step.py, or with --documents steps over whole sequences and over
documents of some 512 tokens. With --only memory they are all of these and further ones. The machine
is calibrated before each round and at the end, since equal work takes longer at other times of a
virtual machine; a prediction is the median of those for all these devices. Times are predicted
twice: for a device as `megatron-distill calibrate` measures it, and refined by the first case as
`calibrate --run` refines a device by a run, with a factor for each phase. That holds for runs like
the first case.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.harness.calibrated import calibrated
from benchmarks.harness.children import run_child
from benchmarks.harness.environment import ROOT, describe
from benchmarks.harness.quiet import others, run_in_quiet
from benchmarks.steps.cases import (
    Case,
    document_cases,
    layout_cases,
    peer_cases,
    stage_cases,
)
from benchmarks.steps.planned import planned_case, planned_peaks, refined_by_case
from megatron_distill.errors import ConfigError, counted
from megatron_distill.planning.device import DeviceProfile, load_device
from megatron_distill.planning.refine import lower_quartile
from megatron_distill.runtime.torchrun import available_cores

_CHILD_SECONDS = 1800
_MIB = 2**20
_HEADING = "# The planner beside measured steps"
_DISTINCT = 0.05  # equal steps differ by as much between two hours of a virtual machine
_OF_TIMES = """\
`measured` is the lower quartile of all timed steps of all rounds, which `calibrate` takes of its
own steps too: other work only adds to them. `others` is the median of the cores that other
processes used meanwhile. `calibrated` is the planner's prediction for the calibrated device: the
median over the calibrations before each round and at the end. `refined` is the same with factors
that make the phases of the first row the measured ones, for the rows like it: one rank, its
precision, and layers and heads whose FLOPs per token differ by a quarter at most.
"""
_OF_PEAKS = """\
`peak` is the most bytes of tensors alive at once during a step above those that last from step to
step, of the rank that has most; `lasting` those: weights of both models, gradients and the
optimizer's state, with Adam's count of steps for each tensor or part of one. The last table has the
peaks of all ranks; ranks of a stage have one prediction.
"""


@dataclass(frozen=True)
class RankPeak:
    """Bytes of a step's peak on one rank."""

    stage: int
    peak: int
    predicted: float


@dataclass(frozen=True)
class Row:
    """One case: seconds of a step, bytes of the rank with the highest peak, and peaks of all."""

    case: str
    seconds: float
    others: float
    calibrated_seconds: float
    refined_seconds: float
    peak: int
    predicted_peak: float
    lasting: int
    predicted_lasting: float
    ranks: tuple[RankPeak, ...]


def main() -> int:
    """Measure, print, and save the results."""
    arguments = _arguments()
    has_times = arguments.only != "memory"
    chosen = _chosen(documents=arguments.documents, has_times=has_times)
    cases = [case for case in chosen if arguments.cases in case.name]
    if not cases:
        names = ", ".join(case.name for case in chosen)
        sys.stderr.write(f"--cases {arguments.cases}: is in no name of a case: {names}\n")
        return 2
    try:
        given = None if arguments.device is None else load_device(arguments.device)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if arguments.again:
        return _again(arguments.output, given, arguments.record)
    # Before the measurements: it has the load that they met.
    environment = describe("benchmarks/planning.py", sys.argv[1:])
    measures = has_times and given is None
    devices = [] if measures else [given or _without_rates()]
    measured: dict[str, list[Any]] = {case.name: [] for case in cases}
    for number in range(arguments.rounds if has_times else 1):
        devices += [calibrated()] if measures else []
        for case in cases if number % 2 == 0 else cases[::-1]:
            steps = arguments.steps if has_times else 1
            result = run_in_quiet(partial(_run, case, steps), arguments.quiet)
            measured[case.name].append(result)
            taken = " ".join(f"{seconds:.2f}" for seconds in result["seconds"])
            sys.stdout.write(f"{case.name} {number + 1}/{arguments.rounds}: {taken} s\n")
            sys.stdout.flush()
    devices += [calibrated()] if measures else []
    file = arguments.output / f"{arguments.record}.json"
    _save(file, environment, devices, measured, has_times=has_times)
    return 0


def _again(folder: Path, given: DeviceProfile | None, name: str) -> int:
    """Write the record of a folder again, with the predictions of the present formulas.

    given: a device in place of the record's.
    """
    file = folder / f"{name}.json"
    if not file.is_file():
        sys.stderr.write(f"--again: {file} does not exist; measure first\n")
        return 1
    kept = json.loads(file.read_text(encoding="utf-8"))
    now = describe("", [])
    environment = kept["environment"] | {"predicted at": now["commit"]}
    if given is not None:
        environment["calibrated"] = f"{given.date}, {given.source}"
    devices = [given] if given else [DeviceProfile.model_validate(one) for one in kept["devices"]]
    # That of a record of another machine says which.
    page = file.with_suffix(".md")
    heading = page.read_text(encoding="utf-8").splitlines()[0] if page.is_file() else _HEADING
    has_times = kept["has_times"]
    _save(file, environment, devices, kept["rounds"], has_times=has_times, heading=heading)
    return 0


def _save(
    file: Path,
    environment: dict[str, str],
    devices: Sequence[DeviceProfile],
    measured: dict[str, list[Any]],
    *,
    has_times: bool,
    heading: str = _HEADING,
) -> None:
    """Print the table of all measured cases, and write the record."""
    every = [*_cases(), *document_cases(), *stage_cases()]
    rows = _rows([case for case in every if case.name in measured], measured, devices)
    lines = [heading, "", *_markdown(environment, devices, rows, has_times=has_times)]
    text = "\n".join(lines)
    sys.stdout.write(text)
    kept = {
        "environment": environment,
        "devices": [device.model_dump(mode="json") for device in devices],
        "has_times": has_times,
        "rows": [asdict(row) for row in rows],
        "rounds": measured,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".md").write_text(text, encoding="utf-8")
    file.write_text(json.dumps(kept, indent=1), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--documents", action="store_true", help="steps over documents; saved as planning_documents"
    )
    parser.add_argument("--rounds", type=int, default=3, help="processes per case")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per process")
    parser.add_argument("--device", help="a calibrated device's file, instead of measuring")
    parser.add_argument(
        "--again", action="store_true", help="predict the recorded steps again; measures nothing"
    )
    parser.add_argument("--record", metavar="NAME", help="with --again: the name of the record")
    parser.add_argument("--only", choices=("memory",), help="one round, and no times in the record")
    parser.add_argument(
        "--quiet",
        type=float,
        metavar="CORES",
        help="wait until others use fewer cores, and repeat what they disturbed",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    if arguments.record is not None and not arguments.again:
        parser.error(f"--record {arguments.record}: goes with --again; use --output otherwise")
    if arguments.record is None:
        arguments.record = "planning_documents" if arguments.documents else "planning"
        if arguments.only == "memory":
            arguments.record = "planning_peaks"
    return arguments


def _cases() -> list[Case]:
    return [*layout_cases(), *peer_cases()]


def _chosen(*, documents: bool, has_times: bool) -> list[Case]:
    if documents:
        return document_cases()
    return _cases() if has_times else [*_cases(), *document_cases(), *stage_cases()]


def _without_rates() -> DeviceProfile:
    """Return a CPU whose figures of memory are right, and whose rates are not asked for."""
    return load_device("a100-80gb").model_copy(
        update={"kind": "cpu", "cores": available_cores(), "reserved_gib": 0.0}
    )


def _run(case: Case, steps: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "case.json"
        file.write_text(json.dumps(case.as_dict()), encoding="utf-8")
        words = ["--case", str(file), "--subject", "ours", "--steps", str(steps)]
        return run_child(
            "steps/worker.py",
            words,
            processes=case.ranks.processes,
            name=case.name,
            seconds=_CHILD_SECONDS,
        )


def _rows(
    cases: Sequence[Case], measured: dict[str, list[Any]], devices: Sequence[DeviceProfile]
) -> list[Row]:
    seconds = {
        case.name: lower_quartile(
            [time for result in measured[case.name] for time in result["seconds"]]
        )
        for case in cases
    }
    first = cases[0]
    phases = _phases(measured[first.name])
    refined = [refined_by_case(first, one, phases, seconds[first.name]) for one in devices]
    rows = []
    for case in cases:
        results = measured[case.name]
        ranks = results[0]["ranks"]
        per_stage = len(ranks) // case.ranks.pipeline
        peaks = planned_peaks(case, devices[0])
        stage = max(range(len(peaks)), key=lambda one: ranks[one * per_stage]["peak"]["tensors"])
        there = ranks[stage * per_stage]
        rows.append(
            Row(
                case=case.name,
                seconds=seconds[case.name],
                others=median(cores for result in results for cores in others(result)),
                calibrated_seconds=_predicted(case, devices),
                refined_seconds=_predicted(case, refined),
                peak=there["peak"]["tensors"],
                predicted_peak=peaks[stage][1],
                lasting=sum(there["persistent"].values()),
                predicted_lasting=peaks[stage][0],
                ranks=tuple(
                    RankPeak(
                        number // per_stage,
                        rank["peak"]["tensors"],
                        peaks[number // per_stage][1],
                    )
                    for number, rank in enumerate(ranks)
                ),
            )
        )
    return rows


def _predicted(case: Case, devices: Sequence[DeviceProfile]) -> float:
    """Return the median of the predicted seconds of a step."""
    return median(planned_case(case, device).time.total for device in devices)


def _phases(results: Sequence[Any]) -> dict[str, float]:
    """Return the seconds of the first rank's phases, the lower quartile of each."""
    steps = [phases for result in results for phases in result["ranks"][0]["phases"]]
    return {name: lower_quartile([phases[name] for phases in steps]) for name in steps[0]}


def _markdown(
    environment: dict[str, str],
    devices: Sequence[DeviceProfile],
    rows: Sequence[Row],
    *,
    has_times: bool,
) -> list[str]:
    lines = [f"- {name}: {value}" for name, value in environment.items()]
    if has_times:
        lines += [
            f"- calibration {number}: {1e3 * one.peak_tflops['fp32']:.0f} GFLOP/s, "
            f"{one.memory_gb_per_s:.1f} GB/s of a core"
            for number, one in enumerate(devices, 1)
        ]
    lines += ["", *([_OF_TIMES] if has_times else []), _OF_PEAKS]
    lines += [*_summary(rows, has_times=has_times), ""]
    times = ["measured (s)", "others", "calibrated (s)", "ratio", "refined (s)", "ratio"]
    names = ["case", *(times if has_times else []), "peak MiB", "predicted", "ratio"]
    names += ["lasting MiB", "difference (bytes)"]
    lines += [f"| {' | '.join(names)} |", "|---|" + "---:|" * (len(names) - 1)]
    for row in rows:
        cells = [row.case]
        if has_times:
            cells += [f"{row.seconds:.3f}", f"{row.others:.2f}"]
            for predicted in (row.calibrated_seconds, row.refined_seconds):
                cells += [f"{predicted:.3f}", f"{predicted / row.seconds:.2f}"]
        cells += [f"{row.peak / _MIB:.1f}", f"{row.predicted_peak / _MIB:.1f}"]
        cells += [f"{row.predicted_peak / row.peak:.2f}", f"{row.lasting / _MIB:.1f}"]
        cells += [f"{row.predicted_lasting - row.lasting:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *_of_ranks(rows), ""]


def _of_ranks(rows: Sequence[Row]) -> list[str]:
    """Return the table of the peaks of all ranks."""
    names = ["case", "rank", "stage", "peak MiB", "predicted", "error"]
    lines = [f"| {' | '.join(names)} |", "|---|" + "---:|" * (len(names) - 1)]
    for row in rows:
        for number, rank in enumerate(row.ranks):
            cells = [row.case, str(number), str(rank.stage), f"{rank.peak / _MIB:.1f}"]
            cells += [f"{rank.predicted / _MIB:.1f}", f"{rank.predicted / rank.peak - 1:+.1%}"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _summary(rows: Sequence[Row], *, has_times: bool) -> Iterator[str]:
    """Yield the errors of the predictions over all cases; the refined first case is left out."""
    errors = {"peaks": [row.predicted_peak / row.peak - 1 for row in rows]}
    if has_times:
        errors["calibrated times"] = [row.calibrated_seconds / row.seconds - 1 for row in rows]
        errors["refined times"] = [row.refined_seconds / row.seconds - 1 for row in rows[1:]]
    for name, found in errors.items():
        if found:
            yield _spread(name, found, "case")
    ranks = [rank for row in rows for rank in row.ranks]
    yield _spread("peaks of all ranks", [rank.predicted / rank.peak - 1 for rank in ranks], "rank")
    if has_times:
        pairs = list(_distinct_pairs(rows))
        right = sum(a.calibrated_seconds < b.calibrated_seconds for a, b in pairs)
        yield (
            f"- order: {right} of {counted(len(pairs), 'pair')} of layouts of one workload and "
            f"precision whose measured times differ by more than {_DISTINCT:.0%}"
        )


def _spread(name: str, errors: Sequence[float], unit: str) -> str:
    """Return a line on errors of predictions."""
    return (
        f"- {name}: mean error {mean(map(abs, errors)):.1%}, from {min(errors):+.1%} to "
        f"{max(errors):+.1%} over {counted(len(errors), unit)}"
    )


def _distinct_pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield pairs of layouts that do the same work, the faster one first."""

    def work(row: Row) -> tuple[str, str]:
        workload, _, precision = row.case.split("/")
        return workload, precision

    for first, second in combinations(rows, 2):
        fast, slow = sorted((first, second), key=lambda row: row.seconds)
        if work(first) == work(second) and slow.seconds > (1 + _DISTINCT) * fast.seconds:
            yield fast, slow


if __name__ == "__main__":
    sys.exit(main())

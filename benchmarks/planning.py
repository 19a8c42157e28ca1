"""The planner's predictions beside measured steps of this machine: seconds, and peak memory.

    python benchmarks/planning.py                       # calibrates, then every layout: ten minutes
    python benchmarks/planning.py --cases layouts/TP --rounds 1 --steps 2
    python benchmarks/planning.py --only memory         # valid on a busy machine too

The cases are those of benchmarks/step.py. The first one refines the calibrated device, as
`megatron-distill calibrate --run` does; its own row shows nothing of time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args

from benchmarks.harness.children import run_child
from benchmarks.harness.environment import ROOT, describe
from benchmarks.steps.cases import Case, layout_cases, peer_cases
from benchmarks.steps.planned import planned_case, planned_peaks
from megatron_distill.planning.calibration import measure_machine
from megatron_distill.planning.device import Device, Phase, load_device

_CHILD_SECONDS = 1800
_MIB = 2**20
_NOTE = """\
`measured` is the median of all timed steps of all rounds; `predicted` that of the planner for the
calibrated device, with one factor on all phases that makes the first row's prediction its
measurement. `peak` is the most bytes of tensors alive at once during a step above those that last
from step to step, of the rank that has most; `lasting` those, weights of both models, gradients and
the optimizer's state, whose prediction leaves out one step counter of 4 bytes per parameter.
"""


@dataclass(frozen=True)
class Row:
    """One case: seconds of a step, and bytes of the rank with the highest peak."""

    case: str
    seconds: float
    predicted_seconds: float
    peak: int
    predicted_peak: float
    lasting: int
    predicted_lasting: float


def main() -> int:
    """Measure, print, and save the results."""
    arguments = _arguments()
    cases = [case for case in _cases() if arguments.cases in case.name]
    device = measure_machine("cpu") if arguments.device is None else load_device(arguments.device)
    measured: dict[str, list[Any]] = {case.name: [] for case in cases}
    for number in range(arguments.rounds):
        for case in cases if number % 2 == 0 else cases[::-1]:
            result = _run(case, steps=arguments.steps)
            measured[case.name].append(result)
            steps = " ".join(f"{seconds:.2f}" for seconds in result["seconds"])
            sys.stdout.write(f"{case.name} {number + 1}/{arguments.rounds}: {steps} s\n")
    rows = _rows(cases, measured, device)
    text = "\n".join(_markdown(describe("benchmarks/planning.py", sys.argv[1:]), device, rows,
                               has_times=arguments.only != "memory"))  # fmt: skip
    sys.stdout.write(text)
    kept = {
        "environment": describe("benchmarks/planning.py", sys.argv[1:]),
        "device": device.model_dump(mode="json"),
        "has_times": arguments.only != "memory",
        "rows": [asdict(row) for row in rows],
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "planning.md").write_text(text, encoding="utf-8")
    (arguments.output / "planning.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=3, help="processes per case")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per process")
    parser.add_argument("--device", help="a calibrated device's file, instead of measuring")
    parser.add_argument("--only", choices=("memory",), help="leave the times out of the record")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def _cases() -> list[Case]:
    return [*layout_cases(), *peer_cases()]


def _run(case: Case, *, steps: int) -> Any:
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


def _rows(cases: Sequence[Case], measured: dict[str, list[Any]], device: Device) -> list[Row]:
    seconds = {
        case.name: median(time for result in measured[case.name] for time in result["seconds"])
        for case in cases
    }
    factor = seconds[cases[0].name] / planned_case(cases[0], device).time.total
    refined = device.model_copy(update={"factors": dict.fromkeys(get_args(Phase), factor)})
    rows = []
    for case in cases:
        ranks = measured[case.name][0]["ranks"]
        per_stage = len(ranks) // case.ranks.pipeline
        peaks = planned_peaks(case, device)
        stage = max(range(len(peaks)), key=lambda one: ranks[one * per_stage]["peak"]["tensors"])
        there = ranks[stage * per_stage]
        rows.append(
            Row(
                case.name,
                seconds[case.name],
                planned_case(case, refined).time.total,
                there["peak"]["tensors"],
                peaks[stage][1],
                sum(there["persistent"].values()),
                peaks[stage][0],
            )
        )
    return rows


def _markdown(
    environment: dict[str, str], device: Device, rows: Sequence[Row], *, has_times: bool
) -> list[str]:
    lines = ["# The planner beside measured steps", ""]
    lines += [f"- {name}: {value}" for name, value in environment.items()]
    rate = device.peak_tflops["fp32"] * 1e3
    lines += [f"- calibrated: {rate:.0f} GFLOP/s and {device.memory_gb_per_s:.1f} GB/s of a core"]
    lines += ["", _NOTE]
    times = ["measured (s)", "predicted (s)", "ratio"] if has_times else []
    names = ["case", *times, "peak MiB", "predicted", "ratio", "lasting MiB", "difference (bytes)"]
    lines += [f"| {' | '.join(names)} |", "|---|" + "---:|" * (len(names) - 1)]
    for row in rows:
        cells = [row.case]
        if has_times:
            cells += [f"{row.seconds:.3f}", f"{row.predicted_seconds:.3f}"]
            cells += [f"{row.predicted_seconds / row.seconds:.2f}"]
        cells += [f"{row.peak / _MIB:.1f}", f"{row.predicted_peak / _MIB:.1f}"]
        cells += [f"{row.predicted_peak / row.peak:.2f}", f"{row.lasting / _MIB:.1f}"]
        cells += [f"{row.predicted_lasting - row.lasting:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


if __name__ == "__main__":
    sys.exit(main())

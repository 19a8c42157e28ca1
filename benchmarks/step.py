"""Tokens per second and peak memory of a training step: per layout, and beside ModelOpt's.

    python benchmarks/step.py                          # everything; extra `bench` installed
    python benchmarks/step.py --only layouts           # our step under every layout
    python benchmarks/step.py --only peer --cases v32k/TP1
    python benchmarks/step.py --cases v32k/TP1/fp32 --rounds 1 --profile

Every measurement runs in fresh processes; the subjects of a case take turns, round by round.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.children import run_child
from benchmarks.harness.environment import ROOT, describe, installed
from benchmarks.harness.quiet import run_in_quiet
from benchmarks.harness.report import write_report
from benchmarks.harness.summary import Ratio, Row, compare, rich_table, summarise
from benchmarks.steps.cases import Case, layout_cases, peer_cases, quick

_LOSS_TOLERANCE = 1e-5
_CHILD_SECONDS = 1800
_FILE_WIDTH = 180


@dataclass
class Measured:
    """The measurements so far."""

    layouts: list[Row] = field(default_factory=list)
    peers: list[Row] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)

    def tables(self) -> dict[str, Sequence[Row | Ratio]]:
        """Return the tables by name, including empty ones."""
        return {"layouts": self.layouts, "peer": self.peers, "ratios": self.ratios}


def main() -> int:
    """Measure, print, and save the results."""
    arguments = _arguments()
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    if arguments.only != "layouts" and installed("nvidia-modelopt") is None:
        console.print(
            "The peer needs nvidia-modelopt: pip install -e '.[bench]', or --only layouts"
        )
        return 1
    environment = describe("benchmarks/step.py", sys.argv[1:])
    arguments.output.mkdir(parents=True, exist_ok=True)
    measured = Measured()
    if arguments.only != "peer":
        for case in _selected(layout_cases(), arguments):
            measured.layouts.append(_measure(case, ["ours"], measured, arguments, console)[0])
            write_report(arguments.output, arguments.name, environment, measured)
    if arguments.only != "layouts":
        for case, subjects in _selected_pairs(arguments):
            rows = _measure(case, subjects, measured, arguments, console)
            measured.peers += rows
            measured.ratios += [compare(rows[0], row) for row in rows[1:]]
            write_report(arguments.output, arguments.name, environment, measured)
    if not measured.layouts and not measured.peers:
        names = dict.fromkeys(case.name for case in (*layout_cases(), *peer_cases()))
        console.print(f"no case has {arguments.cases!r} in its name; there are {', '.join(names)}")
        return 1
    for title, table in measured.tables().items():
        if table:
            console.print(rich_table(title, table))
    return _verdict(measured, console)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("layouts", "peer"), help="one of the two tables")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=3, help="processes per subject and case")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per process")
    parser.add_argument("--warmup", type=int, default=2, help="steps before these")
    parser.add_argument("--quick", action="store_true", help="few tokens: does the harness work?")
    parser.add_argument(
        "--profile", action="store_true", help="also write the operators of one more step"
    )
    parser.add_argument(
        "--quiet",
        type=float,
        metavar="CORES",
        help="wait until others use fewer cores, and repeat what they disturbed",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--name", default="step", help="what the result files are called")
    return parser.parse_args()


def _selected(cases: Sequence[Case], arguments: argparse.Namespace) -> list[Case]:
    chosen = [case for case in cases if arguments.cases in case.name]
    return [quick(case) for case in chosen] if arguments.quick else chosen


def _selected_pairs(arguments: argparse.Namespace) -> list[tuple[Case, list[str]]]:
    pairs = []
    for case in _selected(peer_cases(), arguments):
        subjects = ["ours", "peer"]
        if case.precision == "fp32":
            subjects += ["peer-unrepaired", "peer-stock"]
        pairs.append((case, subjects))
    return pairs


def _measure(
    case: Case,
    subjects: Sequence[str],
    measured: Measured,
    arguments: argparse.Namespace,
    console: Console,
) -> list[Row]:
    """Run the subjects of a case in turns, the order reversed from round to round."""
    results: dict[str, list[Any]] = {subject: [] for subject in subjects}
    for number in range(arguments.rounds):
        for subject in subjects if number % 2 == 0 else subjects[::-1]:
            profiled = arguments.profile and number == 0
            child = partial(_run_child, case, subject, arguments, profiled=profiled)
            result = run_in_quiet(child, arguments.quiet)
            results[subject].append(result)
            steps = " ".join(f"{seconds:.2f}" for seconds in result["seconds"])
            console.print(f"{case.name} {subject} {number + 1}/{arguments.rounds}: {steps} s")
    measured.raw[case.name] = results
    return [summarise(case, subject, results[subject]) for subject in subjects]


def _run_child(case: Case, subject: str, arguments: argparse.Namespace, *, profiled: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        case_file = Path(folder) / "case.json"
        case_file.write_text(json.dumps(case.as_dict()), encoding="utf-8")
        words = ["--case", str(case_file), "--subject", subject]
        words += ["--warmup", str(arguments.warmup), "--steps", str(arguments.steps)]
        if profiled:
            name = f"{arguments.name}_profile_{case.name.replace('/', '_')}_{subject}.md"
            words += ["--profile", str(arguments.output / name)]
        return run_child(
            "steps/worker.py",
            words,
            processes=case.ranks.processes,
            name=f"{case.name} {subject}",
            seconds=_CHILD_SECONDS,
        )


def _verdict(measured: Measured, console: Console) -> int:
    """Return 1 if the two subjects did not compute the same losses in fp32."""
    wrong = [
        ratio
        for ratio in measured.ratios
        if ratio.peer == "peer"
        and ratio.case.endswith("fp32")
        and ratio.first_loss_difference > _LOSS_TOLERANCE
    ]
    for ratio in wrong:
        console.print(
            f"{ratio.case}: the first losses differ by {ratio.first_loss_difference:.1e}, more "
            f"than {_LOSS_TOLERANCE}; the comparison is not one of equals"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""The teacher store: bytes per token, error of the codecs, tokens per second, and training.

    python benchmarks/store.py                                # some ten minutes, 2 GB of disk
    python benchmarks/store.py --folder /scratch --only speed --rounds 3 --name try
    python benchmarks/store.py --only training                # four minutes; the rest is kept

The machine is calibrated before and after the steps of training, and each planned for it. A teacher
is trained once for the codecs and saved under --teacher.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.calibrated import calibrated, dumped
from benchmarks.harness.children import run_child
from benchmarks.harness.environment import ROOT, describe, installed
from benchmarks.stores.errors import measure_errors, trained_teacher
from benchmarks.stores.report import PARTS, earlier_parts, part_text, write_store_report
from benchmarks.stores.sizes import KS, measure_sizes

_PACKAGES = ("array-record", "protobuf", "zstandard", "pyarrow")
_POSITIONS = 4096
_DISTINCT = 16
_ON_DISK = 64
_CHILD_SECONDS = 3000.0
# Steps in a row and rounds of each workload: the differences are small.
_TRAINED = {"v32k": (3, 8), "quickstart": (10, 40)}
_TRAINED_K = 64
_WIDTH = 140


def main() -> int:
    """Measure, print, and save the results."""
    arguments = _arguments()
    console = Console(width=_WIDTH)
    environment = describe("benchmarks/store.py", sys.argv[1:])
    environment |= {name: installed(name) or "not installed" for name in _PACKAGES}
    for key, value in environment.items():
        console.print(f"{key}: {value}", markup=False)
    measured = earlier_parts(arguments.output, arguments.name) if arguments.only else {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        for part in arguments.only or PARTS:
            found = _MEASURE[part](Path(place), arguments)
            measured[part] = {"environment": environment, "found": found}
            console.print(part_text(part, measured[part]), markup=False)
            write_store_report(arguments.output, arguments.name, measured)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, nargs="*", help="these; the others are kept")
    parser.add_argument(
        "--quick", action="store_true", help="training in two rounds, without calibrations"
    )
    parser.add_argument("--rounds", type=int, default=9, help="of everything that is timed")
    parser.add_argument("--steps", type=int, default=500, help="that the teacher is trained for")
    parser.add_argument("--samples", type=int, default=128, help="held-out ones for the codecs")
    parser.add_argument(
        "--teacher", type=Path, default=Path("runs/store_benchmark"), help="where it is kept"
    )
    parser.add_argument("--folder", type=Path, help="where there is room for stores")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--name", default="store", help="what the result files are called")
    return parser.parse_args()


def _sizes(place: Path, arguments: argparse.Namespace) -> Sequence[dict[str, Any]]:  # noqa: ARG001
    sizes = measure_sizes(place, positions=_POSITIONS, distinct=_DISTINCT, count=_ON_DISK)
    return [asdict(size) for size in sizes]


def _errors(place: Path, arguments: argparse.Namespace) -> dict[str, Any]:  # noqa: ARG001
    teacher = trained_teacher(
        arguments.teacher.resolve(), steps=arguments.steps, samples=arguments.samples
    )
    losses = [asdict(loss) for loss in measure_errors(teacher)]
    return {"teacher": dict(teacher.figures), "codecs": losses}


def _speed(place: Path, arguments: argparse.Namespace) -> Any:
    words = ["--folder", str(place), "--rounds", str(arguments.rounds)]
    words += ["--positions", str(_POSITIONS), "--samples", str(_DISTINCT)]
    words += ["--k", *map(str, KS)]
    return run_child(
        "stores/speed_worker.py",
        words,
        processes=1,
        name="the store's speed",
        seconds=_CHILD_SECONDS,
        threads=1,
    )


def _training(place: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    rows, devices = [], [] if arguments.quick else [calibrated()]
    for workload, (steps, rounds) in _TRAINED.items():
        rounds = 2 if arguments.quick else rounds
        words = ["--workload", workload, "--k", str(_TRAINED_K), "--steps", str(steps)]
        words += ["--rounds", str(rounds), "--folder", str(place)]
        rows.append(
            run_child(
                "stores/training_worker.py",
                words,
                processes=1,
                name=f"training {workload}",
                seconds=_CHILD_SECONDS,
            )
        )
    devices += [] if arguments.quick else [calibrated()]
    return {"rows": rows, "devices": dumped(devices)}


_MEASURE = {"sizes": _sizes, "errors": _errors, "speed": _speed, "training": _training}

if __name__ == "__main__":
    sys.exit(main())

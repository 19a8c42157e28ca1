"""The smallest configurations in the layouts that their files name: steps beside their plans.

python benchmarks/tiny.py                  # ten minutes on two cores
python benchmarks/tiny.py --cases TP2      # layouts whose name contains this
python benchmarks/tiny.py --again --record tiny_amd   # a record by the present formulas
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.calibrated import (
    dumped,
    loaded,
    measured_in_turns,
    planned_seconds,
    step_cells,
)
from benchmarks.harness.environment import ROOT, describe
from benchmarks.harness.launched import launched_steps
from megatron_distill.config import load_config

if TYPE_CHECKING:
    from megatron_distill.config import RunConfig

_TP2 = ("parallel.tensor=2",)
_PP2 = ("parallel.pipeline=2",)
# Name: file, ranks, overrides.
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "tiny, one rank": ("tiny.yaml", 1, ()),
    "tiny, TP2": ("tiny.yaml", 2, _TP2),
    "tiny, TP2 with sequence parallelism": ("tiny.yaml", 2, (*_TP2, "parallel.sequence=true")),
    "tiny, PP2": ("tiny.yaml", 2, _PP2),
    "tiny, PP2 in two parts": ("tiny.yaml", 2, (*_PP2, "parallel.virtual_pipeline=2")),
    "tiny, CP2": ("tiny.yaml", 2, ("parallel.context=2",)),
    "tiny, DP2": ("tiny.yaml", 2, ()),
    "tiny, TP2 PP2": ("tiny.yaml", 4, (*_TP2, *_PP2)),
    "tiny, micro-batches of 8": ("tiny.yaml", 1, ("train.micro_batch_size=8",)),
    "tiny_moe, one rank": ("tiny_moe.yaml", 1, ()),
    "tiny_moe, EP2": ("tiny_moe.yaml", 2, ("parallel.expert=2",)),
    "tiny_moe, TP2": ("tiny_moe.yaml", 2, (*_TP2, "parallel.sequence=true")),
}
_NOTE = """\
Runs take turns, round by round. Each takes {steps} steps, of which the first {warmup} are not
counted. `step` is the median over all rounds, with the extremes of their medians in parentheses.
`planned` is the planner's time of it on this machine, which was calibrated before each round and at
the end: the median of these plans, with the extremes. Two ranks have a core each, four share two.
"""
_ROWS = 1000  # of the tokenizer
_WARMUP = 5


def main() -> int:
    """Train, print, and save the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="of a run")
    parser.add_argument("--again", action="store_true", help="plan the recorded steps again")
    parser.add_argument("--record", default="tiny", metavar="NAME", help="of the files written")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    file = arguments.output / f"{arguments.record}.json"
    if arguments.again:
        record = json.loads(file.read_text(encoding="utf-8"))
        record["environment"]["predicted at"] = describe("", [])["commit"]
    else:
        record = _measured(arguments)
    arguments.output.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1), encoding="utf-8")
    lines = [f"- {key}: {value}" for key, value in record["environment"].items()]
    note = _NOTE.format(steps=record["steps"], warmup=_WARMUP)
    text = "\n".join(["# Steps of the smallest runs\n", *lines, "", note, *_table(record), ""])
    file.with_suffix(".md").write_text(text, encoding="utf-8")
    sys.stdout.write("\n".join([*_table(record), ""]))
    return 0


def tiny_config(name: str) -> RunConfig:
    """Return the configuration of one of `CASES`, with its tokenizer's rows."""
    file, _, own = CASES[name]
    return load_config(ROOT / "configs" / file, [f"student.architecture.vocab_size={_ROWS}", *own])


def _measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the record of steps between calibrations."""
    environment = describe("benchmarks/tiny.py", sys.argv[1:])
    names = [name for name in CASES if arguments.cases in name]
    with tempfile.TemporaryDirectory() as folder:
        steps_of = partial(_steps_of, place=Path(folder), count=arguments.steps)
        seconds, devices = measured_in_turns(names, steps_of, rounds=arguments.rounds)
    return {
        "environment": environment,
        "steps": arguments.steps,
        "seconds": seconds,
        "devices": dumped(devices),
    }


def _steps_of(name: str, number: int, *, place: Path, count: int) -> list[float]:
    """Return the seconds of the steps of one run, without the first ones."""
    file, ranks, own = CASES[name]
    first = place / f"{next(iter(CASES))} 0" / "tokenizer"
    given = [
        *own,
        f"train.steps={count}",
        "validation={interval: 0, samples: 0}",
        "checkpoint={save: false, resume: false}",
    ]
    if first.exists():
        given += [f"data.tokenizer.path={first}", "data.tokenizer.train_vocab_size=null"]
    folder = place / f"{name} {number}"
    log = launched_steps(file, given, folder=folder, processes=ranks, name=name)
    return [step["step_seconds"] for step in log[_WARMUP:]]


def _table(record: dict[str, Any]) -> list[str]:
    """Return the table of a record; a plan is that of the present formulas."""
    lines = ["| run | ranks | step (ms) | planned (ms) | error |", "|---|---:|---:|---:|---:|"]
    devices = loaded(record["devices"])
    for name, rounds in record["seconds"].items():
        ranks = CASES[name][1]
        plans = planned_seconds(tiny_config(name), devices, ranks=ranks)
        cells = [name, str(ranks), *step_cells(rounds, plans)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())

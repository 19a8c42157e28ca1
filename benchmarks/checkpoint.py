"""Host memory and bytes per rank of saves and resumes, in layouts that differ.

python benchmarks/checkpoint.py                  # three minutes, 5 GB of memory and of disk
python benchmarks/checkpoint.py --folder /scratch
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.children import run_child
from benchmarks.harness.environment import ROOT, describe

_SECONDS = 300.0  # of one start of the ranks
_MOST_SHARES = 1.2
_MB = 1e6
_NOTE = """\
A bf16 student of 52 M parameters (6 layers, width 512, 32,000 tokens, untied) with fp32 Adam, CPU
ranks on one machine; `MoE` has 8 experts of width 256 in each layer instead, 59 M parameters.
`share` is what a rank holds: its weights and its optimizer states. `formula` is what it should be:
2 B per parameter of its tensor-, pipeline- and expert-parallel part, and 12 B over the ranks with
the same part, data- and context-parallel ones; with `whole`, `optimizer.distributed=false`, not
divided. `bytes` is the size of a rank's file, or the bytes that it reads into its tensors.

`anonymous` is the peak of memory that no file backs, above the state before, which holds model,
gradients and optimizer; `resident` counts the mapped pages of files too. Both are those of the rank
with the most, and `memory / share` is of `resident`. The limit is 1.2: a copy of the share, and
little else. `blocked` is the time for which the second of two saves keeps a training step waiting,
or the time of a resume. Every resume was compared with the saved values, bit by bit. `gather` is
Megatron-Core's `fully_reshardable` description of the optimizer alone, before anything is written:
the format of earlier releases.
"""


@dataclass(frozen=True)
class Layout:
    """A number of ranks and their division."""

    processes: int
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    moe: bool = False
    whole: bool = False

    def words(self) -> list[str]:
        """As arguments of the worker."""
        words = [f"--{name.replace('_', '-')}={getattr(self, name)}" for name in _SIZES]
        return [*words, *(f"--{name}" for name in ("moe", "whole") if getattr(self, name))]

    def name(self) -> str:
        """As in the result's table."""
        data = self.processes // (self.tensor * self.pipeline * self.context * self.expert)
        sizes = {
            "TP": self.tensor, "PP": self.pipeline, "CP": self.context, "EP": self.expert,
            "DP": data,
        }  # fmt: skip
        named = "x".join(f"{kind}{size}" for kind, size in sizes.items() if size > 1) or "one rank"
        named += f"+virtual {self.virtual_pipeline}" if self.virtual_pipeline > 1 else ""
        return named + (", whole" if self.whole else "") + (", MoE" if self.moe else "")


@dataclass(frozen=True)
class Run:
    """The works of one start of the ranks, in their order.

    `works`: saves by name; a layout stands for a resume of its checkpoint.
    """

    layout: Layout
    works: tuple[str | Layout, ...]

    def named(self) -> Iterator[tuple[str, Layout | None]]:
        """Yield each work's name, and the layout of the checkpoint that it reads."""
        for work in self.works:
            yield ("resume", work) if isinstance(work, Layout) else (work, None)


_SIZES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert")
_SAVES = ("save", "save-asynchronously")
_DP4, _CP2DP2, _TP2PP2 = Layout(4), Layout(4, context=2), Layout(4, tensor=2, pipeline=2)
_VIRTUAL = Layout(2, pipeline=2, virtual_pipeline=3)
_WHOLE = Layout(4, whole=True)
_ONE_MOE, _EP2 = Layout(1, moe=True), Layout(2, expert=2, moe=True)
_TP2_MOE = Layout(2, tensor=2, moe=True)
_RUNS = [
    Run(_DP4, ("gather",)),
    Run(_DP4, (*_SAVES, _DP4)),
    Run(_TP2PP2, (_DP4, *_SAVES)),
    Run(_WHOLE, (_DP4, *_SAVES)),
    Run(_CP2DP2, (_DP4, *_SAVES)),
    Run(_VIRTUAL, (_DP4, *_SAVES)),
    Run(Layout(4, tensor=2), (_DP4, _WHOLE, _CP2DP2)),
    Run(Layout(4, pipeline=2), (_DP4, _VIRTUAL)),
    Run(Layout(2), (_DP4, _VIRTUAL)),
    Run(_DP4, (_TP2PP2, _CP2DP2)),
    Run(Layout(1), (_TP2PP2, _VIRTUAL)),
    Run(Layout(2, whole=True), (_WHOLE,)),
    Run(_EP2, (*_SAVES, _EP2)),
    Run(_ONE_MOE, (_EP2, *_SAVES)),
    Run(_TP2_MOE, (_EP2, *_SAVES)),
    Run(_EP2, (_ONE_MOE, _TP2_MOE)),
]


def main() -> int:
    """Measure, print, and save the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where there is room")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    console = Console(width=140)
    environment = describe("benchmarks/checkpoint.py", sys.argv[1:])
    rows = [
        "| work | saved in | share MB | formula MB | bytes MB | anonymous MB | resident MB | "
        "memory / share | blocked s |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    raw: dict[str, Any] = {}
    too_much = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        for number, run in enumerate(_RUNS):
            for name, saved, ranks in _measure(run, Path(place)):
                raw[f"{name}, of {saved}" if saved else name] = ranks
                rows.append(_row(name, saved, ranks))
                console.print(rows[-1], markup=False)
                if not name.startswith("gather") and _ratio(ranks) > _MOST_SHARES:
                    too_much.append(name)
            _remove_unread(Path(place), _RUNS[number + 1 :])
    described = [f"- {key}: {value}" for key, value in environment.items()]
    text = "\n".join(["# Checkpoints\n", *described, "", _NOTE, *rows, ""])
    (arguments.output / "checkpoint.md").write_text(text, encoding="utf-8")
    kept = {"environment": environment, "ranks": raw}
    (arguments.output / "checkpoint.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
    for name in too_much:
        console.print(f"more than {_MOST_SHARES} shares: {name}", markup=False)
    return 1 if too_much else 0


def _measure(run: Run, place: Path) -> Iterator[tuple[str, str, list[dict[str, float]]]]:
    """Start the ranks of a layout; yield name, checkpoint and ranks' figures of each work."""
    layout, works = run.layout, list(run.named())
    words = [f"--work={work}={place / (saved or layout).name()}" for work, saved in works]
    measured = run_child(
        "workers/checkpoint.py", [*words, *layout.words()], processes=layout.processes,
        name=layout.name(), seconds=_SECONDS,
    )  # fmt: skip
    for (work, saved), ranks in zip(works, measured, strict=True):
        yield f"{work}, {layout.name()}", saved.name() if saved else "", ranks


def _remove_unread(place: Path, runs: Sequence[Run]) -> None:
    """Remove the checkpoints that no later run reads."""
    needed = {saved.name() for run in runs for _, saved in run.named() if saved}
    for folder in place.iterdir():
        if folder.name not in needed:
            shutil.rmtree(folder)


def _ratio(ranks: list[dict[str, float]]) -> float:
    """Resident memory over the share, of the rank with the most."""
    return max(rank["resident"] / (rank["weights"] + rank["optimizer"]) for rank in ranks)


def _row(name: str, saved: str, ranks: list[dict[str, float]]) -> str:
    shares = [rank["weights"] + rank["optimizer"] for rank in ranks]
    files = [rank["file"] / _MB for rank in ranks]
    return (
        f"| {name} | {saved} | {max(shares) / _MB:.1f} | "
        f"{max(rank['formula'] for rank in ranks) / _MB:.1f} | "
        f"{min(files):.1f} to {max(files):.1f} | "
        f"{max(rank['anonymous'] for rank in ranks) / _MB:.1f} | "
        f"{max(rank['resident'] for rank in ranks) / _MB:.1f} | {_ratio(ranks):.2f} | "
        f"{max(rank['blocked'] for rank in ranks):.2f} |"
    )


if __name__ == "__main__":
    sys.exit(main())

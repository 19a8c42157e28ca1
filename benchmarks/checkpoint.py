"""Host memory and bytes per rank of saves and resumes, in layouts that differ.

python benchmarks/checkpoint.py                  # some minutes, 4 GB of memory and 1 GB of disk
python benchmarks/checkpoint.py --folder /scratch
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.children import run_child
from benchmarks.harness.environment import ROOT, describe

_SECONDS = 900.0
_MB = 1e6
_NOTE = """\
A bf16 student of 52 M parameters (6 layers, width 512, 32,000 tokens, untied) with fp32 Adam, CPU
ranks on one machine. `share` is what a rank holds: its weights (2 B per parameter of its tensor-
and pipeline-parallel part) and its optimizer states (12 B per parameter of that part, over the
data-parallel ranks; with `whole`, `optimizer.distributed=false`, not divided). `bytes` is the size
of a rank's file, or the bytes that it reads into its tensors.

`anonymous` is the peak of memory that no file backs, above the state before, which holds model,
gradients and optimizer; `resident` counts the mapped pages of files too, which the system takes
back at will. Both are those of the rank with the most, and `memory / share` is of `resident`. The
limit is 1.2: a copy of the share, and little else. `blocked` is the time for which the second of
two saves keeps a training step waiting, or the time of a resume. Every resume was compared with
the saved values, bit by bit. `gather` is Megatron-Core's `fully_reshardable` description of the
optimizer alone, before anything is written: the format of earlier releases.
"""


@dataclass(frozen=True)
class Layout:
    """A number of ranks and their division."""

    processes: int
    tensor: int = 1
    pipeline: int = 1
    whole: bool = False

    def words(self) -> list[str]:
        """As arguments of the worker."""
        words = ["--tensor", str(self.tensor), "--pipeline", str(self.pipeline)]
        return [*words, "--whole"] if self.whole else words

    def name(self) -> str:
        """As in the result's table."""
        data = self.processes // self.tensor // self.pipeline
        sizes = (("TP", self.tensor), ("PP", self.pipeline), ("DP", data))
        named = "x".join(f"{kind}{size}" for kind, size in sizes if size > 1) or "one rank"
        return f"{named}, whole" if self.whole else named


_DP4, _TP2PP2 = Layout(4), Layout(4, tensor=2, pipeline=2)
_WHOLE = Layout(4, whole=True)
_SAVED: dict[Layout, list[Layout]] = {
    _DP4: [_DP4, Layout(2), Layout(4, tensor=2), Layout(4, pipeline=2), _TP2PP2, _WHOLE],
    _TP2PP2: [_DP4, Layout(1)],
    _WHOLE: [Layout(2, whole=True), Layout(4, tensor=2)],
}


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
        "| work | saved in | share MB | bytes MB | anonymous MB | resident MB | memory / share | "
        "blocked s |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    raw: dict[str, Any] = {}

    def add(work: str, layout: Layout, folder: Path, saved: str) -> None:
        name = f"{work}, {layout.name()}"
        words = ["--work", work, *layout.words(), "--folder", str(folder)]
        ranks = run_child(
            "workers/checkpoint.py", words, processes=layout.processes, name=name, seconds=_SECONDS
        )
        raw[f"{name}, of {saved}" if saved else name] = ranks
        rows.append(_row(name, saved, ranks))
        console.print(rows[-1], markup=False)

    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        add("gather", _DP4, Path(place), "")
        for saved, others in _SAVED.items():
            folder = Path(place) / saved.name()
            add("save-asynchronously", saved, folder, "")
            add("save", saved, folder, "")
            for layout in others:
                add("resume", layout, folder, saved.name())
    described = [f"- {key}: {value}" for key, value in environment.items()]
    text = "\n".join(["# Checkpoints\n", *described, "", _NOTE, *rows, ""])
    (arguments.output / "checkpoint.md").write_text(text, encoding="utf-8")
    kept = {"environment": environment, "ranks": raw}
    (arguments.output / "checkpoint.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
    return 0


def _row(name: str, saved: str, ranks: list[dict[str, float]]) -> str:
    shares = [rank["weights"] + rank["optimizer"] for rank in ranks]
    files = [rank["file"] / _MB for rank in ranks]
    ratio = max(rank["resident"] / share for rank, share in zip(ranks, shares, strict=True))
    return (
        f"| {name} | {saved} | {max(shares) / _MB:.1f} | {min(files):.1f} to {max(files):.1f} | "
        f"{max(rank['anonymous'] for rank in ranks) / _MB:.1f} | "
        f"{max(rank['resident'] for rank in ranks) / _MB:.1f} | {ratio:.2f} | "
        f"{max(rank['blocked'] for rank in ranks):.2f} |"
    )


if __name__ == "__main__":
    sys.exit(main())

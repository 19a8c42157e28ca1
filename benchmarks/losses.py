"""Every loss beside its peers': time and memory, forward and backward.

    python benchmarks/losses.py                       # everything; extra `bench` installed
    python benchmarks/losses.py --cases v32k/fp32     # some

Logits are given, of standard deviation 2; all subjects of a case take turns in one process.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.harness.children import run_child
from benchmarks.harness.environment import ROOT, describe
from benchmarks.harness.quiet import wait_until_quiet

_SHAPES = {"v32k": (1024, 32_768), "v152k": (256, 151_936), "v128k": (8192, 128_256)}
_CPU_CASES = [
    (shape, precision, tensor)
    for shape in ("v32k", "v152k")
    for precision in ("fp32", "bf16")
    for tensor in (1, 2)
]
_GPU_CASES = [("v128k", "bf16", 1)]
_CHILD_SECONDS = 1800
_QUIET_CORES = 0.3
_WIDTH = 160
_NOTE = """\
Median seconds of forward and backward from given logits, all subjects of a case in turns in one
process (one per rank); the memory that each takes is touched just before it starts, in pages of the
size that it asks for. `ratio` is the subject's time over ours (the family's first row). `best` is
the fastest run of each: what the code takes where nothing comes between, such as a virtual
machine's host that has to find memory. `extra` is the most bytes alive above both logits, the
gradient included, in units of one logit tensor; `over the logits` lets the gradient take their
place. ModelOpt is 0.47's Megatron plugin; its top-k is renormalised. All top-k rows choose k = 64
from the teacher's logits first. `fused linear` starts from hidden states: ours is CE and forward KL
with both heads' products, chunks of 1024 tokens, and `bare products` are these four products alone;
`into a buffer` adds the weight's gradient to an fp32 matrix that is there already, as training
does. `fused jsd` is JSD without CE. A `plain loop` is what a user would write: the mean of the loss
and its backward, again and again on one leaf, with no memory prepared; each subject loops alone,
two rounds unrecorded and then twice as many as above.
"""


def main() -> int:
    """Measure, print, and save the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=5, help="timed repetitions")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--name", default="losses", help="what the result files are called")
    arguments = parser.parse_args()
    console = Console(width=_WIDTH)
    environment = describe("benchmarks/losses.py", sys.argv[1:])
    measured: dict[str, list[dict[str, Any]]] = {}
    for shape, precision, tensor in _GPU_CASES if torch.cuda.is_available() else _CPU_CASES:
        name = f"{shape}/{precision}/TP{tensor}"
        if arguments.cases not in name:
            continue
        wait_until_quiet(_QUIET_CORES)
        measured[name] = _run(shape, precision, tensor, arguments.repeats)
        console.print("\n".join(_table(name, measured[name])), markup=False)
        _write(arguments.output, arguments.name, environment, measured)
    return 0


def _run(shape: str, precision: str, tensor: int, repeats: int) -> list[dict[str, Any]]:
    tokens, vocab = _SHAPES[shape]
    words = [f"--tokens={tokens}", f"--vocab={vocab}", f"--precision={precision}"]
    words += [f"--tensor={tensor}", f"--repeats={repeats}"]
    rows: list[dict[str, Any]] = run_child(
        "objectives/worker.py",
        words,
        processes=tensor,
        name=f"{shape} {precision} TP{tensor}",
        seconds=_CHILD_SECONDS,
    )
    return rows


def _table(name: str, rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"## {name}", ""]
    lines.append("| loss | subject | ms | ratio | best ms | ratio | extra | sum over tokens |")
    lines.append("|---|---|---:|---:|---:|---:|---:|---:|")
    first: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: str(row["family"])):
        ours = first.setdefault(row["family"], row)
        times = (
            f"{row[key] * 1e3:.1f} | {row[key] / ours[key]:.2f}x"
            for key in ("seconds", "best_seconds")
        )
        lines.append(
            f"| {row['family']} | {row['subject']} | {' | '.join(times)} | "
            f"{row['extra_bytes'] / row['logit_bytes']:.2f} | {row['value']:.4f} |"
        )
    return [*lines, ""]


def _write(
    folder: Path, name: str, environment: dict[str, str], measured: dict[str, list[dict[str, Any]]]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"environment": environment, "cases": measured}
    (folder / f"{name}.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
    parts = ["# Losses\n", "\n".join(f"- {key}: {value}" for key, value in environment.items())]
    parts += ["", _NOTE]
    for case, rows in measured.items():
        parts += _table(case, rows)
    (folder / f"{name}.md").write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

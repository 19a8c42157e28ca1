"""Attention over packed documents beside the masked attention that it replaced.

python benchmarks/attention.py                    # both parts, some twenty minutes on two cores
python benchmarks/attention.py --only attention   # forward and backward of one layer's attention
python benchmarks/attention.py --only step        # a training step like that of configs/tiny.yaml
python benchmarks/attention.py --only context     # keys of context ranks: gathered, around a ring

The peer is this library's former path: one bool mask [b, 1, s, S] per micro-batch, read by
`scaled_dot_product_attention`. Subjects run in turns, each in fresh processes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.children import run_child
from benchmarks.harness.environment import ROOT, describe

SUBJECTS = ("ours", "masked")
_MIB = 2**20
_SECONDS = 1800.0
_ATTENTION_LENGTHS = (512, 2048, 8192, 32_768)
_STEP_LENGTHS = (512, 2048, 8192)
_STEP_TOKENS = 16_384
# Subject, length, documents, ranks, rounds.
_CONTEXTS = (
    ("attention", 8192, "packed", 2, 15),
    ("attention", 8192, "whole", 2, 9),
    ("attention", 32_768, "packed", 2, 7),
    ("attention", 32_768, "whole", 2, 1),
    ("attention", 8192, "packed", 4, 9),
    ("attention", 8192, "whole", 4, 5),
    ("attention", 32_768, "packed", 4, 5),
    ("layer", 8192, "packed", 2, 9),
    ("layer", 8192, "whole", 2, 5),
    ("layer", 32_768, "packed", 2, 3),
    ("layer", 8192, "packed", 4, 7),
)
_CONTEXT_NOTE = """\
One layer on context ranks, forward and backward: `attention` alone, 8 query heads of size 64 on 2
key-value heads; or the whole `layer`, of width 512 with a feed-forward of 1,408, its embedding and
final norm with it. One sample, fp32, gloo, one thread per rank. `gathered` is the way of a run: one
all-gather of keys and values, in backward one more and a reduce-scatter. `ring` sends them from
rank to rank while the rank attends to those before (`benchmarks/workers/ring.py`). Both ways run in
turns in the same processes.

`ms` is the median by the clock, from a barrier to a barrier; `least` the ratio of the shortest
rounds; `CPU` the least CPU time of a rank, gloo's threads with it. `peak` is the most bytes of
tensors alive at once above the inputs, results and gradients with them. All are those of the rank
with the largest figure. `difference` is that of a result or gradient, over its largest number.

The CPU time is the figure to read: other work on the machine disturbs the clock.
"""
_NOTE = """\
`documents` is the number of documents in the first sample: the whole sequence, eight equal ones, or
lengths drawn evenly from 512 to 4,096. `attention` is one layer, forward and backward: 8 query
heads of size 64 on 2 key-value heads, one sample, fp32. `step` has the models of
`configs/tiny.yaml` (4 layers each, width 64 and 96) and 16,384 tokens in samples of one micro-batch
each, with the teacher's pass, the loss and the optimizer. `masked` is the former attention. `peak`
is the most bytes of tensors alive at once above those alive before. `difference` is the largest one
of the results of the first 2,048 positions, or that of the first step's loss.

tokens/s are those of one thread per process, by its CPU time, which other work on the machine
disturbs less than the clock: the shorter of two rounds, one at 32,768 positions. With two ranks the
tokens are those of both and the time that of the first. `ms` are medians of 20 messages by the
clock.
"""


@dataclass(frozen=True)
class Case:
    """One line of a table."""

    part: str
    length: int
    documents: str  # "whole", "eight" or "packed"
    window: int | None = None
    context: int = 1

    @property
    def has_peer(self) -> bool:
        """Whether the former path is measured too; at 32k a round of it takes minutes."""
        return self.documents != "eight"

    @property
    def name(self) -> str:
        """The case in words."""
        window = f", window {self.window}" if self.window else ""
        ranks = f", CP{self.context}" if self.context > 1 else ""
        return f"{self.part} {self.length:,} {self.documents}{window}{ranks}"


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for length in _ATTENTION_LENGTHS:
        yield Case("attention", length, "whole")
        if length > 512:
            yield Case("attention", length, "packed")
    yield Case("attention", 8192, "packed", window=512)
    for length in _STEP_LENGTHS:
        yield Case("step", length, "whole")
        if length > 512:
            yield Case("step", length, "packed")
    yield Case("step", 8192, "eight")
    yield Case("step", 8192, "packed", context=2)


def main() -> int:
    """Measure, print, and save the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("attention", "step", "communication", "context"))
    parser.add_argument("--longest", type=int, default=max(_ATTENTION_LENGTHS))
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--name", default="attention", help="what the result file is called")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    environment = describe("benchmarks/attention.py", sys.argv[1:])
    arguments.output.mkdir(parents=True, exist_ok=True)
    result = arguments.output / f"{arguments.name}.md"
    if arguments.only == "context":
        _contexts(arguments, environment, result)
        return 0
    is_whole = arguments.only is None and not arguments.cases
    moved = _communication() if is_whole or arguments.only == "communication" else []
    lines: list[str] = []
    for case in cases():
        chosen = arguments.only in (None, case.part) and arguments.cases in case.name
        if chosen and case.length <= arguments.longest:
            subjects = SUBJECTS if case.has_peer else SUBJECTS[:1]
            lines.append(_line(case, {subject: _measured(case, subject) for subject in subjects}))
            Console().print(lines[-1])
            result.write_text(_report(lines, moved, environment), encoding="utf-8")
    result.write_text(_report(lines, moved, environment), encoding="utf-8")
    return 0


def _measured(case: Case, subject: str) -> dict[str, Any]:
    words = ["--part", case.part, "--length", str(case.length), "--documents", case.documents]
    words += ["--subject", subject, "--tokens", str(_STEP_TOKENS)]
    if case.window is not None:
        words += ["--window", str(case.window)]
    return run_child(
        "workers/attention.py",
        words,
        processes=case.context,
        threads=1,
        name=f"{case.name}, {subject}",
        seconds=_SECONDS,
    )


def _contexts(arguments: argparse.Namespace, environment: dict[str, str], result: Path) -> None:
    parts = ["# Keys of context ranks: gathered, or around a ring\n", _CONTEXT_NOTE]
    parts.append("\n".join(f"* {name}: {value}" for name, value in environment.items()) + "\n")
    lines = [
        "| case | documents | gathered ms | ring ms | ring/gathered | least | CPU ms | CPU ring |"
        " peak (MiB) | peak ring | difference |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for subject, length, documents, ranks, rounds in _CONTEXTS:
        name = f"{subject} {length:,} {documents}, CP{ranks}"
        if length <= arguments.longest and arguments.cases in name:
            words = ["--subject", subject, "--length", str(length), "--documents", documents]
            words += ["--rounds", str(rounds)]
            found = run_child(
                "workers/context.py",
                words,
                processes=ranks,
                threads=1,
                name=name,
                seconds=_SECONDS,
            )
            lines.append(_context_line(name, found))
            Console().print(lines[-1])
            result.write_text("\n".join([*parts, *lines]) + "\n", encoding="utf-8")


def _context_line(name: str, found: dict[str, Any]) -> str:
    ours, ring = found["gathered"], found["ring"]
    cells = [name, str(found["documents"])]
    cells += [f"{way['median'] * 1e3:,.0f}" for way in (ours, ring)]
    cells += [f"{ring[figure] / ours[figure]:.2f}" for figure in ("median", "least")]
    cells += [f"{way['work'] * 1e3:,.0f}" for way in (ours, ring)]
    cells += [f"{way['peak'] / _MIB:,.1f}" for way in (ours, ring)]
    return "| " + " | ".join([*cells, f"{found['difference']:.1e}"]) + " |"


def _communication() -> list[str]:
    words = ["--part", "communication", "--length", "8192", "--subject", "ours"]
    found = run_child(
        "workers/attention.py", words, processes=2, name="communication", seconds=_SECONDS
    )
    return [f"| {way} | {seconds * 1e3:.1f} |" for way, seconds in found.items()]


def _line(case: Case, found: dict[str, dict[str, Any]]) -> str:
    ours, peer = found["ours"], found.get("masked")
    cells = [case.name, str(ours["documents"]), f"{ours['tokens_per_second']:,.0f}"]
    if peer is None:
        return "| " + " | ".join([*cells, "", "", f"{ours['peak'] / _MIB:,.1f}", "", ""]) + " |"
    difference = ours.get("difference", abs(ours.get("loss", 0.0) - peer.get("loss", 0.0)))
    cells += [
        f"{peer['tokens_per_second']:,.0f}",
        f"{ours['tokens_per_second'] / peer['tokens_per_second']:.2f}x",
        f"{ours['peak'] / _MIB:,.1f}",
        f"{peer['peak'] / _MIB:,.1f}",
        f"{difference:.1e}",
    ]
    return "| " + " | ".join(cells) + " |"


def _report(lines: list[str], moved: list[str], environment: dict[str, str]) -> str:
    parts = ["# Attention over packed documents\n", _NOTE]
    parts.append("\n".join(f"* {name}: {value}" for name, value in environment.items()) + "\n")
    if lines:
        parts.append(
            "| case | documents | tokens/s | masked | ratio | peak (MiB) | masked | difference |\n"
            "|---|---:|---:|---:|---:|---:|---:|---:|\n" + "\n".join(lines) + "\n"
        )
    if moved:
        parts.append(
            "| keys and values of 8,192 positions, 2 ranks | ms |\n|---|---:|\n"
            + "\n".join(moved)
            + "\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())

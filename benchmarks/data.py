"""Preparing and reading data, beside Hugging Face datasets with TRL's SFT preparation.

python benchmarks/data.py                    # some twenty minutes and 4 GB of disk
python benchmarks/data.py --rounds 1 --large-megabytes 100
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.data_corpus import (
    SEQUENCE_LENGTH,
    VOCABULARY,
    write_conversations,
    write_documents,
    write_tokenizer,
)
from benchmarks.harness.children import run_child
from benchmarks.harness.environment import ROOT, describe
from benchmarks.harness.quiet import wait_until_quiet

_SECONDS = 3600.0
_QUIET_CORES = 0.3
_MEGABYTE = 10**6
_MIB = 2**20
_STREAMED_TOKENS = 8_000_000
_NOTE = f"""\
Conversations of one to four exchanges in ChatML, and documents, both of Python's standard library
and as JSON lines; a byte-level BPE of {VOCABULARY:,} tokens, sequences of {SEQUENCE_LENGTH:,}.
Subjects run in turns in fresh processes, their imports before the clock, on as many cores as in the
column; on two ours prepares in two worker processes and TRL with `dataset_num_proc=2`. The
peer is TRL's SFTTrainer as it prepares and packs by itself (`packing`, `assistant_only_loss`; best
fit, as ours), loading the file with `datasets` included and the trainer's other work not.

`prepare`: from the file to tokens with masks that wait on disk (both keep a cache, which is empty
here); tokens per second and core. `load`: batches of 8 sequences out of what is prepared. `stream`:
documents tokenised and packed while they are read, nothing kept (the peer: `streaming=True`).
`peak` is the most anonymous memory of the process and its children above what it had before, pages
of mapped files not counted. Medians over the rounds; `ratio` is the median of ours over the peer's
in the same round.
"""


@dataclass
class Case:
    """Ours and the peer on one task and one file."""

    task: str
    file: Path
    cores: int
    rates: dict[str, list[float]] = field(default_factory=dict)  # tokens per second and core
    firsts: dict[str, list[float]] = field(default_factory=dict)  # seconds
    peaks: dict[str, list[int]] = field(default_factory=dict)

    def add(self, subject: str, found: dict[str, Any]) -> None:
        """Add one round."""
        self.rates.setdefault(subject, []).append(found["tokens"] / found["seconds"] / self.cores)
        self.peaks.setdefault(subject, []).append(found["peak"])
        if "first_seconds" in found:
            self.firsts.setdefault(subject, []).append(found["first_seconds"])

    def line(self) -> str:
        """As a row of a Markdown table."""
        ours, peer = self.rates["ours"], self.rates.get("TRL", [])
        ratio = median(a / b for a, b in zip(ours, peer, strict=True)) if peer else None
        size = self.file.stat().st_size / _MEGABYTE
        cells = [
            self.task,
            f"{size:,.0f}",
            str(self.cores),
            *(self._shown(self.rates, one, "{:,.0f}") for one in ("ours", "TRL")),
            "-" if ratio is None else f"{ratio:.2f}",
            *(self._shown(self.firsts, one, "{:.1f}") for one in ("ours", "TRL")),
            *(self._shown(self.peaks, one, "{:,.0f}", _MIB) for one in ("ours", "TRL")),
        ]
        return f"| {' | '.join(cells)} |"

    @staticmethod
    def _shown(
        values: dict[str, list[float]] | dict[str, list[int]],
        subject: str,
        form: str,
        unit: int = 1,
    ) -> str:
        return form.format(median(values[subject]) / unit) if subject in values else "-"


_HEAD = [
    "| task | MB | cores | tokens/s per core | TRL's | ratio | first batch (s) | TRL's "
    "| peak (MiB) | TRL's |",
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
]


def main() -> int:
    """Measure, print, and save the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=100, help="of the files beside the peer")
    parser.add_argument("--large-megabytes", type=int, default=1000, help="of documents, streamed")
    parser.add_argument("--large-chats", type=int, default=1000, help="megabytes, prepared")
    parser.add_argument("--folder", type=Path, help="where there is room, not in /tmp")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    console = Console(width=120)
    environment = describe("benchmarks/data.py", sys.argv[1:])
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        place = Path(name)
        cases = list(_measured(place, arguments, console))
        lines = [*_HEAD, *(case.line() for case in cases)]
    console.print("\n".join(lines), markup=False)
    described = [f"- {key}: {value}" for key, value in environment.items()]
    text = "\n".join(["# Data\n", *described, "", _NOTE, *lines, ""])
    (arguments.output / "data.md").write_text(text, encoding="utf-8")
    kept = [{**vars(case), "file": case.file.name} for case in cases]
    (arguments.output / "data.json").write_text(
        json.dumps({"environment": environment, "cases": kept}, indent=1), encoding="utf-8"
    )
    return 0


def _measured(place: Path, arguments: argparse.Namespace, console: Console) -> Iterator[Case]:
    write_tokenizer(place / "tokenizer")
    chats, documents = place / "chats.jsonl", place / "documents.jsonl"
    write_conversations(chats, arguments.megabytes * _MEGABYTE)
    write_documents(documents, arguments.megabytes * _MEGABYTE)
    cases = [
        Case("prepare", chats, 1),
        Case("prepare", chats, 2),
        Case("load", chats, 1),
        Case("stream", documents, 1),
    ]
    for number in range(arguments.rounds):
        for case in cases:
            for subject in ("ours", "TRL"):
                found = _run(case, subject, place)
                case.add(subject, found)
                console.print(f"round {number + 1}: {subject} {case.task} {found}", markup=False)
    yield from cases
    large_chats, large_documents = place / "large_chats.jsonl", place / "large_documents.jsonl"
    write_conversations(large_chats, arguments.large_chats * _MEGABYTE)
    write_documents(large_documents, arguments.large_megabytes * _MEGABYTE)
    large = [Case("stream", large_documents, 1), Case("load", large_chats, 2)]
    for case in large:
        # A peer that prepares the large file first would take hours of this machine.
        for subject in ("ours", "TRL") if case.task == "stream" else ("ours",):
            case.add(subject, _run(case, subject, place))
        console.print(case.line(), markup=False)
    yield from large


def _run(case: Case, subject: str, place: Path) -> Any:
    wait_until_quiet(_QUIET_CORES)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        name = case.task if subject == "ours" else f"{case.task}-trl"
        words = [
            *("--subject", name, "--file", str(case.file), "--folder", folder),
            *("--tokenizer", str(place / "tokenizer"), "--cores", str(case.cores)),
            *("--tokens", str(_STREAMED_TOKENS)),
        ]
        return run_child(
            "workers/data.py",
            words,
            processes=1,
            name=f"{subject} {case.task}",
            seconds=_SECONDS,
            threads=case.cores,
        )


if __name__ == "__main__":
    sys.exit(main())

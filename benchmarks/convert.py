"""Conversion of a model of 3 GB, both ways, beside a plain copy of its files with safetensors.

python benchmarks/convert.py                  # some ten minutes and 12 GB of disk
python benchmarks/convert.py --rounds 1 --folder /scratch
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from benchmarks.harness.children import run_child
from benchmarks.harness.environment import ROOT, describe
from benchmarks.harness.quiet import wait_until_quiet

_SECONDS = 1800.0
_QUIET_CORES = 0.3
_IDLE_SECONDS = 25.0
_TOUCHED_BYTES = 4 * 2**30
_MIB = 2**20
_SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128_256,
}
_NOTE = """\
A Llama of 16 layers, width 2,048 and 128,256 tokens, untied, bf16, in files of at most 1 GB. `copy`
is `save_file(load_file(path))` of safetensors for each file, flushed to disk as the conversions
are. All run in turns in fresh processes, their imports before the clock, the source's files in the
page cache, after a rest of 25 s, and with as much memory touched before as is written. `ratio` is
the time of the copy before over the subject's, its median over the rounds. `import` writes a
checkpoint, `export` a folder, neither holds a model; `read` fills a model that is there, as
`student.hf` does, TP=2 on two ranks. `peak` is the most anonymous memory of a rank during the work
above what it had before, `own` the bytes of its parameters; the largest tensor is the embedding,
501 MiB.
"""


@dataclass
class Measured:
    """One subject: seconds of each round, and the largest rank's memory."""

    subject: str
    processes: int
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    peak: int = 0
    own: int = 0

    def add(self, result: dict[str, Any], copy_seconds: float) -> None:
        """Add one round."""
        self.seconds.append(result["seconds"])
        self.ratios.append(copy_seconds / result["seconds"])
        self.peak = max(self.peak, *(rank["peak"] for rank in result["ranks"]))
        self.own = max(rank["own"] for rank in result["ranks"])

    def line(self, total: int) -> str:
        """As a row of a Markdown table."""
        rates = sorted(total / 1e9 / seconds for seconds in self.seconds)
        return (
            f"| {self.subject} | {self.processes} | {median(rates):.2f} | "
            f"{rates[0]:.2f} to {rates[-1]:.2f} | {median(self.ratios):.2f} | "
            f"{self.peak / _MIB:.0f} | {self.own / _MIB:.0f} |"
        )


def main() -> int:
    """Measure, print, and save the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--folder", type=Path, help="where there is room, not in /tmp")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    console = Console(width=120)
    environment = describe("benchmarks/convert.py", sys.argv[1:])
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        source = Path(place) / "source"
        total = write_model(source)
        subjects = list(
            _measure(Path(place), source, arguments.processes, arguments.rounds, console)
        )
    head = [
        "| subject | processes | GB/s | slowest to fastest | ratio | peak MiB | own MiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines = [*head, *(subject.line(total) for subject in subjects)]
    console.print("\n".join(lines), markup=False)
    described = [f"- {key}: {value}" for key, value in environment.items()]
    described.append(f"- model: {total / 1e9:.2f} GB")
    text = "\n".join(["# Conversion\n", *described, "", _NOTE, *lines, ""])
    (arguments.output / "convert.md").write_text(text, encoding="utf-8")
    kept = {"environment": environment, "subjects": [vars(subject) for subject in subjects]}
    (arguments.output / "convert.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
    return 0


def write_model(folder: Path) -> int:
    """Write a random model as `transformers` does, and return the bytes of its files."""
    import transformers

    config = transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02, generator=generator)
    model.save_pretrained(folder, max_shard_size="1GB")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _measure(
    place: Path, source: Path, processes: list[int], rounds: int, console: Console
) -> Iterator[Measured]:
    copied = Measured("copy", 1)
    subjects = [
        Measured(name, ranks) for ranks in processes for name in ("import", "export", "read")
    ]
    for number in range(rounds):
        for subject in subjects:
            if subject.subject == "import":
                wait_until_quiet(_QUIET_CORES)
                first = _run("copy", 1, source, place / "copy")
                shutil.rmtree(place / "copy")
                copied.add(first, first["seconds"])
                console.print(f"round {number + 1}: copy {first['seconds']:.1f} s", markup=False)
            origin = place / "checkpoint" if subject.subject == "export" else source
            goal = place / ("checkpoint" if subject.subject == "import" else "out")
            result = _run(subject.subject, subject.processes, origin, goal)
            subject.add(result, first["seconds"])
            console.print(
                f"  {subject.subject} x {subject.processes}: {result['seconds']:.1f} s",
                markup=False,
            )
            if subject.subject == "export":
                shutil.rmtree(place / "checkpoint")
                shutil.rmtree(place / "out")
    yield copied
    yield from subjects


def _run(subject: str, processes: int, source: Path, output: Path) -> Any:
    for path in source.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                while stream.read(2**24):
                    pass  # into the page cache
    # Shared disks allow a burst after a rest, and less right after one; all subjects rest alike.
    time.sleep(_IDLE_SECONDS)
    # On a virtual machine the first touch of memory unused for a while is slow, and the write cache
    # is such memory. Touching it first makes it the same for all subjects, in any order.
    subprocess.run([sys.executable, "-c", f"bytearray({_TOUCHED_BYTES})"], check=True)
    words = ["--subject", subject, "--source", str(source), "--output", str(output)]
    name = f"{subject} x {processes}"
    return run_child("workers/convert.py", words, processes=processes, name=name, seconds=_SECONDS)


if __name__ == "__main__":
    sys.exit(main())

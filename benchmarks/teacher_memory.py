"""Memory of both sides over 1,000 steps beside a teacher on ranks of its own.

    python benchmarks/teacher_memory.py            # under two minutes on two cores
    python benchmarks/teacher_memory.py --steps 100

Of each rank the pages of its process that are in memory are taken every tenth of the run, shared
ones included. The teacher has one layer: it is always ahead as far as it may.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console

from benchmarks.harness.environment import ROOT, describe
from megatron_distill.runtime.torchrun import torchrun_command

_SECONDS = 1200
_LOOKS = 10
_ROLES = {"0": "student.0", "1": "teacher.0"}
_WAYS = ("ipc", "gloo")
_SHAPE = "{num_layers: 1, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4}"
_GIVEN = (
    "runtime.threads=1",
    "teacher.ranks=1",
    f"student.architecture={_SHAPE}",
    f"teacher.architecture={_SHAPE}",
    "data.sequence_length=64",
    "data.tokenizer.train_vocab_size=512",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "validation={interval: 0, samples: 0}",
    "checkpoint={save: false, resume: false}",
)


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    environment = describe("benchmarks/teacher_memory.py", sys.argv[1:])
    found = {way: _measure(way, arguments.steps) for way in _WAYS}
    steps = sorted(set.intersection(*(set(looks) for looks in found.values())))
    columns = [(way, role) for way in _WAYS for role in _ROLES.values()]
    table = [
        f"| step | {' | '.join(f'{role}, {way} (MiB)' for way, role in columns)} |",
        "|---:|" + "---:|" * len(columns),
        *(
            f"| {step:,} | "
            + " | ".join(f"{found[way][step][role] / 2**20:.1f}" for way, role in columns)
            + " |"
            for step in steps
        ),
    ]
    Console(width=160).print("\n".join(table), markup=False)
    facts = [f"- {key}: {value}" for key, value in environment.items()]
    text = "\n".join(["# Memory beside a teacher on its own ranks", "", *facts, "", *table, ""])
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "teacher_memory.md").write_text(text, encoding="utf-8")
    return 0


def _measure(way: str, steps: int) -> dict[int, dict[str, int]]:
    """Run the command; returns the resident bytes of each rank by step."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--config", str(ROOT / "configs" / "tiny.yaml"), f"output={folder}/run", *_GIVEN]
        words += [f"train.steps={steps}", f"teacher.transfer.backend={way}"]
        script = str(ROOT / "launch" / "pretrain_distill.py")
        log = Path(folder) / "log"
        with (
            log.open("w") as stream,
            subprocess.Popen(
                torchrun_command(script, words, processes=2),
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                cwd=folder,
                stdout=stream,
                stderr=stream,
            ) as launch,
        ):
            try:
                found = _watch(launch, Path(folder) / "run" / "metrics.jsonl", steps // _LOOKS)
            finally:
                if launch.poll() is None:
                    launch.terminate()
        if launch.returncode:
            raise SystemExit(f"{way} failed:\n{log.read_text()[-4000:]}")
        return found


def _watch(
    launch: subprocess.Popen[bytes], metrics: Path, interval: int
) -> dict[int, dict[str, int]]:
    """Take the memory of the ranks whenever an interval of steps is done, until the run ends."""
    found: dict[int, dict[str, int]] = {}
    done, deadline = 0, time.monotonic() + _SECONDS
    while launch.poll() is None and time.monotonic() < deadline:
        lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if lines // interval > done:
            done = lines // interval
            found[done * interval] = _resident(launch.pid)
        time.sleep(0.02)
    return {step: ranks for step, ranks in found.items() if len(ranks) == len(_ROLES)}


def _resident(launcher: int) -> dict[str, int]:
    """Return the resident bytes of each rank that torchrun has started."""
    found = {}
    for process in psutil.Process(launcher).children():
        try:
            role = _ROLES.get(process.environ().get("RANK", ""))
            if role is not None:
                found[role] = int(process.memory_info().rss)
        except psutil.NoSuchProcess:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())

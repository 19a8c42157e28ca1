"""Memory of both sides over 1,000 steps beside a teacher on ranks of its own.

    python benchmarks/teacher_memory.py            # under two minutes on two cores
    python benchmarks/teacher_memory.py --steps 100

Each rank notes three figures after every tenth of the steps: the bytes of its living `tensors`;
those that are in use by the C library's count, of tensors, of torch and of other libraries
(`allocated`); and the `resident` pages of its process, with shared ones and with freed pieces that
the C library keeps. The teacher has one layer: it is always ahead as far as it may.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.harness.children import run_to_end
from benchmarks.harness.environment import ROOT, describe
from megatron_distill.runtime.torchrun import torchrun_command

_SECONDS = 1200
_LOOKS = 10
_ROLES = ("student.0", "teacher.0")
_WAYS = ("ipc", "gloo")
_KINDS = ("tensors", "allocated", "resident")
_WORKER = ROOT / "benchmarks" / "workers" / "teacher_memory.py"
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
_NOTE = """\
`tensors`: the bytes of the rank's living tensors. `allocated`: those in use by the C library's
count, of tensors too, but not of shared memory. `resident`: the pages of the process.
"""
# By step, as the worker has written them: bytes of each kind.
_Looks = dict[str, dict[str, int]]


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    environment = describe("benchmarks/teacher_memory.py", sys.argv[1:])
    tables = [row for way in _WAYS for row in _table(way, _measure(way, arguments.steps))]
    Console(width=160).print("\n".join(tables), markup=False)
    facts = [f"- {key}: {value}" for key, value in environment.items()]
    title = "# Memory beside a teacher on its own ranks"
    text = "\n".join([title, "", *facts, "", _NOTE, *tables])
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "teacher_memory.md").write_text(text, encoding="utf-8")
    return 0


def _measure(way: str, steps: int) -> dict[str, _Looks]:
    """Run the command; returns the bytes of each role."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        words = [f"--every={steps // _LOOKS}", f"--folder={folder}"]
        words += ["--config", str(ROOT / "configs" / "tiny.yaml"), f"output={folder}/run", *_GIVEN]
        words += [f"train.steps={steps}", f"teacher.transfer.backend={way}"]
        status = run_to_end(
            torchrun_command(str(_WORKER), words, processes=len(_ROLES)),
            environment={"OMP_NUM_THREADS": "1"},
            output=log,
            errors=log,
            seconds=_SECONDS,
        )
        if status != 0:
            log.seek(0)
            raise SystemExit(f"{way} failed:\n{log.read()[-4000:]}")
        files = {role: Path(folder) / f"{rank}.json" for rank, role in enumerate(_ROLES)}
        return {role: json.loads(path.read_text("utf-8")) for role, path in files.items()}


def _table(way: str, found: dict[str, _Looks]) -> list[str]:
    """Return the rows of a way, of all roles side by side."""
    columns = [(role, kind) for role in _ROLES for kind in _KINDS]
    return [
        f"Answers by `{way}`, MiB:",
        "",
        f"| step | {' | '.join(f'{role}, {kind}' for role, kind in columns)} |",
        "|---:|" + "---:|" * len(columns),
        *(
            f"| {int(step):,} | "
            + " | ".join(f"{found[role][step][kind] / 2**20:.2f}" for role, kind in columns)
            + " |"
            for step in found[_ROLES[0]]
        ),
        "",
    ]


if __name__ == "__main__":
    sys.exit(main())

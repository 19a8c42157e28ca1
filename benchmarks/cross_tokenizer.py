"""A step with a teacher of another tokenizer beside TRL's GOLD trainer, and the losses alone.

    python benchmarks/cross_tokenizer.py                   # eleven minutes; extra `bench` installed
    python benchmarks/cross_tokenizer.py --quick           # one turn, one peer: three minutes
    python benchmarks/cross_tokenizer.py --only step       # one part; the file keeps the others
    python benchmarks/cross_tokenizer.py --profile common  # operators of our step

All subjects of a part take turns in one process. `--folder` keeps tokenizers and models.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.cross_tokenizers.planned import LOSSES, planned_row
from benchmarks.cross_tokenizers.texts import BATCH, LENGTH, MODELS, prepare
from benchmarks.harness.calibrated import (
    PLANNED_COLUMNS,
    calibrated,
    dumped,
    loaded,
    plan_cells,
)
from benchmarks.harness.children import run_child
from benchmarks.harness.environment import ROOT, describe, installed

_CHILD_SECONDS: Final = 600
_MIB: Final = 2**20
_WIDTH: Final = 170
_PACKAGES: Final = ("transformers", "tokenizers", "accelerate")
_BUSY_CORES: Final = 0.3
_PEER: Final = "TRL, "
_PARTS: Final = {
    "step": "A training step",
    "hidden": "The loss from hidden states",
    "logits": "The loss from logits",
}
_NOTE: Final = f"""\
Both sides have the same random Llama models of `transformers` (fp32, SDPA attention, no
recomputation), the same two byte-level BPEs, trained on different files of Python's standard
library, and the same {BATCH} texts, one in a sequence of at most {LENGTH} tokens. Ours reads the
models into Megatron. First the cross-entropy of the texts and all logits of both models are
compared with those of `transformers` alone; where one differs by 1e-4, nothing is measured.

Times are medians of turns in one process, `best` the shortest turn, `others` the cores that other
processes used meanwhile. `tokens/s` counts the student's labels. `peak` is the most bytes of
tensors alive at once above those before. Ratios are the peer's figure over that of the row: above
one is in the row's favour. The losses are of different definitions, and so are values.
"""
# Meaning of each part's rows; only those of measured parts are written.
_NOTES: Final = {
    "step": """\
A step is the forward pass of teacher and student, the loss, the backward pass, the clipping of
gradients and AdamW. Ours always has cross-entropy on all labels too. TRL's is `GOLDTrainer`'s
`training_step` on a batch of its data loader, without generation (`lmbda` 0) and checkpointing; its
rows are settings of `GOLDConfig`, and leave the prompt (the first line) and the last token out. It
tokenises the teacher's texts within the step; ours tokenises twice, aligns, packs and plans the
rows of the loss in threads beside the step, in the time given as `preparation`. The peak includes
the gradient buffers, which live on between our steps and are made anew in each of TRL's. `planned`
is the planner's time on this machine, calibrated before and after: the median of both plans.
""",
    "hidden": """\
The loss from hidden states includes the products of both heads and cross-entropy as in the step;
ours adds the head's gradient to a buffer, as in training. Forward and backward.
""",
    "logits": """\
The loss from logits is `cross_tokenizer_divergence` beside rows of `ULDLoss`. Forward and backward.
""",
}


def main() -> int:
    """Measure, print, and save the results."""
    arguments = _arguments()
    console = Console(width=_WIDTH)
    if installed("trl") is None:
        console.print("The peer needs trl: pip install -e '.[bench]'")
        return 1
    environment = describe("benchmarks/cross_tokenizer.py", sys.argv[1:])
    environment |= {name: installed(name) or "not installed" for name in _PACKAGES}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder)
        if arguments.profile:
            found = _run("step", folder, arguments)
            console.print(found["profile"], markup=False)
            return 0
        for part in _PARTS if arguments.only is None else [arguments.only]:
            devices = [calibrated()] if part == "step" and not arguments.quick else []
            measured = {"environment": environment, **_run(part, folder, arguments)}
            devices += [calibrated()] if devices else []
            if devices:
                measured["devices"] = dumped(devices)
            console.print("\n".join(_section(part, measured)), markup=False)
            _write(arguments.output, arguments.name, part, measured)
    return 0


def _planned(measured: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the planned seconds of our rows; empty where the machine was not calibrated."""
    devices = loaded(measured.get("devices", ()))
    return {
        name: [planned_row(name, device).time.total for device in devices]
        for name in measured["rows"]
        if devices and name in LOSSES
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=_PARTS, help="one of the tables")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each subject")
    parser.add_argument("--quick", action="store_true", help="one turn of each, and GOLD alone")
    parser.add_argument(
        "--profile", default="", metavar="ROW", help="no tables: operators of a row"
    )
    parser.add_argument("--peers", default="", metavar="ROWS", help="as GOLD,ULD; default: all")
    parser.add_argument("--folder", type=Path, help="keep tokenizers and models here")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--name", default="cross_tokenizer", help="what the result files are called"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.peers = 1, "GOLD"
    return arguments


def _run(part: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    words = [f"--part={part}", f"--folder={folder}", f"--rounds={arguments.rounds}"]
    words += [f"--profile={arguments.profile}", f"--peers={arguments.peers}"]
    measured: dict[str, Any] = run_child(
        "cross_tokenizers/worker.py", words, processes=1, name=part, seconds=_CHILD_SECONDS
    )
    return measured


def _section(part: str, measured: Mapping[str, Any]) -> list[str]:
    rows, facts = measured["rows"], measured["facts"]
    peers = {name: row for name, row in rows.items() if name.startswith(_PEER)}
    heads = [f"time, {name.removeprefix(_PEER)}" for name in peers]
    heads += [f"peak, {name.removeprefix(_PEER)}" for name in peers]
    plans = _planned(measured)
    columns = ["s", "best s", *(PLANNED_COLUMNS if plans else [])]
    columns += ["tokens/s", "others", "peak MiB", "value", *heads]
    lines = [f"## {_PARTS[part]}", "", _NOTES[part]]
    lines += [f"- {key}: {value}" for key, value in measured["environment"].items()]
    busy = max(max(row["others"]) for row in rows.values())
    if busy > _BUSY_CORES:
        lines.append(f"- disturbed: other processes used up to {busy:.1f} cores meanwhile")
    lines += ["", f"| loss | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for name, row in rows.items():
        cells = [
            f"{row['median']:.3f}",
            f"{row['best']:.3f}",
            *(plan_cells(plans.get(name, ()), row["median"]) if plans else []),
            f"{facts['labels'] / row['median']:,.0f}",
            f"{sorted(row['others'])[len(row['others']) // 2]:.2f}",
            f"{_peak(row) / _MIB:,.0f}",
            f"{row['value']:.3g}",
        ]
        for found in ("median", None):
            for peer in peers.values():
                ratio = peer[found] / row[found] if found else _peak(peer) / _peak(row)
                cells.append("" if row in peers.values() else f"{ratio:.2f}x")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    sizes = ", ".join(f"{count:,.0f} {name}" for name, count in facts.items())
    lines += ["", f"{sizes}. Preparation: {measured['prepare_seconds'] * 1e3:.0f} ms.", ""]
    for role, found in measured.get("baselines", {}).items():
        lines.append(
            f"- {role}, untrained: {found['ours']:.6f} nats per label, by transformers alone "
            f"{found['transformers']:.6f}; logits differ by at most {found['logit_difference']:.1e}"
        )
    return [*lines, ""]


def _published(folder: Path) -> str:
    """Return the published figures that conversion and scorer reproduce, from their record."""
    path = folder / "published.json"
    if not path.exists():
        return "No published figure has been reproduced: run `python benchmarks/published.py`."
    figure = json.loads(path.read_text(encoding="utf-8"))["figure"]
    return f"Reproduced by conversion and scorer ([record](published.md)): {figure}."


def _peak(row: Mapping[str, Any]) -> int:
    return int(row["peak"]) + int(row["buffers"])


def _write(folder: Path, name: str, part: str, measured: Mapping[str, Any]) -> None:
    """Replace one part of the result files."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    parts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    parts[part] = measured
    path.write_text(json.dumps(parts, indent=1), encoding="utf-8")
    shapes = [
        f"- {role}: {shape.layers} layers of width {shape.hidden}, {shape.heads} heads, "
        f"feed-forward {shape.intermediate}, vocabulary {shape.vocabulary:,}"
        for role, shape in MODELS.items()
    ]
    lines = ["# A teacher of another tokenizer", "", _NOTE, *shapes, "", _published(folder), ""]
    for one in _PARTS:
        if one in parts:
            lines += _section(one, parts[one])
    (folder / f"{name}.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

"""Peaks of recorded losses alone, forward and backward, against the planner's bytes of them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from benchmarks.objectives.planned import planned_from_hidden, planned_from_logits
from megatron_distill.planning.device import DeviceProfile, Precision, load_device
from megatron_distill.planning.run import LossTerm
from tests.guards.source_tree import ROOT

RESULTS = ROOT / "benchmarks" / "results"
CPU = load_device("a100-80gb").model_copy(update={"kind": "cpu", "cores": 2})
GPU = load_device("h100-80gb-torch")
SHAPES = {"v32k": (1024, 32_768), "v152k": (256, 151_936)}  # tokens and vocabulary of losses.json
H100 = (8192, 128_256)  # of gpu.json
DIVERGENCES = {"jsd": "js_divergence", "top-k": "forward_kl"}


class Row(NamedTuple):
    """A loss of ours in a record; subject as there, `vocabulary` of all tensor ranks."""

    source: str
    family: str
    subject: str
    tokens: int
    vocabulary: int
    split: int
    precision: Precision
    device: DeviceProfile
    peak: float

    def __str__(self) -> str:
        return f"{self.source} {self.family}, {self.subject}"

    @property
    def planned(self) -> float:
        name = self.family.removeprefix("fused ").split(",")[0]
        if self.family.startswith("fused"):
            return planned_from_hidden(
                DIVERGENCES.get(name, "forward_kl"),
                tokens=self.tokens,
                vocabulary=self.vocabulary,
                hidden=int(self.family.split()[-1]),
                precision=self.precision,
                device=self.device,
                gradient="into a buffer" if "buffer" in self.subject else "returned",
            )
        term = LossTerm(64, has_tail="tail" in self.subject) if name == "top-k" else None
        return planned_from_logits(
            DIVERGENCES.get(name, name),
            tokens=self.tokens,
            columns=self.vocabulary // self.split,
            precision=self.precision,
            device=self.device,
            split=self.split,
            ids=term,
            overwrites="over the logits" in self.subject,
        )


def ours(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of ours with a peak; loops have times alone."""
    return [row for row in rows if row["subject"].startswith("ours") and row["extra_bytes"]]


def recorded_on_cpus() -> list[Row]:
    cases = json.loads((RESULTS / "losses.json").read_text(encoding="utf-8"))["cases"]
    found = []
    for case, rows in cases.items():
        shape, precision, tensor = case.split("/")
        split = int(tensor.removeprefix("TP"))
        device = CPU.shared_by(split)
        found += [
            Row(case, row["family"], row["subject"], *SHAPES[shape], split, precision, device,
                row["extra_bytes"])
            for row in ours(rows)
        ]  # fmt: skip
    return found


def recorded_on_the_gpu() -> list[Row]:
    runs = json.loads((RESULTS / "gpu.json").read_text(encoding="utf-8"))["runs"]
    parts = [run["parts"]["losses"] for run in runs if "losses" in run["parts"]]
    rows = [row for part in parts for kind in ("hidden", "logits") for row in part.get(kind, ())]
    return [
        Row("H100", row["family"], row["subject"], *H100, 1, "bf16", GPU, row["extra_bytes"])
        for row in ours(rows)
    ]


def recorded_memory() -> list[Row]:
    lines = (RESULTS / "memory.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip().replace(",", "") for cell in line.split("|")[1:-1]] for line in lines]
    found = []
    for loss, precision, vocabulary, tokens, peak, *_ in (row for row in cells if len(row) > 5):
        if loss.startswith(("fused", "logits")):
            family = "fused linear width 256" if loss.startswith("fused") else "forward_kl"
            found.append(
                Row("memory.md", family, loss, int(tokens), int(vocabulary), 1, precision,
                    CPU.shared_by(1), float(peak) * 2**20)
            )  # fmt: skip
    return found


ROWS = {
    "losses.json": (recorded_on_cpus(), 116),
    "gpu.json": (recorded_on_the_gpu(), 19),
    "memory.md": (recorded_memory(), 62),
}


@pytest.mark.parametrize("record", ROWS)
def test_every_recorded_loss_of_ours_needs_the_planned_memory(record: str) -> None:
    rows, count = ROWS[record]
    assert len(rows) == count
    errors = {str(row): row.planned / row.peak - 1 for row in rows}
    beyond = {name: error for name, error in errors.items() if abs(error) > 0.10}
    assert not beyond

"""The files of a result: Markdown to read, CSV to plot, JSON with every timed step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.harness.summary import Ratio, Row, markdown_table, write_csv

_PEER_NOTE = """\
All subjects have the same models, initial weights, random tokens, layers (torch SDPA attention),
gradient buffers and distributed AdamW, and ran in turns in fresh processes. The peer is
Megatron-Core's GPTModel with ModelOpt's `LogitsKLLoss`, CE included, and a plain sum of both. In
fp32 its CE works on a copy of the logits, because Megatron-Core's overwrites them before ModelOpt
reads them; `peer-unrepaired` leaves the copy out and gets another KL. `peer-stock` has the
attention that Megatron-Core brings where there is no Transformer Engine: every score in memory.

Ratios above one are in our favour. `fastest step` compares the shortest steps, which other
processes disturb least; `with gradients` counts the gradient buffers as part of the step. The loss
columns are relative differences of CE and KL at the first and the last step, the larger one.
"""
_COLUMNS_NOTE = """\
Times are medians over all timed steps of all rounds. `cpu s` are the processor seconds of a step,
all ranks and threads together; `others` is how many cores other processes used meanwhile.
`teacher` is the share of the step until the teacher's hidden states are there; its output head runs
inside the objective.

`step peak` is the most bytes of tensors alive at once during one step above what lives between
steps: the weights of both models, Megatron's gradient buffers and the optimizer's state (MiB, in
columns of their own and the same for both subjects). `resident` is the kernel's high-water mark of
the process during one step above its resident size before, freed memory handed back first; it sees
every allocator. Memory is that of the largest rank.
"""


class Results(Protocol):
    """Content of a result's files."""

    layouts: list[Row]
    peers: list[Row]
    ratios: list[Ratio]
    raw: dict[str, Any]

    def tables(self) -> dict[str, Sequence[Row | Ratio]]:
        """Return the tables by name, including empty ones."""


def write_report(
    folder: Path, name: str, environment: Mapping[str, str], measured: Results
) -> None:
    """Write `name`.md, `name`.json and one CSV per table."""
    for title, rows in measured.tables().items():
        if rows:
            write_csv(folder / f"{name}_{title}.csv", rows)
    kept = {"environment": dict(environment), "rounds": measured.raw}
    (folder / f"{name}.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
    (folder / f"{name}.md").write_text(_markdown(environment, measured), encoding="utf-8")


def _markdown(environment: Mapping[str, str], measured: Results) -> str:
    parts = ["# The training step\n"]
    parts.append("\n".join(f"- {key}: {value}" for key, value in environment.items()) + "\n")
    parts.append(_COLUMNS_NOTE)
    if measured.layouts:
        parts += ["## Our step per layout\n", markdown_table(measured.layouts)]
    if measured.peers:
        parts += ["## Beside Megatron-Core with ModelOpt\n", _PEER_NOTE]
        parts += [markdown_table(measured.ratios), markdown_table(measured.peers)]
    return "\n".join(parts)

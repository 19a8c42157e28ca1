"""The preview: every token once, under the mask that training gives it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_distill.data.preview import PreviewTotals, histogram, legend, sample_text, token_kinds
from megatron_distill.data.samples import (
    CE_TRAINED,
    FULLY_TRAINED,
    KD_TRAINED,
    Sample,
    weight_flag,
)
from tests.guards.source_tree import ROOT
from tests.support.chat_fixtures import chat_tokenizer, turns, write_rows
from tests.support.sample_configs import ARCHITECTURE

TOKENIZER = chat_tokenizer("qwen25")


def sample() -> Sample:
    """Two documents, all kinds of labels, a weight, and padding."""
    parts = [
        ("Hi [b]", 0, 0),
        (" yo", 0, FULLY_TRAINED),
        (" half", 0, FULLY_TRAINED | weight_flag(0.5)),
        ("x", 1, FULLY_TRAINED),  # begins a document: no label
        (" ask", 1, KD_TRAINED),
        (" say", 1, CE_TRAINED),
        ("<|im_end|>", -1, 0),
    ]
    rows = [TOKENIZER.encode_batch([text])[0] for text, _, _ in parts]
    sizes = [len(row) for row in rows]
    documents = np.repeat([document for _, document, _ in parts], sizes)
    flags = np.repeat([flag for _, _, flag in parts], sizes)
    return Sample(np.concatenate(rows), documents.astype(np.int32), flags.astype(np.uint8), 0)


def test_text_is_marked_as_it_is_trained() -> None:
    plain = sample_text(sample(), TOKENIZER, isolate_documents=True, has_colour=False).plain
    assert plain == (
        "\n-- document 0 --\nHi [b][[ yo]][[(x0.5)  half]]\n-- document 1 --\nx(( ask)){{ say}}\n"
        "... 1 token of padding"
    )
    text = sample_text(sample(), TOKENIZER, isolate_documents=True, has_colour=True)
    styled = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styled[" yo"] == "bold green"
    assert styled[" ask"] == "cyan"
    assert styled["Hi [b]"] == "dim"
    assert "[[" not in text.plain
    assert "[[" in legend(has_colour=False).plain


def test_totals_count_each_kind() -> None:
    one, totals = sample(), PreviewTotals()
    totals.add(one, token_kinds(one, isolate_documents=True))
    real = one.document_ids_S1 >= 0
    assert (totals.padding, totals.positions) == (1, len(real))
    assert totals.lengths == np.bincount(one.document_ids_S1[real]).tolist()
    trained = one.flags_S1 * (np.diff(one.document_ids_S1, prepend=-1) == 0)
    assert totals.ce_labels == int(((trained & CE_TRAINED) > 0).sum())
    assert totals.kd_labels == int(((trained & KD_TRAINED) > 0).sum())
    counted = [int(line.rsplit(" ", 1)[1]) for line in histogram([1, 1, 5, 90], width=60)]
    assert sum(counted) == 4
    assert max(map(len, histogram([1, 1, 5, 90], width=60))) <= 60


def call_tool(
    folder: Path, config: dict[str, Any], *words: str
) -> subprocess.CompletedProcess[str]:
    """Preview two samples of a run."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({**config, "output": str(folder / "run")}))
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "preview_data.py", path, "--samples", "2", *words],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "COLUMNS": "100"}, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_the_tool_shows_conversations_and_documents_alike(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path / "tokenizer")
    write_rows(
        tmp_path / "a.jsonl", [{"messages": turns(f"ask {i}", f"say {i}")} for i in range(9)]
    )
    config = {
        "student": {"architecture": ARCHITECTURE},
        "data": {
            "sources": [
                {"format": "jsonl", "paths": str(tmp_path / "a.jsonl"), "conversation": {}},
                {"format": "python_stdlib"},
            ],
            "tokenizer": {"path": str(tmp_path / "tokenizer")},
            "sequence_length": 300,
        },
        "train": {"steps": 3, "global_batch_size": 4},
    }
    found = call_tool(tmp_path, config, "--counted", "6")
    assert found.returncode == 0, found.stderr
    assert re.search(r"\[\[say \d<\|im_end\|>\]\]", found.stdout)
    assert "sample 1" in found.stdout
    assert "sample 2" not in found.stdout
    whole, *parts = [
        int(text.replace(",", "")) for text in re.findall(r"tokens ([\d,]+), doc", found.stdout)
    ]
    assert len(parts) == 2
    assert sum(parts) == whole
    assert "python_stdlib: labels of cross-entropy" in found.stdout
    wrong = call_tool(tmp_path, config, "data.sequence_length=1")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("error: ")

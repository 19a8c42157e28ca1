"""The tools as a user calls them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.e2e.runs import Inputs, environment, run

ROOT = Path(__file__).parents[2]


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "tokenize_corpus.py"), *words],
        capture_output=True, text=True, check=False, timeout=240, env=environment(),
    )  # fmt: skip


@pytest.mark.slow
def test_a_corpus_tokenised_once_trains_a_student(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    prefix = tmp_path / "pair"
    words = ("--tokenizer", str(inputs.tokenizer), "--output", str(prefix), str(inputs.corpus))
    written = call(*words)
    assert written.returncode == 0, written.stderr
    count = len(inputs.corpus.read_text().splitlines())
    assert f"pair.bin and .idx: {count} documents, " in written.stdout
    assert "Transformer Engine" not in written.stderr + written.stdout
    source = json.dumps([{"format": "megatron", "paths": str(prefix)}])
    records = run(
        pool, 2, inputs.folder / "dense.yaml", tmp_path / "run",
        f"data.sources={source}", "train.steps=3", "schedule.warmup_steps=1",
    )  # fmt: skip
    assert [record["step"] for record in records] == [1, 2, 3]
    assert 4.0 < records[0]["ce_loss"] < 8.0
    again = call(*words)
    assert again.returncode == 1
    assert again.stderr == (
        f"error: {prefix}.bin: exists already; choose another --output or add --overwrite\n"
    )

"""The comparison of losses between tokenizers as a newcomer starts it, with very few steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.forked_launches import run_forked
from tests.e2e.runs import environment, records

ROOT = Path(__file__).parents[3]
SECONDS = 600.0
LOSSES = ("common", "likelihood")

pytestmark = pytest.mark.slow


def start(output: Path) -> str:
    script = "launch/quickstart_tokenizers.py"
    words = ("--steps", "4", "--losses", ",".join(LOSSES), "data.validation_fraction=0.005")
    made = run_forked(
        [sys.executable, script, "--output", str(output), *words],
        environment(CUDA_VISIBLE_DEVICES=""),
        ROOT,
        seconds=SECONDS,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def test_it_ends_with_a_table_of_the_losses_and_a_picture(tmp_path: Path) -> None:
    text = start(tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    names = ["teacher", "student alone", *LOSSES]
    assert [row["label"] for row in result["rows"]] == names
    table = (tmp_path / "result.md").read_text()
    for row in result["rows"]:
        assert f"| {row['label']} | {row['bits_per_byte']:.4f} |" in table
        assert f"{row['bits_per_byte']:.4f}" in text
        # After four steps a loss is that of a nearly uniform choice: log2(ids) per label.
        assert 2 < row["bits_per_byte"] < 5
    # Both baselines are those of transformers on the exported folders, before any loss is shown.
    assert result["baselines"].keys() == {"teacher", "student alone"}
    for row in result["rows"][:2]:
        found = result["baselines"][row["label"]]
        assert found["run"] == row["bits_per_byte"]
        assert found["transformers"] == pytest.approx(found["run"], rel=1e-5)
    assert text.index("2/4 student alone") < text.rindex("by transformers alone")
    assert text.rindex("by transformers alone") < text.index(f"3/4 {LOSSES[0]}")
    assert (tmp_path / "student_alone_exported" / "model.safetensors").exists()
    assert result["data_wait"].keys() == {"student alone", *LOSSES}
    for label, wait in result["data_wait"].items():
        assert all(0 <= share < 1 for share in wait.values())
        assert f"| {label} | {wait['median']:.2%} | {wait['mean']:.2%} |" in table
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    students = [records(tmp_path / f"student_{name}") for name in ("alone", *LOSSES)]
    for other in students[1:]:
        assert other[0]["ce_loss"] == pytest.approx(students[0][0]["ce_loss"], rel=1e-6)
        # Step 1 has a learning rate of zero; the losses part from step 3 on.
        assert other[3]["ce_loss"] != students[0][3]["ce_loss"]
    text = start(tmp_path)
    assert text.count("finished before") == len(names)
    assert json.loads((tmp_path / "result.json").read_text()) == result

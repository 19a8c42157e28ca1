"""The quickstart as a newcomer starts it, with very few steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from megatron_distill.store import StoreReader, verify
from tests.e2e.forked_launches import run_forked
from tests.e2e.processes import HOLD, Hold, wait_until
from tests.e2e.runs import environment, records

ROOT = Path(__file__).parents[3]
SECONDS = 600.0

pytestmark = pytest.mark.slow


def test_the_quickstart_ends_with_everything_it_promises(tmp_path: Path) -> None:
    words = ("--output", str(tmp_path), "--offline", "--steps", "4", "validation.samples=8")
    done = run_forked(
        [sys.executable, "launch/quickstart.py", *words],
        environment(CUDA_VISIBLE_DEVICES=""),
        ROOT,
        seconds=SECONDS,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    for promised in ("teacher", "student alone", "distilled student", "nats", "curves.png"):
        assert promised in text
    for promised in ("over 4 drafted tokens: student alone", "(200 items), out of four: teacher"):
        assert promised in text
    for promised in ("from the store", "bytes per token", "times as fast", "with the live"):
        assert promised in text
    assert "leaked" not in text  # what bindings say at the end of a process whose objects linger
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert (tmp_path / "sample.txt").read_text().startswith("def __init__(self, ")
    exported = {path.name for path in (tmp_path / "student_hf").iterdir()}
    assert exported >= {"config.json", "model.safetensors", "tokenizer.json"}
    (checkpoint,) = (tmp_path / "student_distilled" / "checkpoints").iterdir()
    assert str(checkpoint) in text
    steps = [one for one in records(tmp_path / "student_alone") if "validation" not in one]
    assert [one["step"] for one in steps] == [1, 2, 3, 4]
    store = tmp_path / "teacher_store"
    assert not verify(store).problems
    assert StoreReader.open(store).samples == 4 * 8
    online, offline = (
        [one for one in records(tmp_path / name) if "validation" not in one]
        for name in ("student_distilled", "student_offline")
    )
    # The same weights on the same tokens, and a teacher known by 64 of its ids in 8 bits each.
    assert offline[0]["ce_loss"] == pytest.approx(online[0]["ce_loss"], rel=1e-6)
    assert offline[0]["teacher_ce_loss"] == pytest.approx(online[0]["teacher_ce_loss"], rel=1e-3)
    assert offline[-1]["ce_loss"] == pytest.approx(online[-1]["ce_loss"], rel=0.05)
    if find_spec("lm_eval") is not None:  # make peers
        _answers_equal_those_of_the_harness(tmp_path)


def _answers_equal_those_of_the_harness(folder: Path) -> None:
    """On the exported student, with one process and in TP2 x PP2."""
    done = run_forked(
        [
            *(sys.executable, "-m", "benchmarks.lm_eval_agreement", "--limit", "8"),
            *("--quickstart", str(folder), "--output", str(folder)),
        ],
        environment(CUDA_VISIBLE_DEVICES=""),
        ROOT,
        seconds=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")]
    names, *layouts = [[cell.strip() for cell in row] for row in rows]
    assert names[0] == "layout"
    assert [row[0] for row in layouts] == ["one process", "TP2 x PP2"]
    for _, *gaps, greedy, texts in layouts:
        assert max(float(gap) for gap in gaps) <= 1e-3, "the script checks each against its size"
        assert (greedy, texts) == ("0", "0")


def start(output: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "launch/quickstart.py", "--output", str(output), *arguments],
        cwd=ROOT,
        env=environment(CUDA_VISIBLE_DEVICES="", **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def interrupt(child: subprocess.Popen[str], metrics: Path, *, lines: int) -> str:
    """Press Ctrl-C once a log has so many lines; returns what was printed."""
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= lines, child)
    family = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(signal.SIGINT)
    text, _ = child.communicate(timeout=SECONDS)
    assert child.returncode == 130, text
    assert "The same command goes on from here" in text
    _, alive = psutil.wait_procs(family, timeout=SECONDS)
    assert not alive
    return text


def test_ctrl_c_leaves_no_process_and_the_next_call_goes_on(tmp_path: Path) -> None:
    one_process = ("parallel.tensor=1", "parallel.pipeline=1", "validation.samples=8")
    arguments = ("--steps", "12", *one_process)
    metrics, hook = tmp_path / "teacher" / "metrics.jsonl", tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HOLD)
    hold = Hold(metrics, 6).variables(tmp_path) | {"PYTHONPATH": f"{hook}{os.pathsep}{ROOT}"}
    interrupt(start(tmp_path, *arguments, **hold), metrics, lines=2)
    done = len([one for one in records(tmp_path / "teacher") if "validation" not in one])
    assert done < 12

    # Steps after the teacher are in the test above.
    following = tmp_path / "student_alone" / "metrics.jsonl"
    assert f"at step {done}" in interrupt(start(tmp_path, *arguments), following, lines=1)
    steps = [one["step"] for one in records(tmp_path / "teacher") if "validation" not in one]
    assert steps == list(range(1, 13))

"""Measuring processes: one, or as many as there are ranks, each with its share of the cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.environment import ROOT
from megatron_distill.runtime.torchrun import threads_per_process, torchrun_command

__all__ = ["run_child"]


def run_child(
    worker: str,
    words: Sequence[str],
    *,
    processes: int,
    name: str,
    seconds: float,
    threads: int | None = None,
) -> Any:
    """Run a script, a path under benchmarks, which writes its result to the file of ``--result``.

    Each process has its share of the cores, or `threads`.

    Raises SystemExit with the end of its output if it fails.
    """
    script = str(ROOT / "benchmarks" / worker)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        told = [*words, "--result", str(result)]
        command = [sys.executable, script, *told]
        if processes > 1:
            command = torchrun_command(script, told, processes=processes)
        share = str(threads or threads_per_process(processes))
        child = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": share},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if child.returncode:
            raise SystemExit(f"{name} failed:\n{child.stderr[-4000:]}")
        return json.loads(result.read_text(encoding="utf-8"))

"""Scripts of launch/ in processes of their own, and the steps of a run as its log has them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.environment import ROOT
from megatron_distill.runtime.torchrun import threads_per_process, torchrun_command

__all__ = ["launched", "launched_steps"]

_SECONDS: Final = 300


def launched_steps(
    config: str,
    overrides: Sequence[str],
    *,
    folder: Path,
    processes: int,
    name: str,
    threads: int | None = None,
) -> list[dict[str, Any]]:
    """Run a file of configs/ with its output in a folder, and return the log's steps.

    threads: of each process; None: its share of the cores. Raises SystemExit: the run failed.
    """
    words = ["--config", str(ROOT / "configs" / config), f"output={folder}", *overrides]
    launched(
        "pretrain_distill.py",
        words,
        folder=folder.parent,
        processes=processes,
        name=name,
        threads=threads,
    )
    log = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [one for one in map(json.loads, log.splitlines()) if "step_seconds" in one]


def launched(
    script: str,
    words: Sequence[str],
    *,
    folder: Path,
    processes: int,
    name: str,
    threads: int | None = None,
) -> None:
    """Run a script of launch/ in a folder; arguments and errors as of `launched_steps`."""
    share = str(threads or threads_per_process(processes))
    child = subprocess.run(
        torchrun_command(str(ROOT / "launch" / script), words, processes=processes),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": share},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if child.returncode:
        raise SystemExit(f"{name} failed:\n{child.stdout}\n{child.stderr[-4000:]}")

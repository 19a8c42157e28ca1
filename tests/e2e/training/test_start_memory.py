"""A run that will not fit is warned about before its models are built, in a start of two ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.distributed.pool import Pool
from tests.e2e.runs import SECONDS, failure_here, train_here

SHORT = ("train.steps=1", "schedule.warmup_steps=0")


class _Noted(logging.Handler):
    """Keeps the messages in the list of what happened."""

    def __init__(self, happened: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.happened = happened

    def emit(self, record: logging.LogRecord) -> None:
        self.happened.append(record.getMessage())


def started(
    rank: int, world: int, config: Path, overrides: Sequence[str], gib: float, kind: str
) -> tuple[list[str], str]:
    """The events of a start in order, on a machine of so much memory, and the failure."""
    from megatron_distill.planning.device import load_device
    from megatron_distill.train.assemble import run as assembly
    from megatron_distill.train.reports import start_memory
    from megatron_distill.train.reports.memory_check import RankMemory

    happened: list[str] = []
    build = assembly.open_run

    def noted(*given: Any, **named: Any) -> Any:
        happened.append("models")
        return build(*given, **named)

    update = {"memory_gib": gib, "kind": kind, "reserved_gib": 0.0, "title": "a small machine"}
    small = load_device("h100-80gb").model_copy(update=update)
    machine = RankMemory(small, is_limit=kind == "gpu")
    logger, handler = logging.getLogger(start_memory.__name__), _Noted(happened)
    logger.addHandler(handler)
    try:
        with (
            patch.object(start_memory, "_own_memory", lambda *_: machine),
            patch.object(assembly, "open_run", noted),
        ):
            if kind == "gpu":
                return happened, failure_here(rank, world, config, overrides)
            train_here(rank, world, config, overrides)
            return happened, ""
    finally:
        logger.removeHandler(handler)


def test_a_run_that_will_not_fit_is_warned_of_before_models_are_built(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    words, again = ((*SHORT, f"output={tmp_path}/{name}") for name in ("run", "refused"))
    ranks = pool.run(2, started, dense, words, 1e-4, "cpu", timeout=SECONDS)
    (warning, then), second = ranks[0][0], ranks[1][0]
    assert warning.startswith("memory: the fullest rank of this run needs ")
    assert "a small machine has 104.9 KiB" in warning
    assert then == "models"
    assert second[-1] == "models"
    # States above a GPU's memory are an error, on all ranks, with no model built.
    refused = pool.run(2, started, dense, again, 1e-4, "gpu", timeout=SECONDS)
    for happened, failure in refused:
        assert happened == []
        assert failure.startswith("ConfigError: memory: the fullest rank of this run needs ")

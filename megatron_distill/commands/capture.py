"""Capture a teacher's outputs in a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_distill.commands.job import Job

if TYPE_CHECKING:
    from megatron_distill.config import CaptureConfig
    from megatron_distill.runtime.launch import Device
    from megatron_distill.runtime.termination import TerminationRequest


def _load(path: Path, overrides: Sequence[str]) -> CaptureConfig:
    from megatron_distill.config import load_capture_config

    return load_capture_config(path, overrides)


def _capture(config: CaptureConfig, device: Device, termination: TerminationRequest) -> bool:
    # Imported here: it loads Megatron-Core, which must be patched first.
    from megatron_distill.train.assemble.capture import run_capture

    return run_capture(config, device, termination)


def _lock(config: CaptureConfig) -> tuple[Path, str]:
    from megatron_distill.train.capture.order import lock_of_job

    return lock_of_job(Path(config.store.path), config.store.job)


COMMAND = Job(load=_load, run=_capture, lock=_lock).command(
    description="""Run a teacher once and store its top-k or sampled log-probabilities.

    megatron-distill capture cache.yaml store.k=128
    megatron-distill capture cache.yaml --processes 2

An interrupted capture goes on with the same command, in any layout.""",
    example="e.g. parallel.tensor=2 store.k=128",
)

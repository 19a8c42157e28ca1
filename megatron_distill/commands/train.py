"""Train a student, with a teacher or without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_distill.commands.job import Job
from megatron_distill.runtime.folder_lock import LOCK_FILE

if TYPE_CHECKING:
    from megatron_distill.config import RunConfig, TeacherRanks
    from megatron_distill.runtime.launch import Device
    from megatron_distill.runtime.termination import TerminationRequest


def _load(path: Path, overrides: Sequence[str]) -> RunConfig:
    from megatron_distill.config import load_config

    return load_config(path, overrides)


def _train(config: RunConfig, device: Device, termination: TerminationRequest) -> bool:
    # Imported here: it loads Megatron-Core, which must be patched first.
    from megatron_distill.train.assemble.run import run_training

    return run_training(config, device, termination)


def _layout(config: RunConfig, ranks: int, teachers: TeacherRanks) -> str:
    from megatron_distill.train.reports.layout_report import layout_report

    return layout_report(config, ranks=ranks, teachers=teachers)


def _plan(config: RunConfig, devices: int, device: str) -> str:
    from megatron_distill.commands.plan import plan_of

    return plan_of(config, devices, device)


COMMAND = Job(
    load=_load,
    run=_train,
    layout=_layout,
    plan=_plan,
    lock=lambda config: (Path(config.output) / LOCK_FILE, f"output={config.output}"),
).command(
    description="""Train a student, with a teacher or without.

    megatron-distill train tiny.yaml train.steps=10
    megatron-distill train configs/quickstart_teacher.yaml --processes 4

An interrupted run goes on with the same command, in any layout.""",
    example="e.g. parallel.tensor=2 output=runs/a",
)

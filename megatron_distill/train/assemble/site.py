"""The surroundings that a run's models are built in on one rank."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from megatron_distill.models.execution import Execution
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.launch import Device

__all__ = ["Site"]


@dataclass(frozen=True)
class Site:
    """The surroundings that a run's models are built in on one rank.

    Attributes:
        groups: the student's.
        execution: of the student.
        resources: closes files and threads at the end of the run.
    """

    groups: Groups
    execution: Execution
    device: Device
    resources: ExitStack

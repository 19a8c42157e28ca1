"""Train a student, with a teacher or without: torchrun launch/pretrain_distill.py --config FILE."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_distill.train.assemble.command import JobCommand

if TYPE_CHECKING:
    from megatron_distill.config import RunConfig
    from megatron_distill.runtime.launch import Device
    from megatron_distill.runtime.termination import TerminationRequest


def _load(path: str, overrides: Sequence[str]) -> RunConfig:
    from megatron_distill.config import load_config

    return load_config(path, overrides)


def _train(config: RunConfig, device: Device, termination: TerminationRequest) -> bool:
    # Only now: this imports Megatron-Core, which had to be prepared first.
    from megatron_distill.train.assemble.run import run_training

    return run_training(config, device, termination)


main = JobCommand(
    description=__doc__,
    example="e.g. parallel.tensor=2 output=runs/a",
    load=_load,
    run=_train,
)

if __name__ == "__main__":
    sys.exit(main())

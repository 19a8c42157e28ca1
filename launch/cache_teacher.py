"""Keep what a teacher says in a store: torchrun launch/cache_teacher.py --config FILE.

An interrupted capture is started again with the same command, in any layout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_distill.train.assemble.command import JobCommand

if TYPE_CHECKING:
    from megatron_distill.config import CaptureConfig
    from megatron_distill.runtime.launch import Device
    from megatron_distill.runtime.termination import TerminationRequest


def _load(path: str, overrides: Sequence[str]) -> CaptureConfig:
    from megatron_distill.config import load_capture_config

    return load_capture_config(path, overrides)


def _capture(config: CaptureConfig, device: Device, termination: TerminationRequest) -> bool:
    # Only now: this imports Megatron-Core, which had to be prepared first.
    from megatron_distill.train.assemble.capture import run_capture

    return run_capture(config, device, termination)


main = JobCommand(
    description=__doc__,
    example="e.g. parallel.tensor=2 store.k=128",
    load=_load,
    run=_capture,
)

if __name__ == "__main__":
    sys.exit(main())

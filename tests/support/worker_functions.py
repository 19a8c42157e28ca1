"""Worker functions of tests, in a separate module with fast imports."""

from __future__ import annotations

import os
import signal
import time

from megatron_distill.errors import DataError


def slow(item: int) -> tuple[int, int]:
    time.sleep(0.05 if item % 3 == 0 else 0.0)
    return item, os.getpid()


def refusing(item: int) -> int:
    if item == 5:
        raise DataError("five")
    return item


def dying(item: int) -> int:
    if item == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return item

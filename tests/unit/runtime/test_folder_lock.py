"""The lock of a folder while another process has it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from megatron_distill.errors import ConfigError
from megatron_distill.runtime.folder_lock import take_lock
from megatron_distill.runtime.termination import TerminationRequest


def test_a_signal_to_stop_ends_the_wait(tmp_path: Path) -> None:
    held = take_lock(tmp_path / "lock", named="output=runs/a", holder="job 7 on n1")
    began = time.monotonic()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with TerminationRequest() as request, pytest.raises(ConfigError) as refused:
            take_lock(tmp_path / "lock", named="output=runs/a")
    finally:
        os.close(held)
    assert request.received
    assert time.monotonic() - began < 30
    assert str(refused.value).startswith("output=runs/a: another run (job 7 on n1) is writing")

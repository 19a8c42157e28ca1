"""The programs of a Slurm that is not there, and hosts of this machine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.launching.machines import Machines, machines_in
from tests.unit.launching.slurm_programs import StandIn, programs


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[StandIn]:
    with programs(tmp_path) as found:
        yield found


@pytest.fixture
def handlers() -> Iterator[None]:
    """Give the process its handlers of signals back, which a job leaves to its end."""
    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return machines_in(tmp_path)

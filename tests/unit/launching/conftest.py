"""The programs of a Slurm that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.launching.slurm_programs import StandIn, programs


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[StandIn]:
    with programs(tmp_path) as found:
        yield found

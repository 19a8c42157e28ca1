"""The time of a start by part."""

from __future__ import annotations

import re
import time

import psutil
import pytest

from megatron_distill.train.start_clock import StartClock


def test_the_parts_of_a_start_add_up_to_the_time_since_the_process_began() -> None:
    began, now = psutil.Process().create_time(), time.time()
    whole = now - began
    clock = StartClock(joined=now - 0.75 * whole, opened=now - 0.25 * whole)
    line = clock.line(load_seconds=0.1 * whole, step_seconds=0.05 * whole)
    assert line is not None
    first, *parts = map(float, re.findall(r"([\d.]+) s", line))
    assert first == pytest.approx(whole, abs=1.0)
    wanted = [0.25 * whole, 0.4 * whole, 0.1 * whole, 0.05 * whole]
    if len(parts) == 5:  # a young process has nothing to show before the step
        wanted.insert(3, 0.2 * whole)
    assert parts == pytest.approx(wanted, abs=0.2)


def test_ranks_that_had_met_before_have_no_start() -> None:
    assert StartClock(joined=None).line(load_seconds=0.0, step_seconds=1.0) is None

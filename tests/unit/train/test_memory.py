"""Memory of a process: its peak, and the collection of cycles between steps."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch

from megatron_distill.train import throughput as memory
from megatron_distill.train.loop import StepGarbage

CPU = torch.device("cpu")
SIZE = 200_000_000


@pytest.mark.slow
def test_the_peak_rises_by_the_touched_memory_and_stays_after_it_is_freed() -> None:
    program = (
        "import torch, sys; from megatron_distill.train.throughput import peak_memory_bytes\n"
        "before = peak_memory_bytes(torch.device('cpu'))\n"
        f"block = torch.ones({SIZE}, dtype=torch.uint8)\n"
        "held = peak_memory_bytes(torch.device('cpu'))\n"
        "del block; print(before, held, peak_memory_bytes(torch.device('cpu')))"
    )
    reported = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    before, held, after = map(int, reported.stdout.split())
    assert 0.9 * SIZE < held - before < 1.2 * SIZE
    assert after > before + 0.9 * SIZE


def test_both_ways_of_asking_a_cpu_agree(monkeypatch, tmp_path) -> None:
    from_kernel = memory.peak_memory_bytes(CPU)
    monkeypatch.setattr(memory, "_PROCESS_STATUS", tmp_path / "missing")
    from_usage = memory.peak_memory_bytes(CPU)
    # The second may be a parent's peak, so it may be larger, by less than a wrong unit makes it.
    assert 0.9 * from_kernel <= from_usage < 100 * from_kernel


def test_the_memory_of_a_block_that_is_left_out_does_not_count() -> None:
    peak = memory.PeakMemory(CPU)
    with peak.left_out():
        pass  # the peak of the tests before
    peak = memory.PeakMemory(CPU)
    before = peak.bytes
    with peak.left_out():
        block = torch.ones(SIZE, dtype=torch.uint8)
        assert memory.peak_memory_bytes(CPU) - before > 0.9 * SIZE
        del block
    assert peak.bytes - before < 0.1 * SIZE
    block = torch.ones(SIZE // 2, dtype=torch.uint8)
    assert 0.4 * SIZE < peak.bytes - before < 0.6 * SIZE
    del block
    assert peak.bytes - before > 0.4 * SIZE, "it is that of the run so far"


class Cycle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


def test_cycles_are_freed_after_every_nth_step_only() -> None:
    assert gc.isenabled()
    gc.freeze()  # a collection need not scan what the tests before this one have left
    with StepGarbage(interval=3) as garbage:
        assert not gc.isenabled()
        alive = []
        for step in range(1, 7):
            found = weakref.ref(Cycle())
            garbage.after_step(step)
            alive.append(found() is not None)
    gc.unfreeze()
    assert gc.isenabled()
    assert alive == [True, True, False, True, True, False]

"""Collections happen after the same steps on all ranks, and never between."""

from __future__ import annotations

import gc
import weakref

from megatron_distill.train.loop import StepGarbage


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

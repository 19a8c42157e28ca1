"""Steps of the loop of `train` beside the same steps alone; started by benchmarks/gpu.py.

The loop's steps have its loader, the vote of all ranks, timers and log besides: what the host does
while the device has no work is in them alone.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.environment import ROOT
from megatron_distill.config import load_config
from megatron_distill.runtime.launch import joined_world
from megatron_distill.runtime.termination import TerminationRequest
from megatron_distill.runtime.torchrun import threads_per_process

if TYPE_CHECKING:
    from megatron_distill.data.prefetch import StepSource
    from megatron_distill.data.samples import State
    from megatron_distill.runtime.batch import StepBatches
    from megatron_distill.train.loop import LoopInputs, LoopPlan

_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Watched:
    """A source of batches that keeps them, and the times at which they were asked for."""

    source: StepSource
    batches: list[StepBatches] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def take(self, step: int) -> StepBatches:
        """Return the source's batches of a step."""
        self.times.append(time.perf_counter())
        self.batches.append(self.source.take(step))
        return self.batches[-1]

    def state_dict(self) -> State:
        """Return the source's position."""
        return self.source.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Set the source's position."""
        self.source.load_state_dict(state)


def main() -> None:
    """Measure a run of `configs/tiny.yaml` with the overrides of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="+")
    parser.add_argument("--result", required=True, type=Path)
    arguments = parser.parse_args()
    config = load_config(ROOT / "configs" / "tiny.yaml", arguments.overrides)
    found: dict[str, list[float]] = {}
    with joined_world(
        device="auto",
        backend="auto",
        threads=threads_per_process(1),
        timeout_seconds=_TIMEOUT_SECONDS,
    ) as device:
        # Imported late: these import Megatron-Core, which must be prepared first.
        from megatron_distill.train.assemble import run
        from megatron_distill.train.loop import train

        def measured(parts: LoopInputs, plan: LoopPlan, *others: Any) -> bool:
            watched = Watched(parts.loader)
            is_done = train(replace(parts, loader=watched), plan, *others)
            found["loop"] = [end - start for start, end in pairwise(watched.times)]
            found["alone"] = _alone(parts, plan, watched.batches)
            return is_done

        vars(run)["train"] = measured
        run.run_training(config, device, TerminationRequest())
    arguments.result.write_text(json.dumps(found), encoding="utf-8")


def _alone(parts: LoopInputs, plan: LoopPlan, batches: list[StepBatches]) -> list[float]:
    """Return the seconds of further steps on the same batches, which are on the device."""
    from megatron_distill.train.step import train_step

    state, taken = parts.state, []
    assert parts.teacher is not None
    for step in batches:
        started = time.perf_counter()
        signals = parts.teacher.signals(step.micro_batches)
        train_step(  # it reads the losses at its end
            state.student,
            state.optimizer,
            state.schedule,
            signals,
            [parts.objective] * len(signals),
            step,
            clip_grad_norm=plan.clip_grad_norm,
        )
        taken.append(time.perf_counter() - started)
    return taken


if __name__ == "__main__":
    main()

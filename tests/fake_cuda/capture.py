"""A capture of one rank, watched in all of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

from megatron_distill.config import load_capture_config
from megatron_distill.data.loader import StepLoader
from megatron_distill.runtime.termination import TerminationRequest
from tests.fake_cuda.host_side import read_on_the_host, run_on_the_host
from tests.fake_cuda.opened import CUDA, open_world


def main(rank: int, world: int, path: str, overrides: Sequence[str]) -> None:
    """Capture as this rank, and print what was seen; there are no numbers to write."""
    config = load_capture_config(path, overrides)
    opened = open_world(rank, world)
    from megatron_distill.train.assemble import capture as assembly
    from megatron_distill.train.capture import loop

    patch.object(assembly, "on_first_rank", lambda work, **_: work()).start()
    run_on_the_host(assembly, "on_first_rank", "open_tokenizer", "keep_tokenizer")
    run_on_the_host(StepLoader, "taken_samples")
    fill, steps = opened.watched(assembly.fill_holes), list[int]()
    records = list[Any]()

    def filled(parts: Any, termination: TerminationRequest) -> bool:
        steps.append(parts.order.steps)
        fill(parts, termination)
        return False  # the store has no records

    def built(*given: Any) -> Iterator[Any]:
        records.append(given)
        return iter(())

    patch.object(assembly, "fill_holes", filled).start()
    patch.object(loop, "build_records", built).start()
    with opened.mode() as mode:
        read_on_the_host(mode)
        is_done = assembly.run_capture(config, CUDA, TerminationRequest())
    opened.print_seen(is_done=is_done, steps=steps, records=len(records))

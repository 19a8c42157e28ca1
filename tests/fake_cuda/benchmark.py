"""A worker of `benchmarks/gpu.py`, watched while it measures; there are no numbers to report."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from megatron_distill.runtime.launch import Device
from tests.fake_cuda.host_side import fake
from tests.fake_cuda.opened import CUDA, open_world
from tests.fake_cuda.watching_mode import WatchingMode


def main(rank: int, world: int, worker: str, words: Sequence[str]) -> None:
    """Run a worker, a module under `benchmarks`, with these words."""
    opened = open_world(rank, world)
    module = importlib.import_module(f"benchmarks.{worker}")
    patch.object(module, "joined_world", _joined).start()
    patch.object(sys, "argv", [worker, *words]).start()
    with opened.mode() as mode:
        _draw_on_the_host(mode)
        opened.watched(module.main)()
    opened.print_seen()


class _HostGenerator(torch.Generator):
    """In place of one of the device, of which torch's CPU build has none."""

    def __new__(cls, *_: Any) -> _HostGenerator:
        return super().__new__(cls)


@contextmanager
def _joined(**_: Any) -> Iterator[Device]:
    """The world is open."""
    yield CUDA


def _draw_on_the_host(mode: WatchingMode) -> None:
    """Let batches be drawn with real tensors, and their copies be fake ones on the device."""
    from benchmarks.harness import peak
    from benchmarks.steps import subject

    draw = subject.random_batches

    def drawn(*given: Any, device: torch.device, **named: Any) -> Any:
        with unset_fake_temporarily():
            batches = draw(*given, device=torch.device("cpu"), **named)
        return fake(batches, mode, device)

    patch.object(torch, "Generator", _HostGenerator).start()
    patch.object(subject, "random_batches", drawn).start()
    # Storages without memory have no address.
    patch.object(peak, "_storage_bytes", lambda *_: 0).start()
    patch.object(peak, "LiveStorages", lambda: nullcontext(SimpleNamespace(peak=0))).start()

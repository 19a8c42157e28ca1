"""What a rank does on the host, with real tensors: it reads for itself whichever rank it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from megatron_distill.data import loader, prefetch
from megatron_distill.data.loader import Wire
from megatron_distill.runtime.batch import Batch, StepBatches
from megatron_distill.runtime.segments import PackedPiece, Segments
from tests.fake_cuda.watching_mode import WatchingMode


@contextmanager
def as_first_rank() -> Iterator[None]:
    """Real tensors, and the work of the first rank."""
    with unset_fake_temporarily(), patch.object(dist, "get_rank", lambda *_: 0):
        yield


class OwnWire(Wire):
    """Every rank reads the whole global batch for itself."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self._is_alone = self.is_sender = True


def read_on_the_host(mode: WatchingMode) -> None:
    """Let loaders read real samples and hand out fake ones, for the rest of the process."""
    take = loader.StepLoader.take_on_host

    def taken(self: loader.StepLoader, step: int) -> StepBatches:
        with as_first_rank():
            batches = take(self, step)
        fakes = tuple(_fake(batch, mode) for batch in batches.micro_batches)
        return replace(batches, micro_batches=fakes)

    def begun(self: prefetch._Ahead[Any], step: int) -> Future[Any]:
        # Here and not in a thread, where tensors are not fake.
        taking: Future[Any] = Future()
        taking.set_result(self._work(step))
        return taking

    patch.object(loader, "Wire", OwnWire).start()
    patch.object(loader.StepLoader, "take_on_host", taken).start()
    patch.object(prefetch._Ahead, "_begin", begun).start()


def _fake(batch: Batch, mode: WatchingMode) -> Batch:
    def faked(value: Any) -> Any:
        if isinstance(value, Segments):
            return replace(value, packed=tuple(faked(piece) for piece in value.packed))
        if isinstance(value, PackedPiece):
            ends = {name: faked(getattr(value, name)) for name in ("query_ends", "key_ends")}
            return replace(value, **ends)
        return mode.from_tensor(value) if isinstance(value, Tensor) else value

    found = {field.name: faked(getattr(batch, field.name)) for field in fields(batch)}
    return Batch(**{**found, "copied_from": batch})


def agree_with_itself() -> None:
    """Let every rank say what this one says, where objects are exchanged."""

    def all_gather_object(answers: list[Any], text: Any, **_: Any) -> None:
        answers[:] = [text] * len(answers)

    patch.object(dist, "all_gather_object", all_gather_object).start()
    patch.object(dist, "broadcast_object_list", lambda *_, **__: None).start()


def mesh_on_the_host(make: Callable[..., Any]) -> Callable[..., Any]:
    """A mesh of devices computes its coordinates with real tensors."""

    def made(*given: Any, **named: Any) -> Any:
        with unset_fake_temporarily():
            return make(*given, **named)

    return made


def run_on_the_host(owner: Any, *names: str) -> None:
    """Let these functions of a module or a class run as those of the first rank do."""

    def on_host(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            with as_first_rank():
                return work(*given, **named)

        return run

    for name in names:
        patch.object(owner, name, on_host(getattr(owner, name))).start()

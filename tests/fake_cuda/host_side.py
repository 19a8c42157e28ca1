"""Work of a rank on the host, with real tensors: it reads for itself whichever rank it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from megatron_distill.data import loader, prefetch
from megatron_distill.data.loader import Wire
from megatron_distill.runtime.batch import Batch, StepBatches
from tests.fake_cuda.watching_mode import WatchingMode

_ON_HOST = ("copied_from", "whole_teacher")  # of a batch: real tensors that the host reads


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
        fakes = tuple(fake(batch, mode) for batch in batches.micro_batches)
        return replace(batches, micro_batches=fakes)

    def begun(self: prefetch._Ahead[Any], step: int) -> Future[Any]:
        # Here and not in a thread, where tensors are not fake.
        taking: Future[Any] = Future()
        taking.set_result(self._work(step))
        return taking

    patch.object(loader, "Wire", OwnWire).start()
    patch.object(loader.StepLoader, "take_on_host", taken).start()
    patch.object(prefetch._Ahead, "_begin", begun).start()


def fake(value: Any, mode: WatchingMode, device: torch.device | None = None) -> Any:
    """Return it with fake tensors in place of real ones, on a device if one is given."""
    if isinstance(value, Tensor):
        found = mode.from_tensor(value)
        return found if device is None else found.to(device)
    if isinstance(value, dict):
        return {name: fake(one, mode, device) for name, one in value.items()}
    if type(value) is tuple:
        return tuple(fake(one, mode, device) for one in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    named = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    on_host = {name: named[name] for name in _ON_HOST if name in named}
    own = {name: fake(one, mode, device) for name, one in named.items()} | on_host
    if isinstance(value, Batch):
        own["copied_from"] = value
    return replace(value, **own)


def agree_with_itself(note: Callable[[], None] = lambda: None) -> None:
    """Give every rank the object of this one where objects are exchanged; each is counted."""

    def all_gather_object(answers: list[Any], text: Any, **_: Any) -> None:
        note()
        answers[:] = [text] * len(answers)

    patch.object(dist, "all_gather_object", all_gather_object).start()
    patch.object(dist, "broadcast_object_list", lambda *_, **__: note()).start()


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

"""Roles of a launch as threads of one process, and messages between them, with their clocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

from torch import Tensor

from tests.fake_cuda.races import Clock, Races
from tests.fake_cuda.streams import RecordedTensor

SECONDS = 20.0


@dataclass(frozen=True)
class _Message:
    """A message under way; `end` is what its wait does."""

    end: Callable[[], None] | None = None

    def wait(self, *_: Any) -> None:
        if self.end is not None:
            self.end()


@dataclass
class Post:
    """All messages between ranks that have been sent and not been received."""

    races: Races
    _boxes: dict[tuple[Any, ...], SimpleQueue[tuple[Clock, Tensor]]] = field(default_factory=dict)

    def box(self, *address: Any) -> SimpleQueue[tuple[Clock, Tensor]]:
        """The messages to an address, each with the clock of its sender."""
        with self.races.lock:
            return self._boxes.setdefault(address, SimpleQueue())


@dataclass(frozen=True)
class HostMessages:
    """A rank's messages from and to host memory, as gloo's."""

    post: Post
    own: int

    def rank(self) -> int:
        """See `dist.ProcessGroup`."""
        return self.own

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Message:
        """See `dist.ProcessGroup`; the tensor is read at once."""
        (tensor,), races = tensors, self.post.races
        clock = races.act(races.here.thread)
        _use_on_host(tensor, races, writes=False)
        self.post.box(self.own, to, tag).put((clock, _numbers(tensor).clone()))
        return _Message()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Message:
        """See `dist.ProcessGroup`."""
        return _Message(partial(self._receive, tensors[0], source, tag))

    def _receive(self, tensor: Tensor, source: int, tag: int) -> None:
        races = self.post.races
        clock, numbers = self.post.box(source, self.own, tag).get(timeout=SECONDS)
        if races.has_effect("message"):
            races.learn(races.here.thread, clock)
        races.act(races.here.thread)
        _use_on_host(tensor, races, writes=True)
        _numbers(tensor).copy_(numbers)


def _use_on_host(tensor: Tensor, races: Races, *, writes: bool) -> None:
    assert not tensor.is_cuda, "gloo has messages of host memory"
    if isinstance(tensor, RecordedTensor):
        tensor.used(races.here.thread, writes=writes)


def _numbers(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, RecordedTensor) else tensor


@dataclass(frozen=True)
class DeviceMessages:
    """A rank's messages from and to the device, as NCCL's: on a stream for each other rank."""

    post: Post
    own: int

    def rank(self) -> int:
        """See `dist.ProcessGroup`."""
        return self.own

    def send(self, tensors: list[Tensor], to: int, _tag: int) -> _Message:
        """See `dist.ProcessGroup`."""
        tensor, stream = self._begin(tensors, to)
        tensor.used(stream, writes=False)
        clock = self.post.races.clock(stream)
        self.post.box("device", self.own, to).put((clock, tensor.inner.clone()))
        return _Message(partial(self._end, stream, tensor))

    def recv(self, tensors: list[Tensor], source: int, _tag: int) -> _Message:
        """See `dist.ProcessGroup`."""
        tensor, stream = self._begin(tensors, source)
        clock, numbers = self.post.box("device", source, self.own).get(timeout=SECONDS)
        self.post.races.learn(stream, clock)
        tensor.used(stream, writes=True)
        tensor.inner.copy_(numbers)
        return _Message(partial(self._end, stream, tensor))

    def _begin(self, tensors: list[Tensor], peer: int) -> tuple[RecordedTensor, str]:
        """Begin work of the stream for a rank, which waits for the current one."""
        (tensor,), races = tensors, self.post.races
        assert isinstance(tensor, RecordedTensor)
        assert tensor.is_cuda, "NCCL has messages of its device"
        assert tensor.is_contiguous()
        stream = f"{races.here.role} stream with {peer}"
        races.learn(stream, races.clock(races.launch()))
        return tensor, races.launch(stream)

    def _end(self, stream: str, _held: RecordedTensor) -> None:
        """Let the current stream wait; torch holds the tensor until then."""
        races = self.post.races
        current = races.launch()
        if races.has_effect("event"):
            races.learn(current, races.clock(stream))


class _Queue(SimpleQueue[Any]):
    """Hands on the clock of the thread that puts."""

    def __new__(cls, _races: Races) -> _Queue:
        return super().__new__(cls)

    def __init__(self, races: Races) -> None:
        self._races = races

    def put(self, item: Any, *_: Any) -> None:  # type: ignore[override]
        super().put((self._races.act(self._races.here.thread), item))

    def get(self, *_: Any) -> Any:  # type: ignore[override]
        clock, item = super().get()
        self._races.learn(self._races.here.thread, clock)
        return item


class _Future(Future[Any]):
    """Hands on the clock of the thread that sets the result."""

    def __init__(self, races: Races) -> None:
        super().__init__()
        self._races = races
        self._clock: Clock = {}

    def set_result(self, result: Any) -> None:
        self._clock = self._races.act(self._races.here.thread)
        super().set_result(result)

    def result(self, timeout: float | None = None) -> Any:
        found = super().result(timeout)
        self._races.learn(self._races.here.thread, self._clock)
        return found


class _Thread(threading.Thread):
    """A thread of a role, by default of that which starts it; `join` raises its error."""

    def __init__(self, races: Races, *, role: str = "", **named: Any) -> None:
        super().__init__(**{"daemon": True, **named})
        self._races = races
        self._role = role or races.here.role
        self._clock = races.act(races.here.thread)
        self._error: BaseException | None = None

    def run(self) -> None:
        here = self._races.here
        here.role, here.stream = self._role, f"{self._role} stream"
        self._races.learn(here.thread, self._clock)
        try:
            super().run()
        except BaseException as error:  # noqa: BLE001 - the thread that joins raises it
            self._error = error
        self._clock = self._races.act(here.thread)

    def join(self, timeout: float | None = None) -> None:
        super().join(2 * SECONDS if timeout is None else timeout)
        assert not self.is_alive(), f"{self.name} has not ended"
        self._races.learn(self._races.here.thread, self._clock)
        if self._error is not None:
            raise self._error


@contextmanager
def recorded_threads(races: Races, modules: Sequence[Any]) -> Iterator[None]:
    """Let the threads, queues and futures of these modules hand on their clocks in the block."""
    kinds = {"Queue": _Queue, "SimpleQueue": _Queue, "Future": _Future, "Thread": _Thread}
    with ExitStack() as resources:
        for module in modules:
            for name in kinds.keys() & vars(module).keys():
                changed = patch.object(module, name, partial(kinds[name], races))
                resources.enter_context(changed)
        yield


def run_roles(races: Races, roles: Mapping[str, Callable[[], None]]) -> None:
    """Run the main threads of some roles at once."""
    threads = [_Thread(races, role=role, name=role, target=work) for role, work in roles.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

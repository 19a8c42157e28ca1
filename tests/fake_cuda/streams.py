"""A device whose streams are only recorded: who waits for whom, and who uses which memory.

The numbers of its tensors are in host memory, and every operation computes them at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.fake_cuda.races import Clock, Memory, Races

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_aten = torch.ops.aten


class RecordedTensor(Tensor):
    """A tensor of the device, or one on the host that work of the device has made."""

    inner: Tensor
    memories: tuple[Memory, ...]
    place: torch.device  # torch, without CUDA, has it on the host

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: self.place)  # type: ignore[assignment]
    is_cuda = property(lambda self: self.place.type == "cuda")  # type: ignore[assignment]

    @staticmethod
    def of(inner: Tensor, device: torch.device, *memories: Memory) -> RecordedTensor:
        """Return a tensor with these numbers; each process that has mapped it has a memory."""
        made: Any = Tensor._make_wrapper_subclass(
            RecordedTensor, inner.shape, strides=inner.stride(), dtype=inner.dtype
        )
        made.inner, made.memories, made.place = inner, memories, device
        return made

    @classmethod
    def new(
        cls, races: Races, inner: Tensor, device: torch.device, title: str, *, by: str | None = None
    ) -> RecordedTensor:
        """Return a tensor of the current stream, which writes it now; `by`: has begun to."""
        is_there = device.type == "cuda"
        if by is None:
            by = races.launch() if is_there else races.here.thread
        is_pinned = not is_there and by != races.here.thread
        memory = Memory(races, races.here.stream if is_there else None, title, is_pinned)
        made = cls.of(inner, device, memory)
        made.used(by, writes=True)
        return made

    def used(self, by: str, *, writes: bool) -> None:
        """Note a use in the work that a thread or a stream has begun last."""
        for memory in self.memories:
            memory.use(by, self.inner, writes=writes)

    def to(self, device: Any, *, non_blocking: bool = False) -> Any:  # type: ignore[override]
        """See `Tensor`."""
        if torch.device(device).type == self.place.type:
            return self
        return _aten._to_copy(self, device=torch.device(device), non_blocking=non_blocking)

    def cpu(self) -> Any:  # type: ignore[override]
        """See `Tensor`."""
        return self.to(CPU)

    def record_stream(self, stream: Any) -> None:
        """See `Tensor`."""
        for memory in self.memories:
            if memory.races.has_effect("record_stream"):
                memory.recorded[stream.name] = memory.races.clock(stream.name)[stream.name]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = _Call(func, args, kwargs or {})
        result = call.result()
        if call.is_view(result):
            first = call.recorded[0]
            return cls.of(result, first.place, *first.memories)
        races = call.recorded[0].memories[0].races
        if call.on_device:
            name = races.launch()
        else:
            name = races.here.thread
            races.act(name)
        for one in call.used:
            one.used(name, writes=any(one is other for other in call.written))
        if call.waits:
            races.wait_on_host(races.clock(name), "copy")
        if call.written:
            return call.written[0]
        made = partial(cls.new, races, device=call.device, title="a result", by=name)
        return tree_map(lambda value: made(value) if isinstance(value, Tensor) else value, result)


class _Call:
    """An operation with recorded tensors: where it runs, and which of them it reads and writes."""

    def __init__(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        self.recorded = [one for one in given if isinstance(one, RecordedTensor)]
        self.used = [] if func is _aten.empty_like.default else self.recorded
        self.written: list[Any] = [
            value
            for place, value in zip(func._schema.arguments, args, strict=False)
            if place.alias_info is not None and place.alias_info.is_write
        ]
        kinds = {one.device.type for one in given if self.used}
        default = CUDA if "cuda" in kinds else CPU
        self.device = torch.device(kwargs.get("device") or default)
        kinds.add(self.device.type)
        self.on_device = "cuda" in kinds
        is_async = kwargs.get("non_blocking") or args[2:3] == (True,)
        copies = func in (_aten._to_copy.default, _aten.copy_.default) and len(kinds) == 2
        reads = func is _aten._local_scalar_dense.default and self.on_device
        self.waits = (copies and not is_async) or reads

    def result(self) -> Any:
        """Compute it in host memory."""
        own = dict(self._kwargs)
        if "device" in own:
            own["device"] = CPU
        return self._func(*tree_map(_inner, self._args), **tree_map(_inner, own))

    def is_view(self, result: Any) -> bool:
        """Whether the result is only a view of the first recorded tensor."""
        if self.written or not isinstance(result, Tensor):
            return False
        places = (one.untyped_storage().data_ptr() for one in (result, self.recorded[0].inner))
        return len(set(places)) == 1


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, RecordedTensor) else value


@dataclass
class RecordedStream:
    """See `torch.cuda.Stream`."""

    races: Races
    name: str

    @classmethod
    def new(cls, races: Races, *_: Any) -> RecordedStream:
        """A further stream of the role."""
        role = races.here.role
        races.streams[role] += 1
        return cls(races, f"{role} stream {races.streams[role]}")

    def synchronize(self) -> None:
        """See `torch.cuda.Stream`."""
        self.races.wait_on_host(self.races.clock(self.name), "stream")


@dataclass(eq=False)
class RecordedEvent:
    """See `torch.cuda.Event`.

    A wait is for the last record that the waiting thread can know of, if there is any.
    """

    races: Races
    number: int = 0
    records: list[tuple[str, int, Clock]] = field(default_factory=list)

    def record(self) -> None:
        """See `torch.cuda.Event`."""
        clock, thread = self.races.clock(self.races.launch()), self.races.here.thread
        self.records.append((thread, self.races.clock(thread)[thread], clock))

    def wait(self) -> None:
        """See `torch.cuda.Event`."""
        stream = self.races.launch()
        if self.races.has_effect("event"):
            self.races.learn(stream, self._recorded())

    def synchronize(self) -> None:
        """See `torch.cuda.Event`."""
        self.races.wait_on_host(self._recorded(), "synchronize")

    def _recorded(self) -> Clock:
        known = self.races.clock(self.races.here.thread)
        for thread, turn, clock in reversed(self.records):
            if known.get(thread, 0) >= turn:
                return clock
        return {}

    def ipc_handle(self) -> bytes:
        """See `torch.cuda.Event`."""
        return self.number.to_bytes(64, "little")


@dataclass
class RecordedEvents:
    """Events of all processes by handle; an `EventMaker`."""

    races: Races
    made: list[RecordedEvent] = field(default_factory=list)

    def make(self) -> RecordedEvent:
        """See `EventMaker`."""
        with self.races.lock:
            self.made.append(RecordedEvent(self.races, len(self.made)))
            return self.made[-1]

    def open(self, handle: bytes) -> RecordedEvent:
        """See `EventMaker`."""
        return self.made[int.from_bytes(handle, "little")]


@contextmanager
def recorded_cuda(races: Races) -> Iterator[None]:
    """Make `torch.cuda` report the fake device within the block."""

    @contextmanager
    def on_stream(stream: RecordedStream) -> Iterator[None]:
        before, races.here.stream = races.here.stream, stream.name
        yield
        races.here.stream = before

    def zeros(*sizes: Any, device: Any = CPU, **named: Any) -> Tensor:
        found = usual(*sizes, **named)
        if torch.device(device).type == "cpu":
            return found
        return RecordedTensor.new(races, found, CUDA, "a zero")

    usual = torch.zeros
    names = {
        "Event": lambda **_: RecordedEvent(races),
        "Stream": partial(RecordedStream.new, races),
        "current_stream": lambda *_: RecordedStream(races, races.here.stream),
        "device": lambda _: nullcontext(),
        "stream": on_stream,
    }
    with ExitStack() as resources:
        resources.enter_context(patch.object(torch, "zeros", zeros))
        for name, value in names.items():
            resources.enter_context(patch.object(torch.cuda, name, value))
        yield

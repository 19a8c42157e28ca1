"""Slots on a GPU that two processes of one machine have mapped, by CUDA's interprocess handles.

The receiver allocates them once, and gives each sender a handle once. The sender copies from device
to device on a stream of its own. Events of both processes order that copy and the receiver's
streams; no thread of a host waits for a copy.

A wait for an event that has not been recorded yet returns at once. So a message over the bridge
follows each record: the header of an answer, and the credit of a round (`mapped_slots.Credits`).

Memory and events have to outlive their use elsewhere. So each process closes the memory that it has
opened when its teacher or student is closed, before the launch meets. It frees its own after that.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor

from megatron_distill.errors import ConfigError
from megatron_distill.runtime.bridge import Bridge, Sending
from megatron_distill.train.teachers.answer_ways import Columns, SlotPlace
from megatron_distill.train.teachers.answers import (
    CONNECT_TAG,
    AnswerPlan,
    AnswerRows,
    RoundRequest,
)
from megatron_distill.train.teachers.mapped_slots import SharedMemoryWay

__all__ = [
    "CudaEvents",
    "CudaIpcWay",
    "EventMaker",
    "InterprocessEvent",
    "open_memory",
    "require_peer",
    "share_memory",
    "share_with",
    "shared_events",
]

_HANDLE_BYTES: Final = 64  # cudaIpcEventHandle_t


class InterprocessEvent(Protocol):
    """An event of one process that another one waits for; both on the current stream."""

    def record(self) -> None:
        """Record what the stream has to do so far; by the process that made the event."""
        ...

    def wait(self) -> None:
        """Let later work of the stream wait for what was recorded last."""
        ...

    def ipc_handle(self) -> bytes:
        """Return the handle for `EventMaker.open`, of 64 bytes."""
        ...


class EventMaker(Protocol):
    """Makes events, and opens those of another process; an event is opened once."""

    def make(self) -> InterprocessEvent:
        """Make an event of this process."""
        ...

    def open(self, handle: bytes) -> InterprocessEvent:
        """Open an event of another process."""
        ...


@dataclass(frozen=True)
class CudaEvents:
    """Events of CUDA. `device`: this process's, on which the events of others are waited for."""

    device: torch.device

    def make(self) -> InterprocessEvent:
        """See `EventMaker`."""
        return torch.cuda.Event(interprocess=True)

    def open(self, handle: bytes) -> InterprocessEvent:
        """See `EventMaker`."""
        found: InterprocessEvent = torch.cuda.Event.from_ipc_handle(self.device, handle)
        return found


@dataclass(frozen=True)
class CudaIpcWay:
    """Into slots on the receiver's GPU, and beside them into slots in shared memory.

    Attributes:
        shared: the slots by rank, as this process has mapped them.
        free: events by receiving rank and block: the receiver has read the block. Of receivers with
            slots on a GPU.
        written: events by route, block and micro-batch: the sender has written the slot. Each slot
            has one of its own, so that none is recorded anew before the receiver has waited for it.
    """

    shared: SharedMemoryWay
    plan: AnswerPlan
    bridge: Bridge
    events: EventMaker
    free: Mapping[int, Sequence[InterprocessEvent]]
    written: dict[tuple[int, int], dict[tuple[int, int], InterprocessEvent]] = field(
        default_factory=dict
    )
    writes_slots: ClassVar[bool] = True

    def connect(self, source: int, destination: int) -> None:
        """Exchange the events of a route.

        Collective: the bridge, 64 bytes per slot of the route from its source.
        """
        if destination not in self.free:
            return
        places = [
            (block, micro_batch)
            for block in range(self.plan.blocks)
            for micro_batch in self.plan.micro_batches(source, destination)
        ]
        if self.bridge.rank == source:
            made = [self.events.make() for _ in places]
            handles = _as_tensor([one.ipc_handle() for one in made])
            self.bridge.send(handles, destination, tag=CONNECT_TAG).wait()
        else:
            handles = torch.empty(len(places), _HANDLE_BYTES, dtype=torch.uint8)
            self.bridge.receive(handles, source, tag=CONNECT_TAG).wait()
            made = [self.events.open(handle.numpy().tobytes()) for handle in handles]
        self.written[source, destination] = dict(zip(places, made, strict=True))

    def offer(self, command: RoundRequest, sources: Sequence[int]) -> None:
        """See `AnswerWay`.

        Collective: that of `Credits.grant`.
        """
        self.free[self.bridge.rank][command.block].record()
        self.shared.offer(command, sources)

    def claim(self, command: RoundRequest, rank: int) -> None:
        """See `AnswerWay`.

        Collective: that of `Credits.claim`.
        """
        self.shared.claim(command, rank)

    def send(
        self, columns: Columns, parts: Sequence[AnswerRows], to: SlotPlace
    ) -> Sequence[Sending]:
        """See `AnswerWay`; the current stream writes the rows once the slot has been read."""
        is_on_gpu = to.rank in self.free
        if is_on_gpu:
            self.free[to.rank][to.block].wait()
        sending = self.shared.send(columns, parts, to)
        for number in {part.column for part in parts}:
            if columns[number].is_cuda:  # its memory may be used anew after the copy, not before
                columns[number].record_stream(torch.cuda.current_stream())
        if is_on_gpu:
            self.written[self.bridge.rank, to.rank][to.block, to.micro_batch].record()
        return sending

    def receive(
        self,
        columns: Columns,  # noqa: ARG002 - the slot
        parts: Sequence[AnswerRows],  # noqa: ARG002
        source: int,
        at: SlotPlace,
    ) -> None:
        """See `AnswerWay`; the current stream waits for the copy, the host does not."""
        self.written[source, at.rank][at.block, at.micro_batch].wait()


def _as_tensor(handles: Sequence[bytes]) -> Tensor:
    assert all(len(handle) == _HANDLE_BYTES for handle in handles)
    return torch.frombuffer(bytearray(b"".join(handles)), dtype=torch.uint8).view(len(handles), -1)


def share_memory(whole: Tensor, key: str) -> list[Any]:
    """Return in values of JSON how another process opens memory of this one's GPU.

    `whole` is all of an allocation; this process has to hold it as long as another one may use it.
    `key`: of the configuration, with the value 'ipc'. Raises ConfigError: it cannot be shared.
    """
    if torch.cuda.get_allocator_backend() != "native" or _is_expandable(whole):
        given = (os.environ.get(f"PYTORCH_{name}ALLOC_CONF") for name in ("", "CUDA_"))
        raise ConfigError(
            f"{key} = 'ipc': other processes cannot map expandable segments or cudaMallocAsync, "
            f"which PYTORCH_CUDA_ALLOC_CONF = {next(filter(None, given), None)!r} asks for. Remove "
            f"them from it, or set {key} to nccl or gloo"
        )
    with _driver(key):
        shared = whole.untyped_storage()._share_cuda_()
    gpu = str(torch.cuda.get_device_properties(whole.device).uuid)
    return [gpu, *(one.hex() if isinstance(one, bytes) else one for one in shared)]


def share_with(whole: Tensor, senders: Sequence[int], key: str) -> dict[str, list[Any]]:
    """Return `share_memory` for each rank that sends, by its number as text.

    torch counts whether one opener has let go of what it shared. With two of one handle the count
    wraps below zero, and the memory is never free again in this process.
    """
    return {str(sender): share_memory(whole, key) for sender in senders}


def _is_expandable(whole: Tensor) -> bool:
    place = whole.data_ptr()
    return any(
        segment["is_expandable"]
        for segment in torch.cuda.memory_snapshot()
        if segment["address"] <= place < segment["address"] + segment["total_size"]
    )


def open_memory(shared: Sequence[Any], device: torch.device, key: str) -> Tensor:
    """Open the memory of `share_memory`, as bytes that this process's device may write.

    Raises ConfigError: the driver does not allow it.
    """
    _, _, *rest = shared  # the other process's number of the GPU is none of this one's
    values = [bytes.fromhex(one) if isinstance(one, str) else one for one in rest]
    with _driver(key):
        # On this process's device: on the other one it would need a context, of some 500 MB.
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *values)  # noqa: SLF001
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def require_peer(
    shared: Sequence[Any], device: torch.device, *, key: str, receiver: str, sender: str
) -> None:
    """Raise ConfigError if this process's GPU cannot write the memory of `share_memory`.

    receiver, sender: names of the two ranks, of which this is the second.
    """
    gpu, remedy = shared[0], f"or set {key} to nccl or gloo"
    seen = [
        index
        for index in range(torch.cuda.device_count())
        if str(torch.cuda.get_device_properties(index).uuid) == gpu
    ]
    if not seen:
        mask = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ConfigError(
            f"{key} = 'ipc': {sender} does not see the GPU of {receiver}, {gpu}, since its "
            f"CUDA_VISIBLE_DEVICES = {mask!r}; let each rank see all GPUs of its machine, {remedy}"
        )
    if device.index not in seen and not torch.cuda.can_device_access_peer(device.index, seen[0]):
        raise ConfigError(
            f"{key} = 'ipc': the GPU of {sender} cannot access the memory of that of {receiver}, "
            f"{gpu}; `nvidia-smi topo -p2p w` shows which can. Give the two ranks such GPUs, "
            f"{remedy}"
        )


def shared_events(events: EventMaker, count: int) -> tuple[list[InterprocessEvent], list[str]]:
    """Make events, and return them with their handles as text."""
    made = [events.make() for _ in range(count)]
    return made, [one.ipc_handle().hex() for one in made]


@contextmanager
def _driver(key: str) -> Iterator[None]:
    """A block in which the driver may refuse to share memory, as in some containers."""
    try:
        yield
    except RuntimeError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"{key} = 'ipc': CUDA does not share memory between processes of "
            f"{socket.gethostname()} ({lines[0]}); set {key} to nccl or gloo"
        ) from error

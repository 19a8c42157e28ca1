"""From `transfer.backend` to the way of a teacher's answers, on both of its ends."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron_distill.config import TransferConfig
from megatron_distill.errors import ConfigError
from megatron_distill.runtime.bridge import Bridge
from megatron_distill.runtime.collectives import any_rank, together
from megatron_distill.runtime.launch import Device
from megatron_distill.runtime.shared_memory import shared_path
from megatron_distill.train.teachers.answer_ways import (
    AnswerWay,
    HostWay,
    NcclWay,
    Slots,
    private_slots,
)
from megatron_distill.train.teachers.answers import AnswerPlan
from megatron_distill.train.teachers.device_slots import (
    CudaEvents,
    CudaIpcWay,
    InterprocessEvent,
    open_memory,
    require_peer,
    share_with,
    shared_events,
)
from megatron_distill.train.teachers.mapped_slots import (
    Credits,
    SharedMemoryWay,
    create_shared,
    map_shared,
    map_slots,
    mapped_bytes,
    slots_of,
)

__all__ = ["student_backend", "student_way", "teacher_way"]


def _backend(transfer: TransferConfig, role: str, device: Device) -> str | None:
    """Return the way of the answers by name, the same on all ranks; None: the student chooses it.

    Raises ConfigError: it is not for this device, which `runtime.device = 'auto'` has chosen.
    """
    if transfer.backend == "nccl" and device.kind != "cuda":
        raise ConfigError(
            f"{role}.transfer.backend = 'nccl' needs GPUs, and this machine has none; set it to "
            "auto, gloo or ipc"
        )
    if transfer.backend != "auto":
        return transfer.backend
    if device.kind == "cpu":
        return None
    return "nccl" if device.backend == "nccl" else "gloo"


def student_backend(transfer: TransferConfig, plan: AnswerPlan, device: Device) -> str:
    """Return the way of the answers by name on all ranks of the student; the teacher's learn it.

    `auto` is shared memory on a CPU, where each route is between two ranks that can map each
    other's memory.

    Raises ConfigError on all of them: it is not for this device.

    Collective: the student's world, one all-gather of a short object per rank, then with `auto` on
    a CPU one all-reduce of 8 bytes.
    """
    bridge = device.bridge
    assert bridge is not None
    with together():
        backend = _backend(transfer, plan.role, device)
    if backend is not None:
        return backend
    is_apart = not all(map(bridge.shares_memory, plan.sources(bridge.rank)))
    backend = "gloo" if any_rank(is_apart, device=device.torch_device) else "ipc"
    if bridge.rank == 0:
        bridge.publish(f"backend/{plan.role}", backend)
    return backend


def _places(
    transfer: TransferConfig, plan: AnswerPlan, device: torch.device
) -> dict[int, torch.device]:
    """Return the device of each tensor in the slots, by number.

    A top-k stays in host memory until it is taken; see `signal_of_columns`.
    """
    is_record = transfer.what == "top_k"
    return {
        number: torch.device("cpu") if is_record and output.layer is None else device
        for number, (output, _) in enumerate(plan.columns)
    }


def _divided(
    transfer: TransferConfig, plan: AnswerPlan, rank: int, device: torch.device
) -> tuple[list[int], list[int]]:
    """Return the tensors of a rank's slots that are on the host, and those on a GPU."""
    places = _places(transfer, plan, device)
    on_host = [number for number in plan.slot_rows(rank) if places[number].type == "cpu"]
    return on_host, [number for number in plan.slot_rows(rank) if number not in on_host]


def student_way(
    backend: str, transfer: TransferConfig, plan: AnswerPlan, device: Device, resources: ExitStack
) -> tuple[AnswerWay, Slots, BinaryIO | None]:
    """Return how a rank of the student receives, its slots, and their memory if shared.

    backend: as of `student_backend`.

    Raises ConfigError: the way is not for this memory, or there is too little of it to share.
    """
    bridge = device.bridge
    assert bridge is not None
    if backend == "ipc":
        return _offered_slots(transfer, plan, device, resources)
    slots = private_slots(plan, bridge.rank, _places(transfer, plan, device.torch_device))
    if backend == "nccl" and transfer.what == "hidden":
        return _nccl_way(plan, device, resources), slots, None
    return HostWay(bridge), slots, None


def teacher_way(
    transfer: TransferConfig, plan: AnswerPlan, device: Device, resources: ExitStack
) -> AnswerWay:
    """Return how a rank of the teacher sends; `resources` end after its sender.

    Raises ConfigError: the way is not for this device, or should share memory with another machine
    or an inaccessible GPU.
    """
    bridge = device.bridge
    assert bridge is not None
    backend = _backend(transfer, plan.role, device) or bridge.published(f"backend/{plan.role}")
    if backend == "ipc":
        return _mapped_slots(transfer, plan, device, resources)
    if backend == "nccl" and transfer.what == "hidden":
        return _nccl_way(plan, device, resources)
    return HostWay(bridge)


def _nccl_way(plan: AnswerPlan, device: Device, resources: ExitStack) -> NcclWay:
    """Return messages by a group of NCCL, which ends with `resources`: torch knows no such group.

    Whoever sends or receives is entered later, and ends before it.
    """
    assert device.bridge is not None
    group = device.bridge.nccl(plan.role)
    resources.callback(group.abort)
    return NcclWay(group, device.torch_device)


def _key(plan: AnswerPlan) -> str:
    return f"{plan.role}.transfer.backend"


def _offered_slots(
    transfer: TransferConfig, plan: AnswerPlan, device: Device, resources: ExitStack
) -> tuple[AnswerWay, Slots, BinaryIO | None]:
    """Allocate the slots of a rank of the student, and publish how the teacher maps them."""
    bridge = device.bridge
    assert bridge is not None
    rank, memory = bridge.rank, None
    on_host, on_gpu = _divided(transfer, plan, rank, device.torch_device)
    tensors: dict[int, Tensor] = {}
    free: list[InterprocessEvent] = []
    published: dict[str, Any] = {}
    if on_gpu:
        # All in one: a handle is of a whole allocation.
        size = mapped_bytes(plan, rank, on_gpu)
        whole = torch.empty(size, dtype=torch.uint8, device=device.torch_device)
        tensors |= map_slots(whole, plan, rank, on_gpu)
        published["gpu"] = share_with(whole, plan.sources(rank), _key(plan))
        free, published["free"] = shared_events(CudaEvents(device.torch_device), plan.blocks)
    if on_host:
        mapped, memory = create_shared(plan, rank, on_host)
        resources.enter_context(memory)
        tensors |= mapped
        published["memory"] = str(shared_path(memory))
    bridge.publish(f"slots/{plan.role}/{rank}", published)
    slots = slots_of(plan, tensors)
    shared = SharedMemoryWay({rank: slots}, Credits(bridge, rounds=plan.blocks))
    if not on_gpu:
        return shared, slots, memory
    way = CudaIpcWay(shared, plan, bridge, CudaEvents(device.torch_device), {rank: free})
    resources.callback(way.written.clear)
    return way, slots, memory


def _mapped_slots(
    transfer: TransferConfig, plan: AnswerPlan, device: Device, resources: ExitStack
) -> AnswerWay:
    """Map the slots of the ranks of the student that this rank of the teacher sends to."""
    bridge, own = device.bridge, device.torch_device
    assert bridge is not None
    events = CudaEvents(own)
    slots: dict[int, Slots] = {}
    free: dict[int, list[InterprocessEvent]] = {}
    resources.callback(slots.clear)
    resources.callback(free.clear)
    for rank in [destination for source, destination in plan.routes if source == bridge.rank]:
        on_host, on_gpu = _divided(transfer, plan, rank, own)
        _require_same_host(plan, bridge, rank, maps_memory=bool(on_host))
        published = bridge.published(f"slots/{plan.role}/{rank}")
        tensors: dict[int, Tensor] = {}
        if on_gpu:
            names = {"receiver": bridge.roles.name(rank), "sender": bridge.roles.name(bridge.rank)}
            shared_here = published["gpu"][str(bridge.rank)]
            require_peer(shared_here, own, key=_key(plan), **names)
            whole = open_memory(shared_here, own, _key(plan))
            tensors |= map_slots(whole, plan, rank, on_gpu)
            free[rank] = [events.open(bytes.fromhex(handle)) for handle in published["free"]]
        if on_host:
            tensors |= map_shared(Path(published["memory"]), plan, rank, on_host)
        slots[rank] = slots_of(plan, tensors)
    shared = SharedMemoryWay(slots, Credits(bridge, rounds=plan.blocks))
    return CudaIpcWay(shared, plan, bridge, events, free) if free else shared


def _require_same_host(plan: AnswerPlan, bridge: Bridge, rank: int, *, maps_memory: bool) -> None:
    here, there = bridge.host(bridge.rank), bridge.host(rank)
    sender, receiver = map(bridge.roles.name, (bridge.rank, rank))
    if here != there:
        raise ConfigError(
            f"{_key(plan)} = 'ipc': {sender} is on {here} and "
            f"{receiver} on {there}, which share no memory; set it to gloo or nccl"
        )
    if maps_memory and not bridge.shares_memory(rank):
        raise ConfigError(
            f"{_key(plan)} = 'ipc': {sender} and {receiver} are on {here}, and neither sees the "
            "other's processes, as in two containers. Set it to gloo, or start both in one"
        )

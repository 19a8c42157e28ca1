"""The device, the communication backend and the arithmetic type of a process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_distill.errors import ConfigError
from megatron_distill.runtime.launch import Launch

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Device:
    """Where this process computes and how it talks to the others."""

    kind: str  # "cpu" or "cuda"
    backend: str  # "gloo" or "nccl"
    torch_device: torch.device


def select_device(*, device: str, backend: str) -> Device:
    """Return this process's device: CUDA and NCCL where there is a GPU, else CPU and gloo.

    `device` is "auto", "cpu" or "cuda", `backend` "auto", "gloo" or "nccl". Raises ConfigError
    for a device that is not there or a backend that cannot serve it.
    """
    available = torch.cuda.is_available()
    kind = ("cuda" if available else "cpu") if device == "auto" else device
    if kind == "cuda" and not available:
        raise ConfigError(
            "runtime.device is cuda, but torch sees no CUDA device; set runtime.device=cpu or "
            "install a CUDA build of torch"
        )
    chosen = ("nccl" if kind == "cuda" else "gloo") if backend == "auto" else backend
    if chosen == "nccl" and kind == "cpu":
        raise ConfigError(
            "runtime.backend is nccl, which needs CUDA devices; set runtime.backend=gloo"
        )
    if kind == "cpu":
        return Device(kind, chosen, torch.device("cpu"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: torch sees "
            f"{torch.cuda.device_count()}; start torchrun with --nproc-per-node "
            f"{torch.cuda.device_count()} or set runtime.device=cpu"
        )
    return Device(kind, chosen, torch.device("cuda", local_rank))


def start_distributed(device: Device, launch: Launch, *, timeout_seconds: float) -> None:
    """Make the default process group: the torchrun world, or a world of one without torchrun.

    Collective: the whole world, rendezvous.
    """
    if device.kind == "cuda":
        torch.cuda.set_device(device.torch_device)
    if dist.is_initialized():
        return
    store = launch.store or dist.HashStore()
    dist.init_process_group(
        device.backend,
        store=dist.PrefixStore("world", store),
        rank=launch.rank,
        world_size=launch.size,
        timeout=timedelta(seconds=timeout_seconds),
    )

"""The world of ranks that a script runs in, joined and left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_distill.runtime.device import Device, select_device, start_distributed
from megatron_distill.runtime.launch import Launch
from megatron_distill.runtime.mcore_cpu import prepare_megatron_core


@contextmanager
def joined_world(
    *,
    device: str,
    backend: str,
    threads: int | None,
    timeout_seconds: float,
    launch: Launch | None = None,
) -> Iterator[Device]:
    """Join the torchrun world, or a world of one without torchrun, and leave it at the end.

    Megatron-Core may be imported inside, not before. A process group that is there already is
    used and kept. Raises ConfigError, on all ranks, for a device or backend that is not there.

    Collective: the whole world, rendezvous.
    """
    launch = launch or Launch.from_environment()
    with launch.together("device"):
        selected = select_device(device=device, backend=backend)
        if threads is not None:
            torch.set_num_threads(threads)
        prepare_megatron_core(on_cuda=selected.kind == "cuda")
    is_ours = not dist.is_initialized()
    start_distributed(selected, launch, timeout_seconds=timeout_seconds)
    try:
        yield selected
    finally:
        if is_ours:
            dist.destroy_process_group()

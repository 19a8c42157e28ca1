"""Environment variables of CUDA and of collectives, unless the user has set them."""

from __future__ import annotations

import ctypes
import os
from typing import Final

__all__ = ["limit_queues", "prepare_collectives"]

_COLLECTIVES: Final = {
    # A collective that fails or exceeds its timeout ends the process: torch's default.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    # It leaves a trace of the last collectives of this rank, of which torch has a reader.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    # gloo, beside NCCL, connects the threads that exchange batches: when they use a connection, as
    # those of all ranks with all would be a million at 1,000 ranks.
    "TORCH_GLOO_LAZY_INIT": "1",
}
_QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
_SINGLE_QUEUE_BELOW: Final = 10  # the compute capability of Blackwell


def prepare_collectives() -> None:
    """Set the variables of NCCL and gloo for a run on GPUs; call before there is a group."""
    for name, value in _COLLECTIVES.items():
        os.environ.setdefault(name, value)


def limit_queues() -> None:
    """Let kernels start in the order of their launches; call before anything starts CUDA.

    For tensor and context parallelism, whose collectives are launched before the computation that
    hides them. Before Blackwell that order takes a single hardware queue.
    """
    capability = None if _QUEUES in os.environ else _compute_capability()
    if capability is not None and capability < _SINGLE_QUEUE_BELOW:
        os.environ[_QUEUES] = "1"


def _compute_capability() -> int | None:
    """Return the major compute capability of the first GPU without starting CUDA, if known."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    failed = (
        nvml.nvmlInit_v2()
        or nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(device))
        or nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
    )
    return None if failed else major.value

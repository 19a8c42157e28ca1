"""Answers of `torch.cuda` for the fake device, and of Triton's kernels that only look at it."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


class _Stream:
    cuda_stream = 0
    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, *_: Any) -> _Event:
        return _Event()


class _Event:
    def __init__(self, **_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _: Any) -> float:
        return 1.0


class _Generator:
    def get_state(self) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_state(self, _: Tensor) -> None:
        pass


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _state(*_: Any, **__: Any) -> Tensor:
    return torch.zeros(16, dtype=torch.uint8)


_NAMES: dict[str, Any] = {
    "Event": _Event,
    "Stream": _Stream,
    "_lazy_init": _nothing,
    "current_device": lambda: 0,
    "current_stream": lambda *_: _Stream(),
    "default_generators": defaultdict(_Generator),
    "device": lambda _: contextlib.nullcontext(),
    "device_count": lambda: 1,
    "get_device_capability": lambda *_: (9, 0),
    "get_device_name": lambda *_: "a fake device",
    "get_device_properties": lambda *_: SimpleNamespace(
        major=9, minor=0, name="a device of the tests", total_memory=80 * 2**30
    ),
    "get_rng_state": _state,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "manual_seed": _nothing,
    "manual_seed_all": _nothing,
    "max_memory_allocated": lambda *_: 0,
    "memory_allocated": lambda *_: 0,
    "random.get_rng_state": _state,
    "random.set_rng_state": _nothing,
    "reset_peak_memory_stats": _nothing,
    "set_device": _nothing,
    "set_rng_state": _nothing,
    "stream": lambda _: contextlib.nullcontext(),
    "synchronize": _nothing,
}


def pretend_cuda() -> None:
    """Let `torch.cuda` speak of the fake device, for the rest of the process."""
    for name, value in _NAMES.items():
        # An object of its own for each: torch's compiler has a table with a rule for every one.
        own = partial(value) if callable(value) and not isinstance(value, type) else value
        patch(f"torch.cuda.{name}", own).start()


def look_at_attention() -> Counter[str]:
    """Count by name the attention kernels that are chosen; which is that of a real device."""
    from megatron_distill.models import attention
    from megatron_distill.models.attention_kernels.choice import AttentionKernel

    choose, chosen = attention.kernel_for, Counter[str]()

    def noted(*given: Any) -> AttentionKernel:
        kernel = choose(*given)
        chosen[kernel.name] += 1
        return kernel

    patch.object(attention, "kernel_for", noted).start()
    return chosen


def look_at_kernels() -> Counter[str]:
    """Let launches of the row kernels check where their tensors are; returns who was launched."""
    from megatron_distill.ops.kernels import launch as of_gradients
    from megatron_distill.ops.kernels import measure as of_statistics

    launched: Counter[str] = Counter()

    def launch(kernel: Any, *arguments: Any, **_: Any) -> None:
        for argument in arguments:
            assert not isinstance(argument, Tensor) or argument.device.type == "cuda", kernel
        launched[kernel.__name__] += 1

    for module in (of_statistics, of_gradients):
        patch.object(module, "launch", launch).start()
    return launched

"""Copies of a device's tensors that the host reads later."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["HostCopy"]


@dataclass(frozen=True)
class HostCopy:
    """Tensors on their way to pinned host memory, behind the work that computes them.

    The host goes on, and waits in `read` only until the copies are there: not at all, if the device
    has come that far.
    """

    _host: tuple[Tensor, ...]
    _device: torch.device  # of the originals
    _arrived: torch.cuda.Event | None

    @classmethod
    def begin(cls, *values: Tensor) -> HostCopy:
        """Copy tensors of one device; in host memory each is its own copy, and must not change."""
        device = values[0].device
        if device.type != "cuda":
            return cls(values, device, None)
        host = tuple(torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in values)
        for copy, one in zip(host, values, strict=True):
            copy.copy_(one, non_blocking=True)
        with torch.cuda.device(device):
            arrived = torch.cuda.Event()
            arrived.record()
        return cls(host, device, arrived)

    def read(self) -> tuple[Tensor, ...]:
        """Return the copies once they have arrived; any thread may call it."""
        if self._arrived is not None:
            # That of a new thread is GPU 0, where the wait would make a context of some 500 MB.
            with torch.cuda.device(self._device):
                self._arrived.synchronize()
        return self._host

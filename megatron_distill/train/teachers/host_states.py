"""Hidden states of a step in host memory, while the student's schedule runs."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["HostStates"]


class HostStates:
    """Moves hidden states to host memory, and back one micro-batch ahead of their use.

    On CUDA the copies run on a stream of their own, to and from pinned memory. The pinned memory is
    allocated once: 2 bytes (in bf16) per value of the states of one step. On a CPU the states stay
    where they are. One step's states exist at a time: those of the next step replace them.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host: dict[int, Tensor] = {}
        self._returning: dict[int, tuple[Tensor, torch.cuda.Event]] = {}

    def put(self, micro_batch: int, hidden_sbh: Tensor) -> None:
        """Begin to copy a state to the host; the device's copy is free when that is done."""
        if self._stream is None:
            self._host[micro_batch] = hidden_sbh
            return
        if micro_batch == 0:
            self._returning.clear()
        host_sbh = self._host.get(micro_batch)
        if host_sbh is None or host_sbh.shape != hidden_sbh.shape:
            host_sbh = torch.empty(hidden_sbh.shape, dtype=hidden_sbh.dtype, pin_memory=True)
            self._host[micro_batch] = host_sbh
        self._stream.wait_stream(torch.cuda.current_stream(hidden_sbh.device))
        with torch.cuda.stream(self._stream):
            # Ordered after the last step's copy from the same memory, which is on this stream.
            host_sbh.copy_(hidden_sbh, non_blocking=True)
        hidden_sbh.record_stream(self._stream)

    def take(self, micro_batch: int) -> Tensor:
        """Return a state on its device, and begin to copy the next micro-batch's back."""
        if self._stream is None:
            return self._host[micro_batch]
        for number in (micro_batch, micro_batch + 1):
            if number in self._host and number not in self._returning:
                self._returning[number] = self._begin_return(number)
        hidden_sbh, arrived = self._returning.pop(micro_batch)
        current = torch.cuda.current_stream(hidden_sbh.device)
        current.wait_event(arrived)
        # It was allocated for the copying stream; its memory is in use by this one until freed.
        hidden_sbh.record_stream(current)
        return hidden_sbh

    def _begin_return(self, micro_batch: int) -> tuple[Tensor, torch.cuda.Event]:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            device_sbh = self._host[micro_batch].to(self._stream.device, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        return device_sbh, arrived

"""Hidden states and features of a live teacher, in host memory until the student needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distill.log import get_logger
from megatron_distill.runtime.groups import Groups

_LOGGER = get_logger(__name__)

# The kind of feature, `output`, `query` or `key`, and its layer, counted from 1.
Feature = tuple[str, int]


class HostStates:
    """Moves a tensor of each micro-batch to host memory, and back one ahead of its use.

    On CUDA the copies run on `stream`, by default one of their own, to and from pinned memory. That
    is allocated once: 2 bytes (in bf16) per value of the states of one step. torch rounds each
    micro-batch's up to a power of two. On a CPU the states stay where they are.

    One step's states exist at a time: those of the next step replace them. The micro-batches of a
    step are put in ascending order, not all of them need be, and are taken in any order and again.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._stream = stream or copying_stream(device)
        self._host: dict[int, Tensor] = {}
        self._of_step: list[int] = []
        self._returning: dict[int, tuple[Tensor, torch.cuda.Event]] = {}

    @classmethod
    def of_stage(cls, groups: Groups, device: torch.device) -> HostStates | None:
        """The host memory for hidden states, on the stage that has them."""
        if device.type == "cpu" and groups.world.rank() == 0:
            _LOGGER.warning("teacher.offload_hidden = true has no effect on a CPU")
        return cls(device) if groups.is_last_stage else None

    def put(self, micro_batch: int, hidden_sbh: Tensor) -> None:
        """Begin to copy a state to the host; the device's copy is free when that is done."""
        if self._stream is None:
            self._host[micro_batch] = hidden_sbh
            return
        if self._of_step and micro_batch <= self._of_step[-1]:  # of the next step
            self._of_step.clear()
            self._returning.clear()
        self._of_step.append(micro_batch)
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
            if number in self._of_step and number not in self._returning:
                self._returning[number] = self._begin_return(number)
        hidden_sbh, arrived = self._returning.pop(micro_batch)
        torch.cuda.current_stream(self._device).wait_event(arrived)
        return hidden_sbh

    def _begin_return(self, micro_batch: int) -> tuple[Tensor, torch.cuda.Event]:
        """Copy to memory of the stream that reads it, which reuses it as that of its own work."""
        assert self._stream is not None
        host_sbh = self._host[micro_batch]
        device_sbh = torch.empty_like(host_sbh, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # what had it before
        device_sbh.record_stream(self._stream)  # a state may be freed without having been taken
        with torch.cuda.stream(self._stream):
            device_sbh.copy_(host_sbh, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        return device_sbh, arrived


def copying_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream for copies of a CUDA device; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class HostFeatures:
    """The features of a step in host memory: a stage's own, and those that it received.

    A feature comes to the device when it is read, and that of the next micro-batch with it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = copying_stream(device)
        self._states: dict[Feature, HostStates] = {}

    def put(self, feature: Feature, micro_batch: int, tensor: Tensor) -> None:
        """Begin to copy a feature to the host; see `HostStates.put`."""
        if feature not in self._states:
            self._states[feature] = HostStates(self._device, self._stream)
        self._states[feature].put(micro_batch, tensor)

    def take(self, feature: Feature, micro_batch: int) -> Tensor:
        """Return a feature on its device."""
        return self._states[feature].take(micro_batch)

    def of(self, micro_batch: int, features: Sequence[Feature]) -> Mapping[Feature, Tensor]:
        """Return some features of a micro-batch, each of which is fetched when it is read."""
        return _Fetched(self, micro_batch, tuple(features))


@dataclass(frozen=True)
class _Fetched(Mapping[Feature, Tensor]):
    host: HostFeatures
    micro_batch: int
    features: tuple[Feature, ...]

    def __getitem__(self, feature: Feature) -> Tensor:
        if feature not in self.features:
            raise KeyError(feature)
        return self.host.take(feature, self.micro_batch)

    def __iter__(self) -> Iterator[Feature]:
        return iter(self.features)

    def __len__(self) -> int:
        return len(self.features)

"""A live teacher whose weights rest in host memory between the steps that need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from megatron_distill.log import get_logger
from megatron_distill.models.sharded_weights import has_sharded_weights
from megatron_distill.runtime.batch import Batch
from megatron_distill.signals import Signals
from megatron_distill.train.teachers.live import OnlineTeacher

__all__ = ["HostWeights", "RestingTeacher", "pinned_copies"]

_LOGGER = get_logger(__name__)
# torch's pinned memory has the next power of two in bytes, which for tensors of their own would be
# almost twice the weights of some models.
_BLOCK_BYTES: Final = 2**28


@dataclass
class HostWeights:
    """Parameters in pinned host memory, copied to the GPU while they are in use.

    The host's copy is made once: the weights are frozen. The copies to the GPU run on a stream of
    their own, and the computing stream waits for them by an event. The host waits for nothing.
    `resting` have storage on the GPU between `take` and `release` only.
    """

    resting: Sequence[torch.nn.Parameter]
    device: torch.device
    _shapes: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    _host: list[list[Tensor]] = field(default_factory=list)  # bytes of each, in pieces
    _stream: torch.cuda.Stream | None = None
    _copies: list[Tensor] | None = None
    _arrived: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        self._stream = torch.cuda.Stream(self.device)
        self._shapes = [(one.shape, one.dtype) for one in self.resting]
        self._host = pinned_copies([one.data for one in self.resting])
        self.release()

    def begin(self) -> None:
        """Begin to copy the weights to the GPU, once the current stream gets here.

        The copies are memory of the current stream, which reuses that of weights released before.
        """
        if self._copies is not None:
            return
        assert self._stream is not None
        current = torch.cuda.current_stream(self.device)
        self._copies = [
            torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self._shapes
        ]
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for copy, pieces in zip(self._copies, self._host, strict=True):
                rooms = _bytes_of(copy).split([piece.numel() for piece in pieces])
                for room, piece in zip(rooms, pieces, strict=True):
                    room.copy_(piece, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(self._stream)

    def take(self) -> None:
        """Let the current stream wait for the weights, and put them in their places."""
        self.begin()
        assert self._copies is not None
        assert self._arrived is not None
        torch.cuda.current_stream(self.device).wait_event(self._arrived)
        for parameter, copy in zip(self.resting, self._copies, strict=True):
            parameter.data = copy
        self._copies = None

    def release(self) -> None:
        """Free the weights on the GPU; work that was enqueued before still finds them."""
        for parameter in self.resting:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)


def pinned_copies(
    values: Sequence[Tensor], *, block_bytes: int = _BLOCK_BYTES
) -> list[list[Tensor]]:
    """Return the bytes of tensors in pinned memory, the pieces of each in their order.

    All share blocks of this size, of which the last is as long as the rest. The host waits.
    """
    left, block, at = sum(one.nbytes for one in values), torch.empty(0, dtype=torch.uint8), 0
    copies = []
    for value in values:
        source, pieces = _bytes_of(value), list[Tensor]()
        while source.numel():
            if at == block.numel():
                size = min(block_bytes, left)
                block, at = torch.empty(size, dtype=torch.uint8, pin_memory=True), 0
            piece = block[at : at + source.numel()]
            piece.copy_(source[: piece.numel()])
            source = source[piece.numel() :]
            at, left = at + piece.numel(), left - piece.numel()
            pieces.append(piece)
        copies.append(pieces)
    return copies


def _bytes_of(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class RestingTeacher:
    """A live teacher that runs a whole step before the student, with its weights only then.

    The head stays on the device, where the loss reads it. The hidden states of the step wait there
    too: 2 bytes (in bf16) per value and token of this rank's micro-batches.
    """

    online: OnlineTeacher
    weights: HostWeights | None

    @classmethod
    def of(cls, online: OnlineTeacher, *, key: str) -> RestingTeacher:
        """The same teacher with its weights in host memory; `key` is the setting's, for warnings.

        On a CPU, where the weights are in host memory anyway, nothing moves. Sharded weights are in
        host memory already; each layer's shards are copied before its gather.
        """
        if has_sharded_weights(online.model):
            return cls(online, None)
        parameters = list(online.model.parameters())
        device = parameters[0].device
        if device.type == "cpu":
            if online.groups.world.rank() == 0:
                _LOGGER.warning("%s = true has no effect on a CPU", key)
            return cls(online, None)
        head = online.model.head_weight() if online.groups.is_last_stage else None
        resting = [parameter for parameter in parameters if parameter is not head]
        return cls(online, HostWeights(resting, device))

    def begin(self) -> None:
        """Begin to copy the weights for the coming `signals`."""
        if self.weights is not None:
            self.weights.begin()

    def signals(self, batches: Sequence[Batch]) -> Signals:
        """Return one signal per micro-batch; all of them are computed now.

        Collective: those of `OnlineTeacher.signals`.
        """
        if self.weights is None:
            return self.online.signals(batches)
        self.weights.take()
        signals = self.online.ahead(batches)
        self.weights.release()
        return signals

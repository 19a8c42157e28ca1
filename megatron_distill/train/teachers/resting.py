"""A live teacher whose weights rest in host memory between the steps that need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_distill.log import get_logger
from megatron_distill.models.sharded_weights import has_sharded_weights
from megatron_distill.runtime.batch import Batch
from megatron_distill.signals import Signals
from megatron_distill.train.teachers.live import OnlineTeacher

__all__ = ["HostWeights", "RestingTeacher"]

_LOGGER = get_logger(__name__)


@dataclass
class HostWeights:
    """Parameters in pinned host memory, copied to the GPU while they are in use.

    The host's copy is made once: the weights are frozen. The copies to the GPU run on a stream of
    their own, and the computing stream waits for them by an event. The host waits for nothing.
    `resting` have storage on the GPU between `take` and `release` only.
    """

    resting: Sequence[torch.nn.Parameter]
    device: torch.device
    _host: list[Tensor] = field(default_factory=list)
    _stream: torch.cuda.Stream | None = None
    _copies: list[Tensor] | None = None
    _arrived: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        self._stream = torch.cuda.Stream(self.device)
        for parameter in self.resting:
            host = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=True)
            host.copy_(parameter.data)  # at the start of the run; the host waits here
            self._host.append(host)
        self.release()

    def begin(self) -> None:
        """Begin to copy the weights to the GPU, once the current stream gets here.

        The copies are memory of the current stream, which reuses that of weights released before.
        """
        if self._copies is not None:
            return
        assert self._stream is not None
        current = torch.cuda.current_stream(self.device)
        self._copies = [torch.empty_like(host, device=self.device) for host in self._host]
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for copy, host in zip(self._copies, self._host, strict=True):
                copy.copy_(host, non_blocking=True)
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

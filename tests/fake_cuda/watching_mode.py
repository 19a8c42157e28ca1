"""Fake tensors that say who waits for the device and who communicates from host memory."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map

_aten = torch.ops.aten
_OURS = ("megatron_distill", "megatron/core")


@dataclass
class Seen:
    """What was seen: by file and function, how often."""

    is_watching: bool = False
    waits: Counter[str] = field(default_factory=Counter)  # while watching: numbers for the host
    copies: Counter[str] = field(default_factory=Counter)  # while watching: from host or to it
    from_host: Counter[str] = field(default_factory=Counter)  # at any time: collectives

    def note(self, counts: Counter[str]) -> None:
        """Count the innermost function of ours or Megatron-Core's that is running."""
        if not self.is_watching and counts is not self.from_host:
            return
        for frame in reversed(traceback.extract_stack()):
            if any(part in frame.filename for part in _OURS):
                counts[f"{Path(frame.filename).name}:{frame.name}"] += 1
                return


class WatchingMode(FakeTensorMode):
    """Floats are one, other numbers zero, tensors on their device; collectives change nothing."""

    avoid_device_init = True  # torch.tensor makes its values on the host first

    def __init__(self, seen: Seen) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.seen = seen
        FakeTensor.data = property(Tensor.data.__get__, _set_data)
        FakeTensor.tolist = lambda tensor: self._as_list(tensor)
        FakeTensor.pin_memory = lambda tensor: tensor  # there is no memory, and no stream
        FakeTensor.record_stream = lambda _tensor, _stream: None

    def dispatch(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if func is _aten._local_scalar_dense.default and args[0].constant is None:
            self._note_wait(args[0])
            return _numbers(args[0]).item()
        if func is _aten._pin_memory.default:
            return args[0]
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        if func is _aten._to_copy.default and kwargs.get("device") is not None:
            kinds = {args[0].device.type, torch.device(kwargs["device"]).type}
            if len(kinds) > 1 and not kwargs.get("non_blocking"):
                self.seen.note(self.seen.copies)
        return super().dispatch(func, types, args, kwargs)

    def _note_wait(self, tensor: Tensor) -> None:
        if tensor.device.type == "cuda":
            self.seen.note(self.seen.waits)

    def _as_list(self, tensor: Tensor) -> Any:
        self._note_wait(tensor)
        return _numbers(tensor).tolist()

    def _communicate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the collective on stand-ins, which torch's fake process group leaves alone."""
        stands_for: dict[int, tuple[Tensor, Tensor]] = {}

        def stand_in(value: Any) -> Any:
            if not isinstance(value, FakeTensor):
                return value
            if value.device.type != "cuda":
                self.seen.note(self.seen.from_host)
            other = torch.empty(value.shape, dtype=value.dtype)
            stands_for[id(other)] = (other, value)
            return other

        def original(value: Any) -> Any:
            return stands_for[id(value)][1] if id(value) in stands_for else value

        with unset_fake_temporarily():
            answer = func(*tree_map(stand_in, args), **tree_map(stand_in, kwargs))
        return tree_map(original, answer)


def _numbers(tensor: Tensor) -> Tensor:
    """What the host reads: an optimizer divides by a float, and an integer may be an error's."""
    with unset_fake_temporarily():
        return torch.full(tensor.shape, tensor.dtype.is_floating_point, dtype=tensor.dtype)


def _set_data(tensor: FakeTensor, value: Tensor) -> None:
    """A parameter that is given other data goes where they are, which fake ones forget."""
    Tensor.data.__set__(tensor, value)
    if isinstance(value, FakeTensor):
        tensor.fake_device = value.fake_device

"""Fake tensors that say who waits for the device and who communicates from host memory."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map

_aten = torch.ops.aten
_OURS = ("megatron_distill", "megatron/core")
_FOR_OTHERS = ("host_copy.py", "segments.py")  # copies: who asks for them is counted
_INDEXED = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_OF_NCCL = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64),
)


@dataclass
class Seen:
    """Observations: by file and function, how often."""

    is_watching: bool = False
    waits: Counter[str] = field(default_factory=Counter)  # while watching: numbers for the host
    copies: Counter[str] = field(default_factory=Counter)  # while watching: for which it waits
    unpinned: Counter[str] = field(default_factory=Counter)  # while watching: from pageable memory
    from_host: Counter[str] = field(default_factory=Counter)  # at any time: collectives
    refused: Counter[str] = field(default_factory=Counter)  # at any time: of them by NCCL

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """A copy of what was seen, by kind."""
        return {name: dict(one) for name, one in vars(self).items() if isinstance(one, Counter)}

    def note(self, counts: Counter[str]) -> None:
        """Count the innermost function of ours or Megatron-Core's that is running."""
        if not self.is_watching and counts is not self.from_host and counts is not self.refused:
            return
        for frame in reversed(traceback.extract_stack()):
            name = Path(frame.filename).name
            is_named = name not in _FOR_OTHERS and not frame.name.startswith("<")
            if is_named and any(part in frame.filename for part in _OURS):
                counts[f"{name}:{frame.name}"] += 1
                return


class WatchingMode(FakeTensorMode):
    """Floats are one, other numbers zero, tensors on their device; collectives change nothing."""

    avoid_device_init = True  # torch.tensor makes its values on the host first

    def __init__(self, seen: Seen) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.seen = seen
        self._pinned: dict[int, Any] = {}  # memory without contents, kept: its address is its name
        FakeTensor.data = property(Tensor.data.__get__, _set_data)
        FakeTensor.tolist = lambda tensor: self._as_list(tensor)
        FakeTensor.numpy = lambda tensor: np.array(tensor.tolist())
        FakeTensor.pin_memory = lambda tensor: self._pin(tensor)
        FakeTensor.record_stream = lambda _tensor, _stream: None

    def dispatch(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        is_pinned = bool(kwargs.pop("pin_memory", False))
        if func is _aten._local_scalar_dense.default and args[0].constant is None:
            self._note_wait(args[0])
            return _number(args[0].dtype)
        if func is _aten._pin_memory.default:
            return self._pin(args[0])
        if func is _aten.nonzero.default:
            return self._places(args[0])
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        if func in _INDEXED:
            self._look_at_index(args)
        if func in _COPIES:
            is_pinned |= self._look_at_copy(func, args, kwargs)
        result = super().dispatch(func, types, args, kwargs)
        return self._pin(result) if is_pinned else result

    def _pin(self, tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage
        return tensor

    def _look_at_copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Note a copy between host and device that waits; returns whether its result is pinned."""
        if func is _aten.copy_.default:
            target, source, *rest = args
            kind, is_async = target.device.type, rest[0] if rest else kwargs.get("non_blocking")
            on_host = source if source.device.type == "cpu" else target
        else:
            (source,), device = args, kwargs.get("device")
            if device is None:
                return False
            kind, is_async, on_host = torch.device(device).type, kwargs.get("non_blocking"), source
        if kind == source.device.type:
            return False
        if not is_async:
            self.seen.note(self.seen.copies)
        elif on_host.device.type == "cuda":  # a copy to the host: torch puts it in pinned memory
            return True
        elif on_host.untyped_storage()._cdata not in self._pinned:
            self.seen.note(self.seen.unpinned)
        return False

    def _look_at_index(self, args: Any) -> None:
        """Note an index or a number on the host, which torch copies, and waits for, by itself."""
        indexed, places, *rest = args
        if indexed.device.type != "cuda":
            return
        given = [place for place in places if place is not None]
        is_mask = any(place.dtype is torch.bool for place in given)
        is_number = bool(rest) and rest[0].device.type == "cpu"
        # One number under a mask is filled in; a further mask is counted, a further number copied.
        if is_mask != is_number or any(place.device.type == "cpu" for place in given):
            self.seen.note(self.seen.waits)

    def _places(self, tensor: Tensor) -> Any:
        """The host waits for the number of places, and finds every second one."""
        self._note_wait(tensor)
        size = [tensor.numel() // 2, tensor.dim()]
        return super().dispatch(_aten.new_empty.default, (), (tensor, size), {"dtype": torch.int64})

    def _note_wait(self, tensor: Tensor) -> None:
        if tensor.device.type == "cuda":
            self.seen.note(self.seen.waits)

    def _as_list(self, tensor: Tensor) -> Any:
        self._note_wait(tensor)
        found = _number(tensor.dtype)
        for size in reversed(tensor.shape):
            found = [found] * size
        return found

    def _communicate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the collective on stand-ins, which torch's fake process group leaves alone."""
        if "barrier" in func.__name__:
            self.seen.note(self.seen.waits)
        stands_for: dict[int, tuple[Tensor, Tensor]] = {}

        def stand_in(value: Any) -> Any:
            if not isinstance(value, FakeTensor):
                return value
            if value.device.type != "cuda":
                self.seen.note(self.seen.from_host)
            if not value.is_contiguous() or value.dtype not in _OF_NCCL:
                self.seen.note(self.seen.refused)
            other = torch.empty(value.shape, dtype=value.dtype)
            stands_for[id(other)] = (other, value)
            return other

        def original(value: Any) -> Any:
            return stands_for[id(value)][1] if id(value) in stands_for else value

        with unset_fake_temporarily():
            answer = func(*tree_map(stand_in, args), **tree_map(stand_in, kwargs))
        return tree_map(original, answer)


def _number(dtype: torch.dtype) -> Any:
    """Values that the host reads: an optimizer's divisor, and an integer for an error."""
    if dtype is torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 0


def _set_data(tensor: FakeTensor, value: Tensor) -> None:
    """A parameter that is given other data goes where they are, which fake ones forget."""
    Tensor.data.__set__(tensor, value)
    if isinstance(value, FakeTensor):
        tensor.fake_device = value.fake_device

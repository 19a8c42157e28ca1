"""Memory that lives between steps, and the peak of one step above it.

Two figures, each from a separate step, so that neither slows the timed ones:

* tensors: the bytes of all storages that are alive at once during a step, from any allocator
  (torch, or numpy for tensors made on its memory), above those alive when the step began. On CUDA
  the caching allocator counts them.
* resident: freed memory is returned to the system, the kernel's high-water mark of the process is
  reset, and a step runs. The figure is the mark minus the resident size before. It includes
  further allocators (matrix libraries, gloo) and unused memory between blocks.

Alive when a step begins are the weights of both models, Megatron's gradient buffers (fp32, made
once, refilled by every step), the optimizer's state and the batch. All of that is subtracted,
for both subjects alike; `Persistent` has the size of each part.
"""

from __future__ import annotations

import ctypes
import gc
import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from benchmarks.steps.subject import StepSubject, TrainingState

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_PAUSE = 0.02  # seconds: a thread that waits for a core gets one


@dataclass(frozen=True)
class Persistent:
    """Bytes of this rank's tensors that live from step to step, by owner; shared storage once."""

    weights: int
    gradient_buffers: int
    optimizer: int


@dataclass(frozen=True)
class StepPeak:
    """Bytes above those alive when the step began; None where the machine cannot report them."""

    tensors: int
    left_behind: int  # alive after the step and not before
    resident: int | None


def persistent_bytes(subject: StepSubject) -> Persistent:
    """Count the bytes that live between two steps."""
    seen: set[int] = set()
    training = subject.training
    weights = _storage_bytes((p.data for model in subject.models for p in model.parameters()), seen)
    gradients = _storage_bytes(_gradient_buffers(training), seen)
    return Persistent(weights, gradients, _storage_bytes(_optimizer_tensors(training), seen))


def _gradient_buffers(training: TrainingState) -> Iterable[Tensor]:
    for chunk in training.wrapped:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def _optimizer_tensors(training: TrainingState) -> Iterable[Tensor]:
    for part in training.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _storage_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def step_peak(step: Callable[[], object], device: torch.device) -> StepPeak:
    """Run two more steps and return their peaks above the state before them."""
    gc.collect()
    if device.type == "cuda":
        return _cuda_peak(step, device)
    with LiveStorages() as live:
        step()
        gc.collect()
    return StepPeak(live.peak, live.current, _resident_peak(step))


def _cuda_peak(step: Callable[[], object], device: torch.device) -> StepPeak:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    gc.collect()
    peak = torch.cuda.max_memory_allocated(device) - before
    return StepPeak(peak, torch.cuda.memory_allocated(device) - before, None)


def _has_memory(thing: object) -> bool:
    """Return whether a thing is a tensor with memory: those of shapes alone have none."""
    kind = type(thing)  # `isinstance` asks what a weak proxy stands for, which may be gone
    return issubclass(kind, Tensor) and not issubclass(kind, FakeTensor)


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages that operators use while the mode is on and that are alive.

    Storages of tensors that exist at the start do not count. Memory that an operator allocates and
    releases internally is not seen. A new peak above `settled_above` bytes counts if it is still
    there after a pause: a thread of gloo holds the tensors of a finished collective until it runs
    again, which on a busy machine may be after the next ones exist.
    """

    def __init__(self, *, settled_above: float = math.inf) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self._settled_above = settled_above
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        # Held, so that no later storage gets the address of one of these.
        with warnings.catch_warnings():
            # Listing all objects includes deprecated ones of torch, which warn on access.
            warnings.simplefilter("ignore", FutureWarning)
            tensors = [thing for thing in gc.get_objects() if _has_memory(thing)]
        self._before = [tensor.untyped_storage() for tensor in tensors]
        self._known = {storage.data_ptr() for storage in self._before}

    @property
    def held(self) -> int:
        """The bytes that are alive now; a storage that was emptied has none."""
        alive = [storage for one in self._alive.values() if (storage := one()) is not None]
        return sum(storage.nbytes() for storage in alive)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Arguments too: a tensor on numpy's memory is the output of no operator.
        self._see((args, kwargs))
        result = func(*args, **(kwargs or {}))
        self._see(result)
        return result

    def _see(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0:
            return
        if address in self._known:
            before = self._alive[address]() if address in self._alive else None
            if before is None or before.data_ptr() == address:
                return
            # That one was emptied, and its memory is another's now.
            self.current -= self._sizes[address]

        def gone(_: object) -> None:
            self._known.discard(address)
            del self._alive[address]
            self.current -= size

        self._known.add(address)
        self._alive[address] = weakref.ref(storage, gone)
        self._sizes[address] = size
        self.current += size
        if self.current > max(self.peak, self._settled_above):
            time.sleep(_PAUSE)
        self.peak = max(self.peak, self.current)


def _resident_peak(step: Callable[[], object]) -> int | None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")
        before = _status_bytes("VmRSS")
        step()
        return _status_bytes("VmHWM") - before
    return None


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {field}")

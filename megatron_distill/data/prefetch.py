"""Batches taken before their step: exchanged and copied while the step before runs, or announced.

A stored teacher is told of the batches ahead, so that it reads ahead of the student.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Final, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from megatron_distill.data.loader import StepLoader
from megatron_distill.data.samples import State
from megatron_distill.errors import MegatronDistillError, StoreError
from megatron_distill.runtime.batch import Batch, StepBatches

__all__ = ["Lookahead", "PrefetchedSteps", "PrefetchedUnits", "StepSource", "exchange_group"]

Taken = TypeVar("Taken")


def exchange_group(*, timeout_seconds: float) -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks for the exchange of batches; None in a world of one rank.

    Collective: the whole world, group creation.
    """
    if dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))


class _Ahead(Generic[Taken]):
    """Work for successive steps in a thread, one step at a time; `last_step` is the last one."""

    def __init__(self, work: Callable[[int], Taken], *, last_step: int) -> None:
        self._work = work
        self._last_step = last_step
        self._next: tuple[int, Future[Taken]] | None = None
        self._steps: SimpleQueue[tuple[int, Future[Taken]] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def take(self, step: int) -> Taken:
        """Return the result of the next step, or raise its error."""
        number, result = self._next or (step, self._begin(step))
        assert number == step, f"step {number} has its turn, not {step}"
        self._next = None
        return result.result()

    def begin_after(self, step: int) -> None:
        """Begin the step after this one, if there is one."""
        if step < self._last_step:
            self._next = step + 1, self._begin(step + 1)

    def discard(self) -> None:
        """Wait for the step that is being taken, on all ranks, and forget it."""
        if self._next is not None:
            wait([self._next[1]])
            self._next = None

    def end(self, *, together: bool) -> None:
        """End the thread; where all ranks end together, wait for it and for the step under way."""
        self._steps.put(None)
        if together:
            self.discard()
            if self._thread is not None:
                # A thread that is alive while the interpreter ends may abort the process.
                self._thread.join()

    def _begin(self, step: int) -> Future[Taken]:
        result: Future[Taken] = Future()
        self._steps.put((step, result))
        if self._thread is None:
            # A daemon: a process that ends by an error does not wait for its peers' messages.
            self._thread = Thread(target=self._run, name="prefetch", daemon=True)
            self._thread.start()
        return result

    def _run(self) -> None:
        """Do the work of the queue until it has None."""
        while (asked := self._steps.get()) is not None:
            step, result = asked
            try:
                result.set_result(self._work(step))
            except (MegatronDistillError, RuntimeError) as error:
                result.set_exception(error)  # `take` raises it
            finally:
                if not result.done():  # a defect: it ends this thread as well
                    result.set_exception(sys.exception())


@dataclass(frozen=True)
class _Taken:
    """A step's batches, the loader's state after it, and the event at the end of its copies."""

    batches: StepBatches
    state: State
    copied: torch.cuda.Event | None


class PrefetchedSteps:
    """Takes steps from a loader one step ahead, in a thread of each rank; a `StepSource`.

    The loader's `group` is its own: collectives of two threads cannot share one. It is destroyed on
    exit; None: the loader does not communicate. No step after `last_step` is taken. On CUDA the
    thread copies from pinned memory on a stream of its own.

    An error of the loader is raised on all ranks alike by the `take` of its step. As a context, the
    steps end with the run. A step under way is waited for where all ranks end together. After an
    error of this rank only it is left alone, since peers may never send it.
    """

    def __init__(
        self,
        loader: StepLoader,
        *,
        last_step: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._loader = loader
        self._device = device
        self._group = group
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead = _Ahead(self._take, last_step=last_step)
        self._in_use: StepBatches | None = None
        self._state = loader.state_dict()

    def take(self, step: int) -> StepBatches:
        """The micro-batches of this rank for the next step; the step after it is begun.

        Raises DataError or StoreError, on all ranks alike.

        Collective: those of `StepLoader.take_on_host`, in the thread.
        """
        taken = self._ahead.take(step)
        if taken.copied is not None:
            assert self._stream is not None
            current = torch.cuda.current_stream(self._device)
            current.wait_event(taken.copied)
            # The next copies may reuse the memory of batches that the steps so far have read.
            self._stream.wait_stream(current)
        self._in_use, self._state = taken.batches, taken.state
        self._ahead.begin_after(step)
        return taken.batches

    def state_dict(self) -> State:
        """The position after the last step returned; plain values, the same on all ranks."""
        return self._state

    def load_state_dict(self, state: State) -> None:
        """Continue after the steps that `state` has taken; the step ahead is discarded.

        Raises DataError, on all ranks alike, if the source does not read the same data.

        Collective: that of the loader.
        """
        self._ahead.discard()
        self._loader.load_state_dict(state)
        self._state = self._loader.state_dict()

    def __enter__(self) -> PrefetchedSteps:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        together = _leave_together(error)
        self._ahead.end(together=together)
        if together:
            self._in_use = None
            if self._group is not None:
                dist.destroy_process_group(self._group)
        self._loader.close()

    def _take(self, step: int) -> _Taken:
        batches = self._loader.take_on_host(step)
        state = self._loader.state_dict()
        if self._stream is None:
            return _Taken(batches, state, None)
        with torch.cuda.stream(self._stream):  # also makes its device this thread's
            on_device = tuple(batch.pinned().to(self._device) for batch in batches.micro_batches)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return _Taken(replace(batches, micro_batches=on_device), state, copied)


def _leave_together(error: BaseException | None) -> bool:
    """Whether all ranks leave a block together; after an error of one rank they do not."""
    return error is None or isinstance(error, MegatronDistillError)


class PrefetchedUnits:
    """Takes units of successive steps from a loader one step ahead, in a thread of each rank.

    They are `units`, in host memory, as `StepLoader.take_units` has them. Group, errors and end are
    those of `PrefetchedSteps`.
    """

    def __init__(
        self,
        loader: StepLoader,
        *,
        units: Sequence[int],
        replicas: int,
        last_step: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._loader = loader
        self._group = group
        taken = partial(loader.take_units, units=units, replicas=replicas)
        self._ahead = _Ahead(taken, last_step=last_step)

    def take(self, step: int) -> list[Batch]:
        """The units of the next step; the step after it is begun.

        Raises DataError or StoreError, on all ranks alike.

        Collective: that of `StepLoader.take_units`, in the thread.
        """
        taken = self._ahead.take(step)
        self._ahead.begin_after(step)
        return taken

    def __enter__(self) -> PrefetchedUnits:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        together = _leave_together(error)
        self._ahead.end(together=together)
        if together and self._group is not None:
            dist.destroy_process_group(self._group)
        self._loader.close()


# While a step runs, the next step's records are decoded and those of the step after it are read.
_STEPS_AHEAD: Final = 2


class StepSource(Protocol):
    """Source of the micro-batches of successive steps."""

    def take(self, step: int) -> StepBatches:
        """The micro-batches of this rank for the next step. Raises DataError or StoreError."""
        ...

    def state_dict(self) -> State:
        """The position after the last step taken; plain values, the same on all ranks."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Continue after the steps that `state` has taken. Raises DataError."""
        ...


Stores = Sequence[str] | Mapping[str, Sequence[str]]


def _changed(saved: Stores, own: Stores) -> str | None:
    """Return the teacher whose stores differ from those of a checkpoint; None: none does.

    Teachers that were live until now, or named otherwise, have none to compare.
    """
    if isinstance(saved, Mapping) and isinstance(own, Mapping):
        differing = [name for name in own if name in saved and list(own[name]) != list(saved[name])]
        return f"teachers.{differing[0]}" if differing else None
    if isinstance(saved, Mapping) or isinstance(own, Mapping):
        return None
    return None if list(saved) == list(own) else "teacher"


class Lookahead:
    """Takes steps from a loader ahead of time and announces them; a `StepSource`.

    `expect` is called with the micro-batches of each step when they are taken. No step after
    `last_step` is taken. `stores` are the identities of the teacher's stores, the same on all
    ranks; of several teachers, those of each by name.
    """

    def __init__(
        self,
        loader: StepSource,
        *,
        last_step: int,
        expect: Callable[[Sequence[Batch]], None],
        stores: Stores,
    ) -> None:
        self._loader = loader
        self._last_step = last_step
        self._expect = expect
        self._stores: Stores = dict(stores) if isinstance(stores, Mapping) else list(stores)
        self._ahead: deque[tuple[int, StepBatches, State]] = deque()
        self._state = loader.state_dict()

    def take(self, step: int) -> StepBatches:
        """The micro-batches of this rank for the next step.

        Raises DataError or StoreError on all ranks alike, up to two steps early.

        Collective: those of the loader's `take`, for steps ahead.
        """
        first = self._ahead[-1][0] + 1 if self._ahead else step
        for number in range(first, min(step + _STEPS_AHEAD, self._last_step) + 1):
            batches = self._loader.take(number)
            self._expect(batches.micro_batches)
            self._ahead.append((number, batches, self._loader.state_dict()))
        taken, batches, self._state = self._ahead.popleft()
        assert taken == step, f"step {taken} has its turn, not {step}"
        return batches

    def state_dict(self) -> State:
        """The position after the last step returned, and the identities of the teacher's stores."""
        return {**self._state, "teacher_stores": self._stores}

    def load_state_dict(self, state: State) -> None:
        """Continue after the steps that `state` has taken; call before the first `take`.

        Raises on all ranks alike: DataError if the source does not read the same data, StoreError
        if the steps before were trained on different stores.

        Collective: that of the loader.
        """
        assert not self._ahead, "a state is loaded before steps are taken"
        # The state has no stores if the teacher was live until now.
        changed = _changed(state.get("teacher_stores", self._stores), self._stores)
        if changed is not None:
            raise StoreError(
                f"{changed}.store: differs from the stores in the checkpoint; name the same stores "
                "in the same order, or start a new run with another output"
            )
        self._loader.load_state_dict(state)
        self._state = self._loader.state_dict()

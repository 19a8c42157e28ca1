"""Batches taken before their step, so that a stored teacher can read ahead of the student."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from megatron_distill.data.samples import State
from megatron_distill.errors import StoreError
from megatron_distill.runtime.batch import Batch, StepBatches

__all__ = ["Lookahead", "StepSource"]

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


class Lookahead:
    """Takes steps from a loader ahead of time and announces them; a `StepSource`.

    `expect` is called with the micro-batches of each step when they are taken. No step after
    `last_step` is taken. `stores` are the identities of the teacher's stores, the same on all
    ranks.
    """

    def __init__(
        self,
        loader: StepSource,
        *,
        last_step: int,
        expect: Callable[[Sequence[Batch]], None],
        stores: Sequence[str],
    ) -> None:
        self._loader = loader
        self._last_step = last_step
        self._expect = expect
        self._stores = list(stores)
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
        if state.get("teacher_stores", self._stores) != self._stores:
            raise StoreError(
                "teacher.store: differs from the stores in the checkpoint; name the same stores "
                "in the same order, or start a new run with another output"
            )
        self._loader.load_state_dict(state)
        self._state = self._loader.state_dict()

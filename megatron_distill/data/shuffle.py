"""Packed samples in another order, so that a long document does not fill a batch by itself."""

from __future__ import annotations

from megatron_distill.data.order import permutation
from megatron_distill.data.samples import Sample, SampleSource, State
from megatron_distill.errors import DataError


class ShuffledSamples:
    """Another source's samples, shuffled inside windows of `window`; a `SampleSource`.

    The order is a function of (seed, number of the window). One sample of the next window is read
    for each one given, so that the reading is spread evenly; memory: two windows. The state is the
    source's at the beginning of the window and the number of samples given from it; going back
    there reads one window again. A window longer than a corpus holds parts of several epochs.
    """

    def __init__(self, source: SampleSource, *, window: int, seed: int, name: str) -> None:
        assert window >= 1
        self._source = source
        self._window = window
        self._seed = seed
        self._name = name
        self._begin(source.state_dict(), number=0, given=0)

    def _begin(self, start: State, *, number: int, given: int) -> None:
        self._start = start  # the source's state where the window begins
        self._number = number
        self._given = given
        self._order = permutation(self._window, self._seed, number)
        self._samples: list[Sample] = []
        self._ahead: list[Sample] = []  # the beginning of the next window
        self._ahead_start: State = {}

    def next_sample(self) -> Sample:
        """The next sample in the new order. Raises DataError."""
        if not self._samples:
            self._resume()
        self._ahead.append(self._source.next_sample())
        sample = self._samples[self._order[self._given]]
        self._given += 1
        if self._given == self._window:
            self._turn()
        return sample

    def _resume(self) -> None:
        """Read this window, and of the next one as much as was given of this one."""
        self._samples = [self._source.next_sample() for _ in range(self._window)]
        self._ahead_start = self._source.state_dict()
        self._ahead = [self._source.next_sample() for _ in range(self._given)]

    def _turn(self) -> None:
        """Go on to the next window, which is read by now."""
        samples = self._ahead
        self._begin(self._ahead_start, number=self._number + 1, given=0)
        self._samples, self._ahead_start = samples, self._source.state_dict()

    def state_dict(self) -> State:
        """Plain values: the source's state and three numbers."""
        return {
            "shuffle_samples": self._window,
            "window": self._number,
            "given": self._given,
            "source": self._start,
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state. Raises DataError if source or window are not the same."""
        if state.get("shuffle_samples") != self._window:
            raise DataError(
                f"data source {self._name}: its shuffle_samples changed from "
                f"{state.get('shuffle_samples')}, when the checkpoint was written, to "
                f"{self._window}; restore it, or start a new run with another output"
            )
        self._source.load_state_dict(state["source"])
        self._begin(state["source"], number=state["window"], given=state["given"])

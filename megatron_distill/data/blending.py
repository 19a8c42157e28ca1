"""Several sources as one stream, in the proportion of their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_distill.data.samples import Sample, SampleSource, State, permutation
from megatron_distill.errors import DataError, counted
from megatron_distill.log import get_logger

_LOG = get_logger(__name__)


def next_source(taken: Sequence[int], weights: Sequence[float]) -> int:
    """Index of the source of the next sample; ties go to the lowest index.

    The count of each of k sources stays within 1 - 1/(2k - 2) samples of its weighted share:
    R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980).
    Taking from the source that lags most would let one of eight lag by more than a sample.
    """
    if len(taken) == 1:
        return 0
    count, total = sum(taken) + 1, sum(weights)
    shares = [weight / total for weight in weights]
    lags = [share * count - has for share, has in zip(shares, taken, strict=True)]
    bound = 1 / (2 * len(taken) - 2)
    # There is always a lag of 1/k, but rounding may hide it.
    ready = [i for i, lag in enumerate(lags) if lag >= min(bound, max(lags))]
    return min(ready, key=lambda i: (1 - bound - lags[i]) / shares[i])


def warn_of_pauses(
    taken: Sequence[int], weights: Sequence[float], owners: Sequence[int], *, key: str
) -> None:
    """Warn of sources that a resumed blend does not read for long, since their weights are lower.

    key: of the sources in the configuration; `owners` are their numbers.
    """
    count, total = sum(taken), sum(weights)
    for has, weight, owner in zip(taken, weights, owners, strict=True):
        share = weight / total
        if has - share * count > 1:  # more than `next_source` lets it lead
            _LOG.warning(
                "%s.%d: none of the next %s samples are of this source. It gave %s of the first "
                "%s, and its weight is now a share of %.3g. Weights count from the beginning of "
                "the run: restore them, or start a new run with student.checkpoint",
                *(key, owner, f"{has / share - count:,.0f}", f"{has:,}", f"{count:,}", share),
            )


class BlendedSource:
    """Blend of several sources by weight; a `SampleSource`.

    After n samples the count of every source is within one sample of its share, see `next_source`.
    Samples are numbered from 0 over all sources. `owners` holds the `source` index that each
    source's samples carry; None: the source's position. `teacher_of` returns the number of a
    sample's teacher from its source's position and its number; None: there are not several.
    """

    def __init__(
        self,
        sources: Sequence[SampleSource],
        *,
        weights: Sequence[float],
        owners: Sequence[int] | None = None,
        teacher_of: Callable[[int, int], int] | None = None,
    ) -> None:
        assert len(sources) == len(weights) > 0
        self._sources = tuple(sources)
        self._weights = tuple(weights)
        self._owners = tuple(range(len(sources)) if owners is None else owners)
        self._teacher_of = teacher_of
        self._taken = [0] * len(sources)

    def next_sample(self) -> Sample:
        """The next sample of the blend. Raises DataError."""
        chosen = next_source(self._taken, self._weights)
        sample = self._sources[chosen].next_sample()
        number, in_source = sum(self._taken), self._taken[chosen]
        self._taken[chosen] += 1
        owner = self._owners[chosen]
        sample = replace(sample, sample_id=number, source=owner, number_in_source=in_source)
        return _routed(sample, chosen, self._teacher_of)

    def state_dict(self) -> State:
        """Samples taken from each source, and each source's state."""
        return {
            "taken": list(self._taken),
            "sources": [source.state_dict() for source in self._sources],
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state. Raises DataError if the sources are not the same."""
        if len(state["sources"]) != len(self._sources):
            raise DataError(
                f"data.sources: {counted(len(self._sources), 'source')}, but "
                f"{len(state['sources'])} in the checkpoint; restore them, or start a new run "
                "with another output"
            )
        for source, part in zip(self._sources, state["sources"], strict=True):
            source.load_state_dict(part)
        self._taken = list(state["taken"])
        warn_of_pauses(self._taken, self._weights, self._owners, key="data.sources")


def blend_finite(
    sources: Sequence[Callable[[], Sample | None]],
    *,
    weights: Sequence[float],
    count: int,
    owners: Sequence[int] | None = None,
    teacher_of: Callable[[int, int], int] | None = None,
) -> list[Sample]:
    """The first `count` samples of a blend of finite sources; None marks the end of a source.

    Returns fewer samples if all sources are exhausted. Samples are numbered from 0.
    `owners` and `teacher_of` as in `BlendedSource`.
    """
    owners = range(len(sources)) if owners is None else owners
    remaining = list(range(len(sources)))
    taken = [0] * len(sources)
    samples: list[Sample] = []
    while remaining and len(samples) < count:
        place = next_source([taken[i] for i in remaining], [weights[i] for i in remaining])
        chosen = remaining[place]
        sample = sources[chosen]()
        if sample is None:
            remaining.remove(chosen)
            continue
        sample = replace(
            sample,
            sample_id=len(samples),
            source=owners[chosen],
            number_in_source=taken[chosen],
        )
        taken[chosen] += 1
        samples.append(_routed(sample, chosen, teacher_of))
    return samples


def _routed(sample: Sample, source: int, teacher_of: Callable[[int, int], int] | None) -> Sample:
    if teacher_of is None:
        return sample
    return replace(sample, teacher_number=teacher_of(source, sample.sample_id))


class ShuffledSamples:
    """A source's samples, shuffled inside windows of `window` samples; a `SampleSource`.

    The order is a function of (seed, number of the window). Each sample returned reads one sample
    of the next window, which spreads the reading evenly; memory: two windows. The state is the
    source's state at the beginning of the window and the number of samples returned from it.
    Resuming reads one window again. A window longer than a corpus holds parts of several epochs.
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
        """Read this window, and as many samples of the next one as were returned from this one."""
        self._samples = [self._source.next_sample() for _ in range(self._window)]
        self._ahead_start = self._source.state_dict()
        self._ahead = [self._source.next_sample() for _ in range(self._given)]

    def _turn(self) -> None:
        """Switch to the next window, which has been read completely."""
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
                f"data source {self._name}: shuffle_samples differs from the checkpoint "
                f"({self._window}, was {state.get('shuffle_samples')}); restore it, or start a "
                "new run with another output"
            )
        self._source.load_state_dict(state["source"])
        self._begin(state["source"], number=state["window"], given=state["given"])

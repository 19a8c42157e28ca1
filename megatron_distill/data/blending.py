"""Several sources as one stream, in the proportion of their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_distill.data.samples import Sample, SampleSource, State
from megatron_distill.errors import DataError


def largest_deficit(taken: Sequence[int], weights: Sequence[float]) -> int:
    """The source that lags furthest behind its share of the next sample; the first of equals."""
    count = sum(taken) + 1
    total = sum(weights)
    deficits = [weight / total * count - has for weight, has in zip(weights, taken, strict=True)]
    return deficits.index(max(deficits))


class BlendedSource:
    """Takes each next sample from the source with the largest deficit; a `SampleSource`.

    After n samples every source has given its share of n to within one sample (for two sources;
    to within the number of sources in general). Samples are numbered from 0 over all sources.
    """

    def __init__(self, sources: Sequence[SampleSource], *, weights: Sequence[float]) -> None:
        assert len(sources) == len(weights) > 0
        self._sources = tuple(sources)
        self._weights = tuple(weights)
        self._taken = [0] * len(sources)

    def next_sample(self) -> Sample:
        """The next sample of the blend. Raises DataError."""
        chosen = largest_deficit(self._taken, self._weights)
        sample = self._sources[chosen].next_sample()
        number = sum(self._taken)
        self._taken[chosen] += 1
        return replace(sample, sample_id=number)

    def state_dict(self) -> State:
        """What each source has given, and where it stands."""
        return {
            "taken": list(self._taken),
            "sources": [source.state_dict() for source in self._sources],
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state. Raises DataError if the sources are not the same."""
        if len(state["sources"]) != len(self._sources):
            raise DataError(
                f"data.sources: {len(self._sources)} sources, but the checkpoint was written with "
                f"{len(state['sources'])}; restore them, or start a new run with another output"
            )
        for source, part in zip(self._sources, state["sources"], strict=True):
            source.load_state_dict(part)
        self._taken = list(state["taken"])


def blend_finite(
    sources: Sequence[Callable[[], Sample | None]], *, weights: Sequence[float], count: int
) -> list[Sample]:
    """The first `count` samples of a blend; a source that gives None has no more.

    Fewer come back when all of them are exhausted. Samples are numbered from 0.
    """
    remaining = list(range(len(sources)))
    taken = [0] * len(sources)
    samples: list[Sample] = []
    while remaining and len(samples) < count:
        place = largest_deficit([taken[i] for i in remaining], [weights[i] for i in remaining])
        chosen = remaining[place]
        sample = sources[chosen]()
        if sample is None:
            remaining.remove(chosen)
            continue
        taken[chosen] += 1
        samples.append(replace(sample, sample_id=len(samples)))
    return samples

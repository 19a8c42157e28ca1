"""One device of several rounds, each of which has measured every rate once.

A machine that is slow for some seconds is so in one round, for all of its rates. Each rate is the
median of the rounds, and its spread their range over that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from megatron_distill.planning.device import DeviceProfile

__all__ = ["reduced"]


def reduced(rounds: Sequence[DeviceProfile]) -> DeviceProfile:
    """Return the medians of rates of one machine, with the spread of each that differs.

    A rate has the name of its key, and a curve the spread of its worst point. `network` has none:
    it is a copy of `node`.
    """
    trees = [one.model_dump(exclude={"spread"}) for one in rounds]
    found: dict[str, float] = {}
    for name, value in _spreads(trees):
        if value > 0 and not name.startswith("network"):
            found[name] = max(found.get(name, 0.0), round(value, 3))
    return DeviceProfile.model_validate({**_medians(trees), "spread": found})


def _medians(values: Sequence[Any]) -> Any:
    """Return the medians of all numbers in trees of one shape; the rest is that of the first."""
    first = values[0]
    if isinstance(first, Mapping):
        common = [key for key in first if all(key in value for value in values)]
        return {key: _medians([value[key] for value in values]) for key in common}
    if isinstance(first, tuple):
        return tuple(_medians(one) for one in zip(*values, strict=True))
    return median(values) if isinstance(first, float) else first


def _spreads(values: Sequence[Any], name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the name of each number and its range over the median, 0 where that is 0."""
    first = values[0]
    if isinstance(first, Mapping):
        for key in first:
            own = [value[key] for value in values if key in value]
            yield from _spreads(own, f"{name}.{key}" if name else str(key))
    elif isinstance(first, tuple):
        for one in zip(*values, strict=True):
            yield from _spreads(one, name)
    elif isinstance(first, float):
        middle = median(values)
        yield name, (max(values) - min(values)) / middle if middle else 0.0

"""Metrics of each source of a blend: their transport in a report, and their means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from megatron_distill.runtime.batch import LabelCounts, StepBatches
from megatron_distill.train.metrics import PUBLIC_NAMES

__all__ = [
    "BY_SOURCE",
    "LabelTotals",
    "SourceFigures",
    "name_of",
    "part_of",
    "source_keys",
    "split_report",
    "step_figures",
]

BY_SOURCE: Final = "by_source"
_AT: Final = "@"
_BY_LABEL: Final = frozenset({"ce", "teacher_ce"})  # means over labels, not distilled positions
_COUNTED: Final = ("ce", "kd")  # these also report the label count of their means

SourceFigures = dict[str, dict[str, float]]


def source_keys(names: Sequence[str], sources: Sequence[str]) -> tuple[str, ...]:
    """Return the reduced report's keys of figure `name`: `name@source`, source by source."""
    return tuple(f"{name}{_AT}{source}" for name in names for source in sources)


def split_report(report: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Take the scalars out of a report whose entries are ``[1 + sources]``.

    The entries per source go under `BY_SOURCE` as one vector, in the order of `source_keys`.
    """
    columns = torch.stack([report[name] for name in names])
    scalars = dict(zip(names, columns[:, 0].unbind(), strict=True))
    return {**scalars, BY_SOURCE: columns[:, 1:].reshape(-1)}


def name_of(key: str) -> str:
    """The figure's name in a key, with or without a source."""
    return key.partition(_AT)[0]


def step_figures(
    values: dict[str, float],
    step: StepBatches,
    sources: Sequence[str],
    *,
    terms: Sequence[str] = (),
) -> SourceFigures:
    """Take the sources' figures out of a step's values: losses and their label counts.

    A loss is the mean over the source's trained labels in the global batch: cross-entropy, all
    distillation, and each of these terms. Values of other names are dropped.
    """
    losses = {*_COUNTED, *terms}
    whole, by_source = LabelTotals.of([step], ()), LabelTotals.of([step], sources)
    shares = {key: values.pop(key) for key in list(values) if _AT in key}
    means = {
        key: share * part_of(whole.behind(name_of(key)), by_source.behind(key))
        for key, share in shares.items()
        if name_of(key) in losses
    }
    return by_source.nested(means)[1]


@dataclass(frozen=True)
class LabelTotals:
    """Counts of trained labels of some steps, in total and per source."""

    whole: LabelCounts
    by_source: Mapping[str, LabelCounts]

    @classmethod
    def of(cls, steps: Sequence[StepBatches], sources: Sequence[str]) -> LabelTotals:
        """Sum the steps' counts."""
        whole = _added(LabelCounts(step.ce_tokens, step.kd_tokens) for step in steps)
        by_source = {
            source: _added(step.by_source[index] for step in steps)
            for index, source in enumerate(sources)
        }
        return cls(whole, by_source)

    def behind(self, key: str) -> float:
        """The weighted count of labels in the mean under that key."""
        name, at, source = key.partition(_AT)
        counts = self.by_source[source] if at else self.whole
        return counts.ce if name in _BY_LABEL else counts.kd

    def nested(self, means: Mapping[str, float]) -> tuple[dict[str, float], SourceFigures]:
        """Split the means of all labels from those per source, which get public names.

        Each source also reports its label count; a mean over no label is left out.
        """
        overall: dict[str, float] = {}
        sources: SourceFigures = {}
        for key, mean in means.items():
            name, at, source = key.partition(_AT)
            if not at:
                overall[name] = mean
                continue
            figures = sources.setdefault(source, {})
            if name in _COUNTED:
                figures[f"{name}_tokens"] = self.behind(key)
            if self.behind(key):
                figures[PUBLIC_NAMES.get(name, name)] = mean
        return overall, sources


def part_of(count: float, whole: float) -> float:
    """The quotient of two counts of labels; zero where the divisor is zero."""
    return count / whole if whole else 0.0


def _added(counts: Iterable[LabelCounts]) -> LabelCounts:
    counts = tuple(counts)
    return LabelCounts(sum(one.ce for one in counts), sum(one.kd for one in counts))

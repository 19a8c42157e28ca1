"""Sums over the trained positions of a shard, from which a store's statistics follow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_distill.signals.store.records import (
    SampleRecord,
    TopKEntries,
    trained_positions,
)

__all__ = ["Totals"]


@dataclass(frozen=True)
class Totals:
    """Sums over positions whose label is trained; means are sums over `positions`.

    Attributes:
        positions: how many there are.
        kept: ids per position (different ids, where they were drawn).
        kept_mass: probability of the kept ids.
        entropy: of the teacher, nat.
        label_log_prob: of the teacher, nat; its mean is minus the teacher's cross-entropy.
        kept_histogram: entry i counts positions with 2^i to 2^(i + 1) - 1 ids.
    """

    positions: int = 0
    kept: int = 0
    kept_mass: float = 0.0
    entropy: float = 0.0
    label_log_prob: float = 0.0
    kept_histogram: tuple[int, ...] = ()

    @classmethod
    def of_record(cls, record: SampleRecord) -> Totals:
        """The sums of one sample."""
        trained = trained_positions(record)
        entries, scalars = record.entries, record.scalars
        mass = 0.0
        if isinstance(entries, TopKEntries):
            width = entries.ids_SK.shape[1]
            n_kept = entries.n_kept_S
            if n_kept is None:
                n_kept = np.full(len(trained), width, np.int32)
            mass = float(np.exp(entries.log_probs_SK[trained], dtype=np.float64).sum())
        else:
            width = entries.ids_SM.shape[1]
            n_kept = (entries.counts_SM > 0).sum(1, dtype=np.int32)
        counts = np.bincount(n_kept[trained], minlength=width + 1)
        histogram = [int(counts[1 << i : 2 << i].sum()) for i in range(width.bit_length())]
        return cls(
            positions=int(trained.sum()),
            kept=int(n_kept[trained].sum()),
            kept_mass=mass,
            entropy=_sum(None if scalars is None else scalars.entropy_S, trained),
            label_log_prob=_sum(None if scalars is None else scalars.label_log_prob_S, trained),
            kept_histogram=tuple(histogram),
        )

    @classmethod
    def of_all(cls, parts: Iterable[Totals]) -> Totals:
        """The sum of sums."""
        total = cls()
        for part in parts:
            width = max(len(total.kept_histogram), len(part.kept_histogram))
            histograms = [
                list(each.kept_histogram) + [0] * (width - len(each.kept_histogram))
                for each in (total, part)
            ]
            total = cls(
                positions=total.positions + part.positions,
                kept=total.kept + part.kept,
                kept_mass=total.kept_mass + part.kept_mass,
                entropy=total.entropy + part.entropy,
                label_log_prob=total.label_log_prob + part.label_log_prob,
                kept_histogram=tuple(map(sum, zip(*histograms, strict=True))),
            )
        return total

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"kept_histogram": list(self.kept_histogram)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Totals:
        """What `as_json` made plain."""
        return cls(**(value | {"kept_histogram": tuple(value["kept_histogram"])}))


def _sum(values: Any, trained: Any) -> float:
    return 0.0 if values is None else float(values[trained].sum(dtype=np.float64))

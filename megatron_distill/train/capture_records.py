"""From what was captured of a micro-batch to the records of a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_distill.data.samples import Sample
from megatron_distill.signals.store import (
    CaptureSettings,
    DrawnEntries,
    PositionScalars,
    SampleRecord,
    TopKEntries,
    cut_to_mass,
)
from megatron_distill.train.capture_positions import CapturedPositions


def build_records(
    samples: Sequence[Sample], found: CapturedPositions, settings: CaptureSettings
) -> Iterator[SampleRecord]:
    """Yield the records of a micro-batch's samples; rows without a sample have none.

    `found` is of whole sequences, on the host.
    """
    integers, floats = found.integers.numpy(), found.floats.numpy()
    for row, sample in enumerate(samples):
        if sample.sample_id < 0:
            continue
        record = _record(sample, integers[row], floats[row], settings)
        yield record if settings.top_p is None else cut_to_mass(record, settings.top_p)


def _record(
    sample: Sample,
    integers_SI: NDArray[np.int32],
    floats_SF: NDArray[np.float32],
    settings: CaptureSettings,
) -> SampleRecord:
    further = len(settings.temperatures)
    columns = np.ascontiguousarray(floats_SF[:, : 2 * (1 + further) + 2].T)
    sums, (entropy, label) = columns[: 1 + further], columns[1 + further : 3 + further]
    ids = np.ascontiguousarray(integers_SI[:, : settings.k])
    entries: TopKEntries | DrawnEntries
    if settings.mode == "sampled":
        entries = DrawnEntries(ids, np.ascontiguousarray(integers_SI[:, settings.k :]))
    else:
        tails = columns[3 + further :]
        entries = TopKEntries(
            ids_SK=ids,
            log_probs_SK=np.ascontiguousarray(floats_SF[:, -settings.k :]),
            log_tail_S=tails[0],
            temperatures=settings.temperatures,
            log_sum_exp_TS=sums[1:] if further else None,
            log_tail_TS=tails[1:] if further else None,
        )
    return SampleRecord(
        sample_id=sample.sample_id,
        tokens_S1=sample.tokens_S1,
        document_ids_S1=sample.document_ids_S1,
        flags_S1=sample.flags_S1,
        entries=entries,
        scalars=PositionScalars(sums[0], entropy, label),
    )

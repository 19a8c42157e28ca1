"""Random samples of two tokenizers, packed for both, and the micro-batches of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from megatron_distill.data.aligned.documents import AlignedDocument, Side
from megatron_distill.data.aligned.packing import AlignedPacker, Window
from megatron_distill.data.collation import GlobalBatch, count_labels, micro_batch, pack_samples
from megatron_distill.runtime.batch import StepBatches

if TYPE_CHECKING:
    from megatron_distill.data.aligned.rows import ChunkPlanner
    from megatron_distill.runtime.groups import Groups


def random_side(rng: np.random.Generator, sizes: np.ndarray, vocabulary: int) -> Side:
    """Random tokens in chunks of these sizes."""
    tokens = rng.integers(0, vocabulary, int(sizes.sum())).astype(np.int32)
    return Side.of_chunks(tokens, np.repeat(np.arange(len(sizes)), sizes).astype(np.int32))


def packed(
    documents: Iterator[AlignedDocument], lengths: tuple[int, int], samples: int
) -> GlobalBatch:
    """The first samples of documents; lengths: tokens of both sides in a sample."""
    packer = AlignedPacker[int](*(Window(length + 1, 0) for length in lengths))
    found = []
    while len(found) < samples:
        packer.add(next(documents), len(found))
        while packer.is_ready and len(found) < samples:
            found.append(packer.take(len(found)))
    return pack_samples(found)


def step_of(batch: GlobalBatch, groups: Groups, planner: ChunkPlanner, size: int) -> StepBatches:
    """This rank's share of a global batch, in micro-batches of so many samples."""
    (counts,) = count_labels(batch, isolate_documents=True)
    samples, width = batch.tokens_GS1.shape
    share = samples // groups.data.size()
    first = groups.data.rank() * share
    batches = [
        planner.planned(micro_batch(batch, slice(at, at + size), isolate_documents=True))
        for at in range(first, first + share, size)
    ]
    return StepBatches(
        tuple(batches),
        *(counts.ce, counts.kd, samples * (width - 1)),
        *(counts.chunks, counts.pairs, counts.chunk_labels, counts.chunk_ends),
    )

"""Lists of the documents of a store's shards, written as a capture reads its samples.

A list is a function of the stream of samples. Where one is missing or damaged it is written again
from the stream alone: the records stay, and no teacher runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_distill.data.samples import Sample, SampleSource, State
from megatron_distill.errors import StoreError, counted
from megatron_distill.log import get_logger
from megatron_distill.runtime.collectives import from_first_rank, on_first_rank
from megatron_distill.runtime.termination import TerminationRequest
from megatron_distill.store import Plan, ShardProof
from megatron_distill.store.binary import token_digest
from megatron_distill.store.documents import (
    pieces_of_sample,
    publish_documents,
    unlisted_shards,
)
from megatron_distill.store.plan import data_name, shard_folder
from megatron_distill.train.capture.order import (
    CaptureOrder,
    HoleSource,
    StreamPositions,
    working_folder,
)

__all__ = ["DocumentLists", "write_missing_lists"]

_LOGGER = get_logger(__name__)


@dataclass(frozen=True)
class DocumentLists:
    """The lists of one job's shards of a store.

    Attributes:
        folder: of the store.
        plan: of the store.
        job: number of the job, which writes every `jobs`-th shard.
        jobs: number of jobs.
    """

    folder: Path
    plan: Plan
    job: int
    jobs: int

    def write(self, shard: int, samples: Sequence[Sample]) -> None:
        """Write the list of a shard, whose samples these are. Raises StoreError."""
        first = self.plan.first(shard)
        pieces = [
            pieces_of_sample(
                sample.sample_id - first,
                sample.document_ids_S1,
                [(part.digest, part.first) for part in sample.documents],
            )
            for sample in samples
            if sample.documents
        ]
        publish_documents(self.folder, self.plan, shard, pieces)

    def missing(self) -> list[int]:
        """Shards of this job that exist without an intact list. Raises StoreError."""
        shards = unlisted_shards(self.folder, self.plan)
        return [shard for shard in shards if shard % self.jobs == self.job]

    def write_missing(
        self, stream: SampleSource, known: Mapping[int, State], termination: TerminationRequest
    ) -> bool:
        """Write the missing lists from the stream; False after a request to stop.

        known: states of the stream at beginnings of shards. Raises DataError, and StoreError: the
        stream has other samples than a shard, or a list cannot be written.
        """
        order = CaptureOrder(
            holes=tuple(self.missing()),
            samples=self.plan.samples,
            samples_per_shard=self.plan.samples_per_shard,
            replicas=1,
            micro_batch_size=1,
            micro_batches=1,
        )
        source = HoleSource(stream, order, known=known, list_documents=self._write_compared)
        for _ in range(order.wanted_samples):
            if termination.received:
                return False
            source.next_sample()
        return True

    def _write_compared(self, shard: int, samples: Sequence[Sample]) -> None:
        """As `write`, for a shard that exists: its records must have the samples' tokens."""
        root = hashlib.blake2b(digest_size=32)
        for sample in samples:
            root.update(token_digest(sample.tokens_S1))
        if root.hexdigest() != ShardProof.load(self.folder, self.plan, shard).token_root:
            raise StoreError(
                f"{shard_folder(self.folder) / data_name(shard)}: its records have other tokens "
                "than data.sources now give, so its documents cannot be listed; restore the files, "
                "or capture another store"
            )
        self.write(shard, samples)


def write_missing_lists(
    lists: DocumentLists,
    open_stream: Callable[[], SampleSource],
    termination: TerminationRequest,
    device: torch.device,
) -> bool:
    """Write the lists that shards lack; False after a request to stop. Raises on all ranks.

    open_stream: opens the capture's samples, on the first rank.

    Collective: world, those of `from_first_rank` twice and of `on_first_rank`.
    """
    missing = from_first_rank(lists.missing)
    if not missing:
        return True
    _LOGGER.info(
        "%s without a list of documents: the texts are read again to write it; no teacher runs",
        counted(len(missing), "shard"),
    )
    known = StreamPositions(working_folder(lists.folder), lists.plan.uid)
    done = on_first_rank(
        lambda: lists.write_missing(open_stream(), known.load(), termination), device=device
    )
    return from_first_rank(lambda: bool(done))

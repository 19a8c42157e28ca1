"""The loader: one rank reads, every rank receives its micro-batches of the step."""

from __future__ import annotations

import json
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
import torch.distributed as dist

from megatron_distill.data.collation import (
    BatchLayout,
    count_labels,
    micro_batch,
    pack_samples,
    unpack_samples,
)
from megatron_distill.data.samples import Sample, SampleSource, State
from megatron_distill.data.wire import StepData, Wire
from megatron_distill.errors import DataError, MegatronDistillError, StoreError
from megatron_distill.runtime.batch import StepBatches
from megatron_distill.runtime.collectives import together


class StepLoader:
    """Hands out the global batches of a sample source, step by step, to all ranks of a group.

    `source` lives on rank 0 of the group and is None on every other rank; a thread there reads up
    to `prefetch` steps ahead (0: a step is read when it is asked for). What a step holds does not
    depend on the numbers of ranks, and neither does the state, which speaks of the samples that
    were taken, never of those read ahead. Without an initialised process group it works alone.
    Where the samples are those of several `sources`, each step says what it holds of each.
    """

    def __init__(
        self,
        source: SampleSource | None,
        *,
        sequence_length: int,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        context_parallel_rank: int = 0,
        context_parallel_size: int = 1,
        isolate_documents: bool = True,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        prefetch: int = 2,
        sources: int = 1,
    ) -> None:
        self._layout = BatchLayout(
            global_batch_size, micro_batch_size, data_parallel_rank, data_parallel_size
        )
        self._device = torch.device(device)
        self._group = group
        self._wire = Wire(
            global_batch_size=global_batch_size,
            sequence_length=sequence_length,
            device=self._device,
            group=group,
            sources=sources,
        )
        self._sources = sources
        assert (source is not None) == self._wire.is_sender, "the source lives on rank 0 alone"
        self._positions = global_batch_size * sequence_length
        self._context = (context_parallel_rank, context_parallel_size)
        self._isolate_documents = isolate_documents
        self._source = source
        self._beginning = None if source is None else source.state_dict()
        self._samples_taken = 0
        self._last: StepData | None = None
        self._restored: State | None = None
        self._prefetch = prefetch
        self._ahead: deque[Future[StepData | MegatronDistillError]] = deque()
        self._reader: ThreadPoolExecutor | None = None

    def take(self, step: int) -> StepBatches:
        """The micro-batches of this rank for the next step, on its device.

        `step` is checked to be the same on all ranks. Raises DataError or StoreError, on all ranks
        alike.

        Collective: the group, two broadcasts of together 8 bytes per token of the global batch.
        """
        said = self._next_step() if self._source is not None else None
        data = self._wire.exchange(step, said)
        self._last = data
        self._samples_taken += self._layout.global_batch_size
        shards = tuple(
            micro_batch(
                data.batch, self._layout.rows(index), isolate_documents=self._isolate_documents
            )
            .context_shard(*self._context)
            .with_trained_rows()
            .to(self._device)
            for index in range(self._layout.micro_batches)
        )
        counts = data.by_source
        return StepBatches(
            shards,
            ce_tokens=sum(source.ce for source in counts),
            kd_tokens=sum(source.kd for source in counts),
            positions=self._positions,
            by_source=counts if len(counts) > 1 else (),
        )

    def taken_samples(self) -> list[list[Sample]]:
        """The samples of the last step's micro-batches of this rank, whole and on the host."""
        assert self._last is not None, "no step was taken"
        batch = self._last.batch
        return [
            unpack_samples(batch, self._layout.rows(index))
            for index in range(self._layout.micro_batches)
        ]

    def state_dict(self) -> State:
        """Samples taken, and the source's state after them; plain values, the same on all ranks.

        The source's state is None at the beginning.
        """
        source_state = self._restored if self._last is None else self._last.state
        return {"samples": self._samples_taken, "source": source_state}

    def load_state_dict(self, state: State) -> None:
        """Continue after the samples that `state` has taken; another layout may have taken them.

        Raises DataError, on all ranks alike, if the source does not read the same data.

        Collective: the group, one all-gather of a short object per rank.
        """
        if dist.is_initialized():
            with together(group=self._group):
                self._restore(state["source"])
        else:
            self._restore(state["source"])
        self._samples_taken = state["samples"]
        self._last, self._restored = None, state["source"]

    def close(self) -> None:
        """End the reading thread; what it had read ahead is forgotten."""
        if self._reader is not None:
            self._reader.shutdown(wait=True, cancel_futures=True)
            self._reader = None
        self._ahead.clear()

    def __enter__(self) -> StepLoader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _restore(self, source_state: State | None) -> None:
        self.close()
        if self._source is not None:
            assert self._beginning is not None
            self._source.load_state_dict(self._beginning if source_state is None else source_state)

    def _next_step(self) -> StepData | MegatronDistillError:
        if self._prefetch == 0:
            return self._read()
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="data-reader")
        while len(self._ahead) <= self._prefetch:
            self._ahead.append(self._reader.submit(self._read))
        return self._ahead.popleft().result()

    def _read(self) -> StepData | MegatronDistillError:
        assert self._source is not None
        try:
            samples = [self._source.next_sample() for _ in range(self._layout.global_batch_size)]
        except (DataError, StoreError) as error:
            return error
        batch = pack_samples(samples)
        by_source = count_labels(
            batch, sources=self._sources, isolate_documents=self._isolate_documents
        )
        state_text = json.dumps(self._source.state_dict()).encode("utf-8")
        return StepData(batch, by_source, state_text)

"""The loader: one rank reads, every rank receives its micro-batches of the step."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.data.aligned.rows import ChunkPlanner
from megatron_distill.data.collation import (
    BatchLayout,
    GlobalBatch,
    TeacherRows,
    UnitRows,
    count_labels,
    micro_batch,
    pack_samples,
    unpack_samples,
)
from megatron_distill.data.samples import (
    NOT_JOINED,
    WEIGHT_UNITS,
    JoinedSides,
    Sample,
    SampleSource,
    State,
)
from megatron_distill.errors import DataError, MegatronDistillError, StoreError
from megatron_distill.runtime.batch import Batch, LabelCounts, StepBatches
from megatron_distill.runtime.collectives import ERROR_TYPES, together

if TYPE_CHECKING:
    from megatron_distill.runtime.groups import Groups


_Coverage = Callable[[Sequence[Sample]], Mapping[str, float]]


class StepLoader:
    """Broadcasts the global batches of a sample source, step by step, to all ranks of a group.

    `source` is on rank 0 of the group and None on every other rank. A thread of rank 0 reads up
    to `prefetch` steps ahead; 0: a step is read on demand. Samples of a step and the state do not
    depend on the number of ranks. The state covers the samples taken, without those read ahead.
    Without an initialised process group the loader works in one process. With several `sources`
    each step has label counts per source. `teacher_length` is that of samples of a teacher with a
    tokenizer of its own. `planner` then plans the rows of the loss on this rank, and `coverage`
    gives figures of a step's samples on rank 0. `units`: the micro-batches of each teacher with its
    own layout. `joined`: the stores with which samples are joined by their documents.
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
        teacher_length: int | None = None,
        planner: ChunkPlanner | None = None,
        coverage: _Coverage | None = None,
        units: Sequence[UnitRows] = (),
        joined: JoinedSides = NOT_JOINED,
    ) -> None:
        self._units = tuple(units)
        self._coverage = coverage
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
            teacher_length=teacher_length,
            joined=joined,
        )
        self._sources = sources
        assert (source is not None) == self._wire.is_sender, "the source lives on rank 0 alone"
        self._positions = global_batch_size * sequence_length
        self._context = (context_parallel_rank, context_parallel_size)
        self._planner = planner
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

        Raises and communicates as `take_on_host`.
        """
        batches = self.take_on_host(step)
        on_device = tuple(batch.copied_to(self._device) for batch in batches.micro_batches)
        return replace(batches, micro_batches=on_device)

    def take_on_host(self, step: int) -> StepBatches:
        """The micro-batches of this rank for the next step, in host memory.

        `step` is checked to be the same on all ranks. Raises DataError or StoreError, on all ranks
        alike.

        Collective: that of `Wire.exchange`.
        """
        data = self._advance(step)
        shards = tuple(self._shard(data, index) for index in range(self._layout.micro_batches))
        counts = data.by_source
        return StepBatches(
            shards,
            ce_tokens=sum(source.ce for source in counts),
            kd_tokens=sum(source.kd for source in counts),
            positions=self._positions,
            chunks=sum(source.chunks for source in counts),
            pairs=sum(source.pairs for source in counts),
            chunk_labels=sum(source.chunk_labels for source in counts),
            chunk_ends=sum(source.chunk_ends for source in counts),
            by_source=counts if len(counts) > 1 else (),
            coverage=data.coverage,
        )

    def _shard(self, data: StepData, index: int) -> Batch:
        """This rank's part of a micro-batch, with all that can be computed before the step."""
        isolate, planner, layout = self._isolate_documents, self._planner, self._layout
        whole = micro_batch(
            data.batch,
            layout.rows(index),
            isolate_documents=isolate,
            unit_rows=layout.rows_of_all(index),
        )
        shard = whole.context_shard(*self._context) if planner is None else planner.planned(whole)
        shard = shard.with_trained_rows()
        size = layout.micro_batch_size
        units = tuple(
            own.batches(data.batch, index, micro_batch_size=size, isolate_documents=isolate)
            for own in self._units
        )
        return replace(shard, units=units)

    def take_units(self, step: int, units: Sequence[int], *, replicas: int) -> list[Batch]:
        """Micro-batches of the next step by number, of any replica; whole, in host memory.

        Unit g has the rows [g m, (g + 1) m) of the global batch, m being the micro-batch size. The
        i-th of `units` runs beside the i-th ones of as many `replicas`: units i * replicas and
        those after it. Raises and communicates as `take_on_host`.
        """
        batch, size = self._advance(step).batch, self._layout.micro_batch_size
        return [
            micro_batch(
                batch,
                slice(unit * size, (unit + 1) * size),
                isolate_documents=self._isolate_documents,
                unit_rows=slice(place * replicas * size, (place + 1) * replicas * size),
            )
            for place, unit in enumerate(units)
        ]

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

        The source's state is None before the first step.
        """
        source_state = self._restored if self._last is None else self._last.state
        return {"samples": self._samples_taken, "source": source_state}

    def load_state_dict(self, state: State) -> None:
        """Resume after the samples that `state` has taken, also under another parallel layout.

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
        """End the reading thread and discard the steps read ahead."""
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

    def _advance(self, step: int) -> StepData:
        """Exchange the next step's samples and count them."""
        outcome = self._next_step() if self._source is not None else None
        data = self._wire.exchange(step, outcome)
        self._last = data
        self._samples_taken += self._layout.global_batch_size
        return data

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
        coverage = None if self._coverage is None else self._coverage(samples)
        return StepData(batch, by_source, state_text, coverage)


def open_loader(
    source: SampleSource | None,
    *,
    sequence_length: int,
    global_batch_size: int,
    micro_batch_size: int,
    isolate_documents: bool,
    groups: Groups,
    device: torch.device,
    prefetch: int,
    sources: int = 1,
    teacher_length: int | None = None,
    planner: ChunkPlanner | None = None,
    coverage: _Coverage | None = None,
    exchange: dist.ProcessGroup | None = None,
    units: Sequence[UnitRows] = (),
    joined: JoinedSides = NOT_JOINED,
) -> StepLoader:
    """Return each rank's loader for a source that exists on the first rank.

    The batches are exchanged in the group `exchange`, None: the world.
    """
    return StepLoader(
        source,
        sequence_length=sequence_length,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=groups.data.rank(),
        data_parallel_size=groups.data.size(),
        context_parallel_rank=groups.context.rank(),
        context_parallel_size=groups.context.size(),
        isolate_documents=isolate_documents,
        device=device,
        group=exchange or groups.world,
        prefetch=prefetch,
        sources=sources,
        teacher_length=teacher_length,
        planner=planner,
        coverage=coverage,
        units=units,
        joined=joined,
    )


_DATA: Final = 0
_FIRST_ERROR: Final = 1  # error types are numbered from here on
_HEADER_FIELDS: Final = 3  # status, step, text bytes; then the counts of each source
_COUNTS: Final = 6  # of labels, of chunks, of labels in chunks, of chunk ends; see `_units`


@dataclass(frozen=True)
class StepData:
    """A step's samples, their label counts per source, and the source's state after them.

    coverage: figures of the samples, on rank 0 alone.
    """

    batch: GlobalBatch
    by_source: tuple[LabelCounts, ...]
    state_text: bytes  # JSON
    coverage: Mapping[str, float] | None = None

    @property
    def state(self) -> State:
        """The source's state after this step's samples."""
        state: State = json.loads(self.state_text)
        return state


class Wire:
    """Broadcasts from rank 0 of a group; without a process group, returns the data unchanged."""

    def __init__(
        self,
        *,
        global_batch_size: int,
        sequence_length: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        sources: int = 1,
        teacher_length: int | None = None,
        joined: JoinedSides = NOT_JOINED,
    ) -> None:
        is_aligned = teacher_length is not None
        assert is_aligned or joined == NOT_JOINED, "samples of two tokenizers are joined"
        self._sources = sources
        self._joined = joined
        self._rows = global_batch_size
        self._width = sequence_length + 1
        self._teacher_width = None if teacher_length is None else teacher_length + 1
        self._group = group
        self._is_alone = not dist.is_initialized() or dist.get_world_size(group) == 1
        self.is_sender = self._is_alone or dist.get_rank(group) == 0
        uses_device = not self._is_alone and dist.get_backend(group) != "gloo"
        self._device = device if uses_device else torch.device("cpu")

    def exchange(self, step: int, outcome: StepData | MegatronDistillError | None) -> StepData:
        """Broadcast rank 0's step data to every rank, or raise rank 0's error on all of them.

        `outcome` is None on other ranks. All ranks must ask for the same step. The returned data
        is in host memory, independent of the device of the broadcast.

        Collective: the group, two broadcasts: a header of 24 bytes and 48 per source, then the
        payload. The payload is 8 bytes per token, or 12 per token of both models with a teacher's
        own tokenizer, plus less than 1 kB per source. Places add 8 bytes per token of the teacher,
        and 8 per store and token of the student. After an error it is the error's text.
        """
        if self._is_alone:
            assert outcome is not None
            if isinstance(outcome, MegatronDistillError):
                raise outcome
            return outcome
        header, payload = self._message(step, outcome) if outcome is not None else (None, None)
        header = self._broadcast(header, _HEADER_FIELDS + _COUNTS * self._sources, torch.int64)
        status, sent_step, text_bytes, *counts = header.tolist()
        assert sent_step == step, f"this rank asks for step {step}, rank 0 sends step {sent_step}"
        words = self._text_words(text_bytes) + (self._data_words() if status == _DATA else 0)
        payload = self._broadcast(payload, words, torch.int32)
        coverage = None
        if isinstance(outcome, StepData):
            text, coverage = outcome.state_text, outcome.coverage
        else:
            text = payload[-self._text_words(text_bytes) :].numpy().tobytes()[:text_bytes]
        if status != _DATA:
            kind = ERROR_TYPES[status - _FIRST_ERROR]
            raise (
                outcome if isinstance(outcome, MegatronDistillError) else kind(text.decode("utf-8"))
            )
        by_source = tuple(
            LabelCounts(*map(_count, of_source))
            for of_source in zip(*[iter(counts)] * _COUNTS, strict=True)
        )
        return StepData(self._unpack(payload), by_source, text, coverage)

    def _data_words(self) -> int:
        return sum(math.prod(shape) for shape in self._shapes()) + 6 * self._rows

    def _shapes(self) -> list[tuple[int, int]]:
        """The shapes of the tensors of tokens, marks and chunks, in the order of the payload."""
        student = (self._rows, self._width)
        if self._teacher_width is None:
            return [student] * 2
        found = [student] * 3 + [(self._rows, self._teacher_width)] * 3
        tokens = self._teacher_width * self._joined.teacher, self._width * self._joined.student
        return [*found, *((self._rows, 2 * count) for count in tokens if count)]

    @staticmethod
    def _text_words(text_bytes: int) -> int:
        return max(1, -(-text_bytes // 4))

    def _message(
        self, step: int, outcome: StepData | MegatronDistillError
    ) -> tuple[Tensor, Tensor]:
        status = _DATA
        if isinstance(outcome, MegatronDistillError):
            status = _FIRST_ERROR + ERROR_TYPES.index(type(outcome))
            text, parts, counts = str(outcome).encode("utf-8"), [], [0] * _COUNTS * self._sources
        else:
            text, batch = outcome.state_text, outcome.batch
            counts = [
                _units(count)
                for source in outcome.by_source
                for count in (
                    *(source.ce, source.kd),
                    *(source.chunks, source.pairs, source.chunk_labels, source.chunk_ends),
                )
            ]
            ids_G2, in_source_G2 = (
                numbers.view(torch.int32)
                for numbers in (batch.sample_ids_G, batch.numbers_in_source_G)
            )
            parts = [batch.tokens_GS1, batch.marks_GS1]
            if batch.teacher is not None:
                own = batch.teacher
                parts += [own.student_chunks_GS1, own.tokens_GU1, own.marks_GU1, own.chunks_GU1]
                assert (own.places_GU12 is not None) == self._joined.teacher
                assert (own.student_places_GS1k2 is not None) == (self._joined.student > 0)
                places = own.places_GU12, own.student_places_GS1k2
                parts += [one for one in places if one is not None]
            parts += [ids_G2, batch.sources_G, batch.teacher_numbers_G, in_source_G2]
        padded = bytearray(text.ljust(4 * self._text_words(len(text)), b"\0"))
        words = torch.frombuffer(padded, dtype=torch.int32)
        payload = torch.cat([*(part.reshape(-1) for part in parts), words])
        return torch.tensor([status, step, len(text), *counts]), payload

    def _broadcast(self, tensor: Tensor | None, size: int, dtype: torch.dtype) -> Tensor:
        if tensor is None:
            tensor = torch.empty(size, dtype=dtype, device=self._device)
        tensor = tensor.to(self._device)
        assert (tensor.shape, tensor.dtype) == ((size,), dtype)
        dist.broadcast(tensor, group=self._group, group_src=0)
        return tensor.cpu()

    def _unpack(self, payload: Tensor) -> GlobalBatch:
        tensors, start = [], 0
        for shape in self._shapes():
            stop = start + math.prod(shape)
            tensors.append(payload[start:stop].view(shape))
            start = stop
        tokens, marks, *own = tensors
        ids_end = start + 2 * self._rows
        # A copy, because a view as int64 needs storage aligned to 8 bytes.
        sample_ids = payload[start:ids_end].clone().view(torch.int64)
        sources = payload[ids_end : ids_end + self._rows]
        numbers_end = ids_end + 2 * self._rows
        numbers = payload[ids_end + self._rows : numbers_end]
        in_source = payload[numbers_end : numbers_end + 2 * self._rows].clone().view(torch.int64)
        teacher = None
        if own:
            student_chunks, *rows = own
            places = rows[3].view(self._rows, -1, 2) if self._joined.teacher else None
            of_student = self._joined.student
            student_places = rows[-1].view(self._rows, self._width, -1, 2) if of_student else None
            first = rows[0], rows[1], rows[2]
            teacher = TeacherRows(*first, student_chunks, places, student_places)
        return GlobalBatch(tokens, marks, sample_ids, sources, numbers, in_source, teacher)


def _units(count: float) -> int:
    """A weighted count of labels or chunks as an integer in units of 1/64."""
    return round(count * WEIGHT_UNITS)


def _count(units: int) -> float:
    return units // WEIGHT_UNITS if units % WEIGHT_UNITS == 0 else units / WEIGHT_UNITS

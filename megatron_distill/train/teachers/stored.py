"""Teacher that reads its signals from a store; it checks every record and computes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_distill.errors import StoreError
from megatron_distill.losses import ChunkTerm, Term, ranked_term
from megatron_distill.runtime.batch import Batch, zigzag_index
from megatron_distill.runtime.collectives import agree, any_rank
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.main_thread import awake_until
from megatron_distill.signals import OnDemand, Recorded
from megatron_distill.store import CaptureSettings, SampleTokens, StoreSet, cut_to_rows, unpack
from megatron_distill.train.teachers.record_signals import (
    blank_record,
    record_rows,
    require_tokens_at,
    signal_of_records,
    signal_of_rows,
    wanted_records,
    wanted_rows,
)

__all__ = [
    "HostBatch",
    "JoinedSamples",
    "StoredTeacher",
    "on_device",
    "read_records",
    "recorded_signal",
    "require_same_tokens",
    "stored_metrics",
]


@dataclass
class _RecordsStep:
    """The records of one step in transit: read by one rank, broadcast, decoded by each rank."""

    batches: Sequence[Batch]
    on_host: Sequence[HostBatch]
    is_exchanged: bool = False
    reading: Future[list[bytes]] | None = None
    decoding: Future[list[Recorded]] | None = None


class StoredTeacher:
    """Reads the signals of micro-batches from stores, on the last pipeline stage only.

    `stores` are open on the first tensor rank of that stage and None elsewhere. `expect` announces
    the micro-batches of a step: a thread of each rank then reads and decodes their records while
    earlier steps run. Micro-batches that were not announced are read on request.

    `vocab_size`: ids of the tokenizer; see `recorded_signal`. `joined`: the samples with a record,
    where there are several teachers; None: all, with the record of their number. The signals of
    one among several hold their terms by name.
    """

    def __init__(
        self,
        stores: StoreSet | None,
        settings: CaptureSettings,
        *,
        terms: Sequence[Term | ChunkTerm],
        vocab_size: int,
        groups: Groups,
        device: torch.device,
        joined: JoinedSamples | None = None,
    ) -> None:
        self._stores = stores
        self._joined = joined
        self._settings = settings
        self._vocab_size = vocab_size
        self._terms = tuple(terms)
        self._groups = groups
        self._device = device
        self._reads_signals = groups.is_last_stage
        assert (stores is not None) == (self._reads_signals and groups.tensor.rank() == 0)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-reader")
        self._expected: deque[_RecordsStep] = deque()

    def expect(self, batches: Sequence[Batch]) -> None:
        """Begin to read the records of a later step."""
        self._expected.append(self._begin(batches))

    def signals(self, batches: Sequence[Batch]) -> OnDemand[Recorded] | Sequence[None]:
        """Return one signal per micro-batch on the last pipeline stage, None elsewhere.

        A step's signals wait in host memory; the device has that of the micro-batch taken last.
        Raises StoreError on all ranks alike, naming shard and sample, if a record is missing,
        damaged, or of different tokens. An announced step may raise it one step early.

        Collective: world, one all-reduce of 8 bytes per step. Tensor group of the last stage, two
        broadcasts per step: 8 bytes per sample and the packed records.
        """
        if self._expected and self._expected[0].batches is batches:
            step = self._expected.popleft()
        else:
            step = self._begin(batches)
        self._exchange(step)
        found = None if step.decoding is None else awake_until(step.decoding)
        if self._expected:
            self._exchange(self._expected[0])
        if found is None:
            return [None] * len(batches)
        return OnDemand(len(found), lambda number: on_device(found[number], self._device))

    def close(self) -> None:
        """End the reading thread and close the stores."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._expected.clear()
        if self._stores is not None:
            self._stores.close()

    def _begin(self, batches: Sequence[Batch]) -> _RecordsStep:
        if not self._reads_signals:
            return _RecordsStep(batches, ())
        step = _RecordsStep(batches, [HostBatch.of(batch, self._joined) for batch in batches])
        if self._stores is not None:
            alone = self._joined is None
            step.reading = self._thread.submit(
                read_records, self._stores, step.on_host, is_alone=alone
            )
        return step

    def _decode(self, packed: Sequence[bytes], batches: Sequence[HostBatch]) -> list[Recorded]:
        signals, remaining = [], iter(packed)
        for batch in batches:
            own = [next(remaining) for _ in batch.record_numbers]
            signals.append(
                recorded_signal(
                    own, batch, self._terms, self._settings, vocab_size=self._vocab_size
                )
            )
        if self._joined is None:
            return signals
        names = tuple(term.name for term in self._terms)
        return [replace(signal, names=names) for signal in signals]

    def _exchange(self, step: _RecordsStep) -> None:
        """Broadcast the packed records to every rank that needs them, and start decoding."""
        if step.is_exchanged:
            return
        step.is_exchanged = True
        packed: list[bytes] = []
        failure: StoreError | None = None
        if step.reading is not None:
            try:
                packed = awake_until(step.reading)
            except StoreError as error:
                failure = error
        # Failures are rare and their messages long: one number first shows if there is any.
        if any_rank(failure is not None, device=self._device):
            agree(failure)
        if not self._reads_signals:
            return
        count = sum(len(batch.record_numbers) for batch in step.on_host)
        packed = _broadcast(packed, count, group=self._groups.tensor, device=self._device)
        step.decoding = self._thread.submit(self._decode, packed, step.on_host)


def read_records(
    stores: StoreSet, batches: Sequence[HostBatch], *, is_alone: bool = True
) -> list[bytes]:
    """Records of all samples, micro-batch by micro-batch, each checked against its row's tokens.

    Records of samples that are joined by documents are cut to the rows that the micro-batch needs.
    A sample may need a few rows of each of many records. is_alone: see `require_same_tokens`.
    """
    packed = []
    for batch in batches:
        if batch.places_bs2 is not None:
            packed += [_rows_of(stores, number, batch) for number in batch.record_numbers]
            continue
        for row, number in enumerate(batch.sample_ids):
            if not batch.is_trained_b[row]:
                packed.append(b"")
                continue
            content, tokens = stores.packed_with_tokens(number)
            place = stores.place(number)
            require_same_tokens(tokens, batch, row, place, is_alone=is_alone)
            packed.append(content)
    return packed


def _rows_of(stores: StoreSet, number: int, batch: HostBatch) -> bytes:
    assert batch.places_bs2 is not None, "the samples are joined by documents"
    content, tokens = stores.packed_with_tokens(number)
    given, place = (batch.tokens_bs, batch.labels_bs), stores.place(number)
    require_tokens_at(tokens, number, batch.places_bs2, given, place)
    return cut_to_rows(content, wanted_rows(batch.places_bs2, number), stores.stores[0].settings)


def _broadcast(
    packed: list[bytes], count: int, *, group: dist.ProcessGroup, device: torch.device
) -> list[bytes]:
    """Return the `count` byte strings of the first rank of the group.

    Collective: the group, two broadcasts: 8 bytes per string, and the strings.
    """
    if group.size() == 1 or count == 0:
        return packed
    is_sender = group.rank() == 0
    lengths = torch.zeros(count, dtype=torch.int64)
    if is_sender:
        lengths = torch.tensor([len(one) for one in packed], dtype=torch.int64)
    lengths = _sent(lengths, group, device)
    content = torch.empty(int(lengths.sum()), dtype=torch.uint8)
    if is_sender:
        content = torch.from_numpy(np.frombuffer(b"".join(packed), np.uint8).copy())
    content = _sent(content, group, device)
    if is_sender:
        return packed
    whole, sizes = content.numpy().tobytes(), lengths.tolist()
    ends = accumulate(sizes)
    return [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _sent(tensor: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Return the tensor of the first rank, in host memory."""
    tensor = tensor if dist.get_backend(group) == "gloo" else tensor.to(device)
    dist.broadcast(tensor, group=group, group_src=0)
    return tensor.cpu()


@dataclass(frozen=True)
class JoinedSamples:
    """The samples of a corpus that one stored teacher of several has records of.

    Attributes:
        teacher: its number in a batch.
        takes_all: whether a term takes it on every sample, and not on those with its number alone.
        of_source: whether record n is of sample n of a source, and not of the whole stream.
        column: where samples are packed for two tokenizers and the records are of the student's
            tokens, the number of the store in `Batch.student_places_bsk2`; else None.
    """

    teacher: int
    takes_all: bool
    of_source: bool
    column: int | None = None

    def of(self, host: Batch) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Return the number of each sample's record, and whether the teacher takes the sample."""
        numbers = host.numbers_in_source if self.of_source else tuple(host.sample_ids_b.tolist())
        taken = tuple(self.takes_all or number == self.teacher for number in host.teacher_numbers)
        return numbers, taken


@dataclass(frozen=True)
class HostBatch:
    """The parts of a micro-batch that select its records, in host memory."""

    tokens_bs: NDArray[np.int64]
    labels_bs: NDArray[np.int64]
    document_ids_bS: NDArray[np.int64] | None  # None where documents are not isolated
    sequence_index_s: NDArray[np.int64]
    sample_ids: tuple[int, ...]
    is_trained_b: tuple[bool, ...]  # rows without a trained label need no record
    # int32, record and position of each label, -1 for none; None: row i has record sample_ids[i]
    places_bs2: NDArray[np.int32] | None = None

    @cached_property
    def record_numbers(self) -> tuple[int, ...]:
        """The numbers of the packed records that the micro-batch needs, in their order."""
        return self.sample_ids if self.places_bs2 is None else wanted_records(self.places_bs2)

    @classmethod
    def of(cls, batch: Batch, joined: JoinedSamples | None = None) -> HostBatch:
        """Return these parts of a micro-batch, from the loader's host copy.

        `joined`: see `StoredTeacher`; a sample that its teacher does not take needs no record.

        For a teacher with a tokenizer of its own, those of its side for all context-parallel ranks,
        one rank's positions after another's, as in `ChunkRows`.
        """
        host = batch.on_host
        numbers, taken = tuple(host.sample_ids_b.tolist()), (True,) * len(host.sample_ids_b)
        if joined is not None:
            numbers, taken = joined.of(host)
        places_bs2 = None
        if joined is not None and joined.column is not None:
            assert host.student_places_bsk2 is not None, "the loader has the places"
            places_bs2 = _taken(host.student_places_bsk2[:, :, joined.column], taken)
        elif host.teacher is not None:
            return cls._of_teacher(host, numbers, taken)
        is_trained = (host.ce_mask_bs | host.kd_mask_bs).any(1).tolist()
        return cls(
            tokens_bs=host.tokens_bs.numpy(),
            labels_bs=host.labels_bs.numpy(),
            document_ids_bS=host.document_ids_bS.numpy() if host.isolate_documents else None,
            sequence_index_s=host.sequence_index_s.numpy(),
            sample_ids=numbers,
            is_trained_b=_both(is_trained, taken),
            places_bs2=places_bs2,
        )

    @classmethod
    def _of_teacher(
        cls, host: Batch, numbers: tuple[int, ...], taken: tuple[bool, ...]
    ) -> HostBatch:
        own, teacher = host.teacher, host.whole_teacher or host.teacher
        assert own is not None
        assert teacher is not None
        length = teacher.tokens_bs.shape[1]
        size = length // len(own.sequence_index_s)
        index_s = torch.cat([zigzag_index(length, rank=rank, size=size) for rank in range(size)])
        places_bs2 = teacher.record_places_bs2
        return cls(
            tokens_bs=teacher.tokens_bs[:, index_s].numpy(),
            labels_bs=teacher.labels_bs[:, index_s].numpy(),
            document_ids_bS=teacher.document_ids_bS.numpy(),
            sequence_index_s=index_s.numpy(),
            sample_ids=numbers,
            is_trained_b=_both(teacher.kd_mask_bs.any(1).tolist(), taken),
            places_bs2=None if places_bs2 is None else _taken(places_bs2[:, index_s], taken),
        )


def _taken(places_bs2: Tensor, taken: Sequence[bool]) -> NDArray[np.int32]:
    """The places in the samples that a teacher takes, -1 in the remaining ones."""
    own: NDArray[np.int32] = places_bs2.where(torch.tensor(taken).view(-1, 1, 1), -1).numpy()
    return own


def _both(one: Sequence[bool], other: Sequence[bool]) -> tuple[bool, ...]:
    return tuple(first and second for first, second in zip(one, other, strict=True))


def require_same_tokens(
    found: SampleTokens, batch: HostBatch, row: int, where: str, *, is_alone: bool = True
) -> None:
    """Raise StoreError unless a record has the tokens and documents of a row.

    is_alone: there is no other teacher, so that the store may be the corpus.
    """
    index_s = batch.sequence_index_s
    tokens = found.tokens_S1[:-1][index_s], found.tokens_S1[1:][index_s]
    for own, stored in zip((batch.tokens_bs[row], batch.labels_bs[row]), tokens, strict=True):
        if not np.array_equal(own, stored):
            place = int(index_s[np.flatnonzero(own != stored)[0]])
            remedy = ", or remove data.sources to train on the samples of the store"
            raise StoreError(
                f"{where}: the tokens in the store and in this run differ, first at position "
                f"{place}; use the corpus, seed and packing of the capture"
                f"{remedy if is_alone else ''}"
            )
    if batch.document_ids_bS is not None and not np.array_equal(
        batch.document_ids_bS[row], found.document_ids_S1[:-1]
    ):
        raise StoreError(
            f"{where}: document boundaries in the store and in this run differ; use the corpus "
            "and packing of the capture"
        )


def recorded_signal(
    packed: Sequence[bytes],
    batch: HostBatch,
    terms: Sequence[Term | ChunkTerm],
    settings: CaptureSettings,
    *,
    vocab_size: int,
) -> Recorded:
    """Return the signal of a micro-batch for each term, at this rank's positions.

    `packed` holds the records of `read_records`, empty for a row that is not trained. Stores of
    older releases may have ids of padding, from `vocab_size` on; see `TopK.within` and
    `Sampled.within`.
    """
    if batch.places_bs2 is not None:
        blank = blank_record(replace(settings, sequence_length=1), 0)
        return signal_of_rows(
            [unpack(content, is_checked=True) for content in packed] or [blank],
            terms,
            settings,
            record_rows(batch.places_bs2),
            vocab_size=vocab_size,
            labels_bs=batch.labels_bs,
        )
    records = [
        unpack(content, is_checked=True) if content else blank_record(settings, number)
        for content, number in zip(packed, batch.sample_ids, strict=True)
    ]
    return signal_of_records(
        records,
        terms,
        settings,
        batch.sequence_index_s,
        vocab_size=vocab_size,
        labels_bs=batch.labels_bs,
    )


def on_device(signal: Recorded, device: torch.device) -> Recorded:
    """The same signal in device memory; the host does not wait for the stream.

    Tensors shared between terms stay shared.
    """
    if device.type == "cpu":
        return signal
    pins = device.type == "cuda"  # a copy from pageable memory would wait
    return signal.map(
        lambda values: (values.pin_memory() if pins else values).to(device, non_blocking=True)
    )


def stored_metrics(settings: CaptureSettings, terms: Sequence[Term | ChunkTerm]) -> tuple[str, ...]:
    """Return the names of the reported metrics of a stored teacher, besides the losses."""
    if any(isinstance(term, ChunkTerm) for term in terms):
        return () if ranked_term(terms) is None else ("topk_mass",)
    scalars = ("teacher_ce", "teacher_entropy") if settings.is_complete else ()
    return (*scalars, "student_entropy", *settings.kind.metrics)

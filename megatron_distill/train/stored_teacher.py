"""The teacher that is a store: nothing is computed, everything is checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.errors import StoreError
from megatron_distill.losses import Term
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.collectives import agree, any_rank
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import Recorded
from megatron_distill.signals.store import CaptureSettings, StoreSet
from megatron_distill.train.stored_signals import (
    HostBatch,
    on_device,
    recorded_signal,
    require_same_tokens,
)

__all__ = ["StoredTeacher"]


@dataclass
class _Step:
    """The records of one step on their way: read by one rank, sent to others, decoded by each."""

    batches: Sequence[Batch]
    on_host: Sequence[HostBatch]
    is_exchanged: bool = False
    reading: Future[list[bytes]] | None = None
    decoding: Future[list[Recorded]] | None = None


class StoredTeacher:
    """Answers micro-batches from stores; on the last pipeline stage, the only one that needs it.

    `stores` are open on the first tensor rank of that stage and None elsewhere. `expect` announces
    the micro-batches of a step: their records are then read and decoded by a thread of each rank
    while earlier steps run. Micro-batches that nobody announced are answered as well.
    """

    def __init__(
        self,
        stores: StoreSet | None,
        settings: CaptureSettings,
        *,
        terms: Sequence[Term],
        groups: Groups,
        device: torch.device,
    ) -> None:
        self._stores = stores
        self._settings = settings
        self._terms = tuple(terms)
        self._groups = groups
        self._device = device
        self._is_listener = groups.is_last_stage
        assert (stores is not None) == (self._is_listener and groups.tensor.rank() == 0)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-reader")
        self._expected: deque[_Step] = deque()

    def expect(self, batches: Sequence[Batch]) -> None:
        """Begin to read what will be asked for next."""
        self._expected.append(self._begin(batches))

    def signals(self, batches: Sequence[Batch]) -> Sequence[Recorded] | Sequence[None]:
        """Return one signal per micro-batch on the last pipeline stage, None elsewhere.

        Raises StoreError on all ranks alike: a record is missing or damaged, or is not about these
        tokens; naming shard and sample. A step that was announced may raise it one step early.

        Collective: world, one all-reduce of 8 bytes per step; tensor group of the last stage, two
        broadcasts per step: 8 bytes per sample and the packed records.
        """
        if self._expected and self._expected[0].batches is batches:
            step = self._expected.popleft()
        else:
            step = self._begin(batches)
        self._exchange(step)
        found = None if step.decoding is None else step.decoding.result()
        if self._expected:
            self._exchange(self._expected[0])
        if found is None:
            return [None] * len(batches)
        return [on_device(signal, self._device) for signal in found]

    def close(self) -> None:
        """End the reading thread and close the stores."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._expected.clear()
        if self._stores is not None:
            self._stores.close()

    def _begin(self, batches: Sequence[Batch]) -> _Step:
        if not self._is_listener:
            return _Step(batches, ())
        step = _Step(batches, [HostBatch.of(batch) for batch in batches])
        if self._stores is not None:
            step.reading = self._thread.submit(_read, self._stores, step.on_host)
        return step

    def _decode(self, packed: Sequence[bytes], batches: Sequence[HostBatch]) -> list[Recorded]:
        signals, remaining = [], iter(packed)
        for batch in batches:
            own = [next(remaining) for _ in batch.sample_ids]
            signals.append(recorded_signal(own, batch, self._terms, self._settings))
        return signals

    def _exchange(self, step: _Step) -> None:
        """Bring the packed records to every rank that needs them, and have them decoded."""
        if step.is_exchanged:
            return
        step.is_exchanged = True
        packed: list[bytes] = []
        failure: StoreError | None = None
        if step.reading is not None:
            try:
                packed = step.reading.result()
            except StoreError as error:
                failure = error
        # A failure is rare and its words are long: first one number says whether there is one.
        if any_rank(failure is not None, device=self._device):
            agree(failure)
        if not self._is_listener:
            return
        count = sum(len(batch.sample_ids) for batch in step.on_host)
        packed = _broadcast(packed, count, group=self._groups.tensor, device=self._device)
        step.decoding = self._thread.submit(self._decode, packed, step.on_host)


def _read(stores: StoreSet, batches: Sequence[HostBatch]) -> list[bytes]:
    """Records of all samples, micro-batch by micro-batch, each about the tokens of its row."""
    packed = []
    for batch in batches:
        for row, number in enumerate(batch.sample_ids):
            if not batch.is_trained_b[row]:
                packed.append(b"")
                continue
            content, tokens = stores.packed_with_tokens(number)
            require_same_tokens(tokens, batch, row, stores.place(number))
            packed.append(content)
    return packed


def _broadcast(
    packed: list[bytes], count: int, *, group: dist.ProcessGroup, device: torch.device
) -> list[bytes]:
    """What the first rank of the group has: `count` byte strings.

    Collective: the group, two broadcasts: 8 bytes per string, and the strings.
    """
    if group.size() == 1:
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
    """The tensor of the first rank, in the memory of the host."""
    tensor = tensor if dist.get_backend(group) == "gloo" else tensor.to(device)
    dist.broadcast(tensor, group=group, group_src=0)
    return tensor.cpu()

"""One step's samples, or one error, from the reading rank to every rank."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.data.collation import GlobalBatch
from megatron_distill.data.samples import WEIGHT_UNITS, State
from megatron_distill.errors import MegatronDistillError
from megatron_distill.runtime.batch import LabelCounts
from megatron_distill.runtime.collectives import ERROR_TYPES

_DATA: Final = 0
_FIRST_ERROR: Final = 1  # and the kinds of error from here on
_HEADER_FIELDS: Final = 3  # status, step, text bytes; two counts (see `_units`) per source


@dataclass(frozen=True)
class StepData:
    """What a step's samples are, what they count, and where the source stands after them."""

    batch: GlobalBatch
    by_source: tuple[LabelCounts, ...]
    state_text: bytes  # JSON

    @property
    def state(self) -> State:
        """Where the source stands after this step's samples."""
        state: State = json.loads(self.state_text)
        return state


class Wire:
    """Broadcasts from rank 0 of a group; in a process without a process group, hands through."""

    def __init__(
        self,
        *,
        global_batch_size: int,
        sequence_length: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        sources: int = 1,
    ) -> None:
        self._sources = sources
        self._rows = global_batch_size
        self._width = sequence_length + 1
        self._group = group
        self._is_alone = not dist.is_initialized() or dist.get_world_size(group) == 1
        self.is_sender = self._is_alone or dist.get_rank(group) == 0
        uses_device = not self._is_alone and dist.get_backend(group) != "gloo"
        self._device = device if uses_device else torch.device("cpu")

    def exchange(self, step: int, said: StepData | MegatronDistillError | None) -> StepData:
        """Every rank gets what rank 0 says: the step's data, or its error raised on all of them.

        `said` is None on every other rank. All ranks must ask for the same step. The data lies in
        the memory of the host, whatever device it came over.

        Collective: the group, two broadcasts: a header of 24 bytes and 16 per source, and 8 bytes
        per token (plus less than 1 kB per source) or the error's text.
        """
        if self._is_alone:
            assert said is not None
            if isinstance(said, MegatronDistillError):
                raise said
            return said
        header, payload = self._message(step, said) if said is not None else (None, None)
        header = self._broadcast(header, _HEADER_FIELDS + 2 * self._sources, torch.int64)
        status, sent_step, text_bytes, *counts = header.tolist()
        assert sent_step == step, f"this rank asks for step {step}, rank 0 sends step {sent_step}"
        words = self._text_words(text_bytes) + (self._data_words() if status == _DATA else 0)
        payload = self._broadcast(payload, words, torch.int32)
        if isinstance(said, StepData):
            text = said.state_text
        else:
            text = payload[-self._text_words(text_bytes) :].numpy().tobytes()[:text_bytes]
        if status != _DATA:
            kind = ERROR_TYPES[status - _FIRST_ERROR]
            raise said if isinstance(said, MegatronDistillError) else kind(text.decode("utf-8"))
        values = [_count(units) for units in counts]
        by_source = tuple(map(LabelCounts, values[::2], values[1::2]))
        return StepData(self._unpack(payload), by_source, text)

    def _data_words(self) -> int:
        return 2 * self._rows * self._width + 3 * self._rows

    @staticmethod
    def _text_words(text_bytes: int) -> int:
        return max(1, -(-text_bytes // 4))

    def _message(self, step: int, said: StepData | MegatronDistillError) -> tuple[Tensor, Tensor]:
        status = _DATA
        if isinstance(said, MegatronDistillError):
            status = _FIRST_ERROR + ERROR_TYPES.index(type(said))
            text, parts, counts = str(said).encode("utf-8"), [], [0, 0] * self._sources
        else:
            text, batch = said.state_text, said.batch
            each = [count for source in said.by_source for count in (source.ce, source.kd)]
            counts = [_units(count) for count in each]
            ids_G2 = batch.sample_ids_G.view(torch.int32)
            parts = [batch.tokens_GS1, batch.marks_GS1, ids_G2, batch.sources_G]
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
        cells = self._rows * self._width
        ids_end = 2 * cells + 2 * self._rows
        # A copy, because a view of 8-byte numbers needs storage that is aligned to them.
        sample_ids = payload[2 * cells : ids_end].clone().view(torch.int64)
        return GlobalBatch(
            tokens_GS1=payload[:cells].view(self._rows, self._width),
            marks_GS1=payload[cells : 2 * cells].view(self._rows, self._width),
            sample_ids_G=sample_ids,
            sources_G=payload[ids_end : ids_end + self._rows],
        )


def _units(count: float) -> int:
    """A count of labels, each with its weight, as a whole number."""
    return round(count * WEIGHT_UNITS)


def _count(units: int) -> float:
    return units // WEIGHT_UNITS if units % WEIGHT_UNITS == 0 else units / WEIGHT_UNITS

"""A live teacher's top-k as an answer: computed where its head is, read as records of a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_distill.losses import ChunkTerm, Term
from megatron_distill.models.gpt import hidden_for_head, vocab_shard
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import HiddenState, Recorded, Signal
from megatron_distill.store import CaptureSettings, PositionScalars, SampleRecord
from megatron_distill.train.capture.positions import PositionCapture
from megatron_distill.train.teachers.answers import Column
from megatron_distill.train.teachers.live import HeadOwner
from megatron_distill.train.teachers.record_signals import (
    is_of_labels,
    needed_support,
    signal_of_records,
)
from megatron_distill.train.teachers.stored import HostBatch, on_device

__all__ = [
    "SentTopK",
    "TopKColumns",
    "sent_settings",
    "serving_capture",
    "signal_of_columns",
    "top_k_columns",
]

_SCALARS = 3  # log-sum-exp, entropy and label's log-probability, at temperature one


def sent_settings(
    terms: Sequence[Term | ChunkTerm], *, k: int, vocab_size: int, sequence_length: int
) -> CaptureSettings:
    """Return the settings of records that serve these terms, with every bit of the values.

    Ratios of probabilities are known at every temperature, and that of a text has one of its own.
    """
    temperatures = {
        term.temperature
        for term in terms
        if needed_support(term) != "renormalized" and not is_of_labels(term)
    }
    return CaptureSettings(
        k=k,
        vocab_size=vocab_size,
        sequence_length=sequence_length,
        codec="f32",
        temperatures=tuple(sorted(temperatures - {1.0})),
    )


def top_k_columns(settings: CaptureSettings) -> tuple[Column, ...]:
    """Return the tensors of an answer: ids, and as fp32 normalisers, tails and log-probabilities.

    4 bytes per id, and 4 per value: 2 per temperature, k, and 2 of the whole distribution.
    """
    temperatures = 1 + len(settings.temperatures)
    floats = 2 * temperatures + 2 + settings.k
    return (
        Column("ids", torch.int32, (settings.k,)),
        Column("values", torch.float32, (floats,), has_logarithms=True),
    )


@dataclass(frozen=True)
class SentTopK:
    """A top-k that moves in place of hidden states between two layouts on the same ranks.

    Attributes:
        settings: of its records.
        signal_of: makes the columns of a micro-batch, in host memory, its signal.
        chunk_tokens: tokens whose logits exist at one time; None: the objective's default.
    """

    settings: CaptureSettings
    signal_of: Callable[[Sequence[Tensor], Batch], Signal]
    chunk_tokens: int | None = None


@dataclass(frozen=True)
class TopKColumns:
    """Turns a unit's last hidden state on a rank of the teacher into its answer."""

    capture: PositionCapture
    owner: HeadOwner

    @torch.no_grad()
    def __call__(self, hidden_sbh: Tensor, batch: Batch) -> Sequence[Tensor]:
        """Return ids and values [s, b, ..] at this context rank's positions; 0 if not trained.

        Collective: tensor group, those of `hidden_for_head` and `PositionCapture`.
        """
        weight, shape, groups = (
            self.owner.head_weight,
            self.owner.architecture,
            self.owner.groups,
        )
        assert weight is not None, "the last stage has the head"
        state = HiddenState(
            hidden_for_head(hidden_sbh, groups=groups),
            weight,
            logit_softcap=shape.logit_softcap,
            logit_scale=shape.logit_scale,
        )
        assert batch.trained_rows_n is not None
        found = self.capture(state, batch)
        size = batch.tokens_bs.shape
        is_trained_n = torch.zeros(
            batch.tokens_bs.numel(), dtype=torch.bool, device=batch.tokens_bs.device
        )
        is_trained_n.index_fill_(0, batch.trained_rows_n, True)
        return [
            torch.where(is_trained_n.unsqueeze(1), values, 0)
            .view(*size, values.shape[1])
            .transpose(0, 1)
            .contiguous()
            for values in (found.integers, found.floats)
        ]


def signal_of_columns(
    columns: Sequence[Tensor],
    batch: Batch,
    terms: Sequence[Term | ChunkTerm],
    settings: CaptureSettings,
    device: torch.device,
) -> Recorded:
    """Return the signal of a unit's answer for each term, as from a store's records.

    It is of this rank's positions, which are those of the answer. From a teacher with a tokenizer
    of its own it is of its tokens of all context ranks, in the order of `ChunkRows`.
    """
    integers, floats = (column.transpose(0, 1).contiguous().numpy() for column in columns)
    host = HostBatch.of(batch)
    records = [
        _record(number, integers[row], floats[row], settings)
        for row, number in enumerate(host.sample_ids)
    ]
    has_own_tokens = batch.on_host.teacher is not None
    index_s = host.sequence_index_s if has_own_tokens else np.arange(integers.shape[1])
    found = signal_of_records(records, terms, settings, index_s, labels_bs=host.labels_bs)
    return on_device(found, device)


def _record(
    sample_id: int,
    integers_SI: NDArray[np.int32],
    floats_SF: NDArray[np.float32],
    settings: CaptureSettings,
) -> SampleRecord:
    further, positions = len(settings.temperatures), len(integers_SI)
    columns = np.ascontiguousarray(floats_SF[:, : _SCALARS + further].T)
    sums, (entropy, label) = columns[: 1 + further], columns[1 + further :]
    entries = settings.kind.of_columns(
        integers_SI,
        floats_SF[:, _SCALARS + further :],
        settings,
        log_sum_exp_TS=sums[1:] if further else None,
    )
    return SampleRecord(
        sample_id=sample_id,
        # The header of the answer has been compared with the tokens.
        tokens_S1=np.zeros(positions + 1, np.int32),
        document_ids_S1=np.zeros(positions + 1, np.int32),
        flags_S1=np.zeros(positions + 1, np.uint8),
        entries=entries,
        scalars=PositionScalars(sums[0], entropy, label),
    )


def serving_capture(
    settings: CaptureSettings, owner: HeadOwner, groups: Groups, chunk_tokens: int | None
) -> TopKColumns:
    """Return the teacher's side for these settings."""
    shard = vocab_shard(owner.architecture, groups, tokens=settings.vocab_size)
    return TopKColumns(PositionCapture(settings, shard, groups.tensor, chunk_tokens), owner)

"""A live teacher's top-k as an answer: computed where its head is, read as a store's records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_distill.losses import ChunkTerm, Term
from megatron_distill.models.gpt import hidden_for_head, vocab_shard
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.segments import copied
from megatron_distill.signals import HiddenState, Recorded, Signal, Support, TopK
from megatron_distill.store import CaptureSettings
from megatron_distill.train.capture.positions import PositionCapture
from megatron_distill.train.teachers.answers import Column
from megatron_distill.train.teachers.live import HeadOwner
from megatron_distill.train.teachers.record_signals import (
    is_of_labels,
    needed_support,
    signal_of_terms,
)
from megatron_distill.train.teachers.stored import HostBatch

__all__ = [
    "SentTopK",
    "TopKColumns",
    "sent_settings",
    "serving_capture",
    "signal_of_columns",
    "top_k_columns",
]


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
        signal_of: makes the columns of a micro-batch its signal.
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
    """Return the signal of a unit's answer for each term, on the device; the host waits for none.

    On a CPU it has the bits of a store's records, on a GPU it differs from them by the rounding of
    tails and temperatures. It is of this rank's positions, which are those of the answer.
    From a teacher with a tokenizer of its own it is of its tokens of all context ranks, in the
    order of `ChunkRows`.
    """
    host = HostBatch.of(batch)
    held = [
        (one if one.device.type == device.type else copied(one, device)).transpose(0, 1)
        for one in columns
    ]
    index_s = host.sequence_index_s
    has_own_tokens = batch.on_host.teacher is not None
    if has_own_tokens and not np.array_equal(index_s, np.arange(held[0].shape[1])):
        order_s = copied(torch.from_numpy(index_s), device)
        held = [one.index_select(1, order_s) for one in held]
    rows = _SentRows.of(held, settings)
    labels = None
    if any(map(is_of_labels, terms)):
        labels = copied(torch.from_numpy(host.labels_bs), device)
    return signal_of_terms(
        terms,
        settings,
        rows.top_k,
        entropy=rows.entropy,
        label_log_prob=rows.label_log_prob,
        labels=labels,
    )


@dataclass(frozen=True)
class _SentRows:
    """The tensors of an answer by position [N], in (b, s) order.

    The same operations as on a store's records (`TopKEntries`), for equal bits. Shapes are those of
    the settings, so that the host reads nothing.

    Attributes:
        temperatures: one, and the further ones of the settings.
        log_sum_exps, log_tails: [N] of each of them.
        ids, log_probs: [N, K].
    """

    temperatures: tuple[float, ...]
    log_sum_exps: tuple[Tensor, ...]
    entropy: Tensor
    label_log_prob: Tensor
    log_tails: tuple[Tensor, ...]
    ids: Tensor
    log_probs: Tensor

    @classmethod
    def of(cls, columns_bs: Sequence[Tensor], settings: CaptureSettings) -> _SentRows:
        """The rows of `CapturedPositions` [b, s, ..]."""
        ids, floats = (one.flatten(0, 1) for one in columns_bs)
        temperatures = (1.0, *settings.temperatures)
        count = len(temperatures)
        scalars, log_probs = floats.split([2 * count + 2, settings.k], 1)
        rows = tuple(row.contiguous() for row in scalars.unbind(1))
        entropy, label_log_prob = rows[count : count + 2]
        return cls(
            temperatures,
            rows[:count],
            entropy,
            label_log_prob,
            rows[count + 2 :],
            ids.long(),
            log_probs.contiguous(),
        )

    def top_k(self, k: int | None, temperature: float, support: Support) -> TopK:
        """The first k ids with their tail at a temperature; k None: all of them."""
        assert support == "tail", "an answer has tails"
        place = self.temperatures.index(temperature)
        log_probs = self.log_probs
        if place > 0:
            # In fp64, because both terms are far larger than their difference.
            logits = log_probs.double() + self.log_sum_exps[0].unsqueeze(1)
            # By a tensor: a GPU multiplies by the reciprocal of a number of the host.
            logits = logits / torch.full_like(logits[:1, :1], temperature)
            log_probs = (logits - self.log_sum_exps[place].unsqueeze(1)).float()
        whole = TopK(self.ids, log_probs, self.log_tails[place], temperature)
        if k is None or k >= self.ids.shape[1]:
            return whole
        return whole.first(k).map(Tensor.contiguous)


def serving_capture(
    settings: CaptureSettings, owner: HeadOwner, groups: Groups, chunk_tokens: int | None
) -> TopKColumns:
    """Return the teacher's side for these settings."""
    shard = vocab_shard(owner.architecture, groups, tokens=settings.vocab_size)
    return TopKColumns(PositionCapture(settings, shard, groups.tensor, chunk_tokens), owner)

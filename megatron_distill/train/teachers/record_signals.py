"""From records of a store, or positions of them, to the signals of an objective's terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_distill.errors import StoreError
from megatron_distill.losses import ChunkTerm, Term
from megatron_distill.signals import IdSignal, Recorded, TopK
from megatron_distill.store import (
    CaptureSettings,
    PositionScalars,
    SampleRecord,
    SampleTokens,
    Support,
)

__all__ = [
    "blank_record",
    "is_of_labels",
    "needed_support",
    "record_rows",
    "require_tokens_at",
    "signal_of_records",
    "signal_of_rows",
    "signal_of_terms",
    "wanted_records",
    "wanted_rows",
]


def signal_of_records(
    records: Sequence[SampleRecord],
    terms: Sequence[Term | ChunkTerm],
    settings: CaptureSettings,
    index_s: NDArray[np.int64],
    *,
    vocab_size: int | None = None,
    labels_bs: NDArray[np.int64] | None = None,
) -> Recorded:
    """Return the signal of a micro-batch's records for each term, at some of their positions.

    `vocab_size`: of the tokenizer; None: the records have no ids of padding. `labels_bs`: for
    terms on the labels alone.
    """
    length = len(records[0].tokens_S1) - 1
    rows_n = None
    if not np.array_equal(index_s, np.arange(length)):
        rows_n = np.concatenate([index_s + row * length for row in range(len(records))])
    return signal_of_rows(
        records, terms, settings, rows_n, vocab_size=vocab_size, labels_bs=labels_bs
    )


def signal_of_rows(
    records: Sequence[SampleRecord],
    terms: Sequence[Term | ChunkTerm],
    settings: CaptureSettings,
    rows_n: NDArray[np.int64] | None,
    *,
    vocab_size: int | None,
    labels_bs: NDArray[np.int64] | None,
) -> Recorded:
    """As `signal_of_records`, at some rows of all records' positions; None: at all of them."""
    entropy = label_log_prob = None
    scalars = [record.scalars for record in records]
    if settings.is_complete:
        entropy = _joined([one.entropy_S for one in scalars if one is not None], rows_n)
        label_log_prob = _joined(
            [one.label_log_prob_S for one in scalars if one is not None], rows_n
        )

    def read(k: int | None, temperature: float, support: Support) -> IdSignal:
        whole = settings.kind.signal(records, k=k, temperature=temperature, support=support)
        if rows_n is not None:
            index_n = torch.from_numpy(rows_n)
            whole = whole.map(lambda values: values[index_n])
        if vocab_size is not None and settings.vocab_size > vocab_size:
            whole = whole.within(vocab_size)
        return whole

    return signal_of_terms(
        terms,
        settings,
        read,
        entropy=entropy,
        label_log_prob=label_log_prob,
        labels=None if labels_bs is None else torch.from_numpy(labels_bs),
    )


def signal_of_terms(
    terms: Sequence[Term | ChunkTerm],
    settings: CaptureSettings,
    read: Callable[[int | None, float, Support], IdSignal],
    *,
    entropy: Tensor | None,
    label_log_prob: Tensor | None,
    labels: Tensor | None,
) -> Recorded:
    """Return the signal of a micro-batch for each term; terms that read alike share it.

    read: of a number of ids (None: all), a temperature and a support. labels: for terms on the
    labels alone, one for each of the N positions, on the device of the signals.
    """
    known: dict[tuple[int | None, float, Support], IdSignal] = {}
    by_term: list[IdSignal] = []
    for term in terms:
        if is_of_labels(term):
            assert label_log_prob is not None, "the store was asked for it"
            assert labels is not None
            by_term.append(_of_labels(labels, label_log_prob))
            continue
        # Common tokens are chosen from all stored ids.
        key = (term.top_k if isinstance(term, Term) else None, *_reading(term, settings))
        if key not in known:
            known[key] = read(*key)
        by_term.append(known[key])
    return Recorded(tuple(by_term), entropy, label_log_prob)


def is_of_labels(term: Term | ChunkTerm) -> bool:
    """Whether a term needs the probabilities of the labels alone."""
    return isinstance(term, ChunkTerm) and term.alignment == "likelihood"


def _of_labels(labels: Tensor, label_log_prob: Tensor) -> TopK:
    """The label of each token, and all further ids as the tail."""
    log_tail = torch.expm1(label_log_prob.double().clamp(max=0.0)).neg().log()
    return TopK(labels.reshape(-1, 1), label_log_prob.unsqueeze(1), log_tail.float())


def needed_support(term: Term | ChunkTerm) -> Support:
    """Return the support that records must serve for a term.

    An arithmetic mean of several teachers needs the normaliser of each, for any support.
    """
    teachers = term.teachers if isinstance(term, Term) else None
    if teachers is None or len(teachers.names) == 1 or teachers.mixture != "arithmetic":
        return term.support
    return "tail" if term.support == "renormalized" else term.support


def _reading(term: Term | ChunkTerm, settings: CaptureSettings) -> tuple[float, Support]:
    """Return the temperature and the support with which records are read for a term.

    Ratios of probabilities are known at every temperature. Renormalised ones are therefore read as
    stored, and the objective renormalises them. An arithmetic mean is taken before that.
    """
    if needed_support(term) != "renormalized":
        return term.temperature, "tail"
    return 1.0, "tail" if settings.is_complete else "renormalized"


def _joined(parts: Sequence[NDArray[np.float32]], rows_n: NDArray[np.int64] | None) -> Tensor:
    whole = np.concatenate(parts)
    return torch.from_numpy(whole if rows_n is None else whole[rows_n])


def blank_record(settings: CaptureSettings, sample_id: int) -> SampleRecord:
    """A valid record of the right shapes for a row that is not trained."""
    positions = settings.sequence_length
    zeros = np.zeros(positions, np.float32)
    return SampleRecord(
        sample_id=sample_id,
        tokens_S1=np.zeros(positions + 1, np.int32),
        document_ids_S1=np.full(positions + 1, -1, np.int32),
        flags_S1=np.zeros(positions + 1, np.uint8),
        entries=settings.kind.blank(settings),
        scalars=PositionScalars(zeros, zeros, zeros) if settings.is_complete else None,
    )


Places = NDArray[np.int32]
"""Record and position of each label of a micro-batch, int32 [b, s, 2]; -1 for none."""


def wanted_records(places_bs2: Places) -> tuple[int, ...]:
    """The numbers of the records that a micro-batch needs, ascending."""
    numbers = np.unique(places_bs2[..., 0])
    return tuple(numbers[numbers >= 0].tolist())


def wanted_rows(places_bs2: Places, number: int) -> NDArray[np.int64]:
    """The positions of a record that a micro-batch needs, ascending."""
    positions = places_bs2[..., 1][places_bs2[..., 0] == number]
    return np.unique(positions).astype(np.int64)


def record_rows(places_bs2: Places) -> NDArray[np.int64]:
    """The row of each label among the wanted rows of its micro-batch's records, one after another.

    A label without a record has row 0, which no loss uses.
    """
    numbers_n, positions_n = places_bs2.reshape(-1, 2).astype(np.int64).T
    keys_n = (numbers_n << 32) + positions_n
    wanted = np.unique(keys_n[numbers_n >= 0])
    return np.where(numbers_n < 0, 0, np.searchsorted(wanted, keys_n))


def require_tokens_at(
    found: SampleTokens,
    number: int,
    places_bs2: Places,
    given: tuple[NDArray[np.int64], NDArray[np.int64]],
    where: str,
) -> None:
    """Raise StoreError unless a record has a micro-batch's tokens at the places that name it.

    given: the tokens before the labels, and the labels, int64 [b, s].
    """
    is_here = places_bs2[..., 0] == number
    positions = places_bs2[is_here][:, 1]
    documents = found.document_ids_S1
    is_same = documents[positions] == documents[positions + 1]
    for offset, own_bs in enumerate(given):
        is_same &= found.tokens_S1[positions + offset] == own_bs[is_here]
    if not is_same.all():
        raise StoreError(
            f"{where}: at position {int(positions[~is_same][0])} its tokens differ from those of "
            "the teacher's tokenizer for the same text. Set data.add_bos as in the capture, or "
            "capture the store again"
        )

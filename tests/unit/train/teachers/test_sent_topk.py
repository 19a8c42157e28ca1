"""A top-k that was sent: the bits of a store's records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_distill.losses import ChunkTerm, Term
from megatron_distill.runtime.batch import Batch
from megatron_distill.signals import Recorded, TopK
from megatron_distill.store import CaptureSettings, SampleRecord
from megatron_distill.train.teachers.record_signals import signal_of_records
from megatron_distill.train.teachers.sent_topk import signal_of_columns
from megatron_distill.train.teachers.stored import HostBatch
from tests.support.batches import batch_of
from tests.support.store_samples import columns_of, settings, tokens_of, top_k_of

ROWS, LENGTH, CPU = 2, 16, torch.device("cpu")
SETTINGS = settings(k=8, vocab_size=40, codec="f32", temperatures=(0.5, 3.0))
# All ids or fewer, at each temperature, with a tail or none; two read alike.
TERMS = (
    Term(top_k=8),
    Term(top_k=5),
    Term(top_k=5, support="renormalized", temperature=2.0),
    Term(top_k=8, temperature=0.5),
    Term(top_k=3, temperature=3.0, divergence="reverse_kl"),
    ChunkTerm(alignment="likelihood"),
)


def sent(wanted: CaptureSettings) -> tuple[list[SampleRecord], list[Tensor]]:
    """Records, and the same as the columns of an answer [s, b, ..]."""
    records = []
    for number in range(ROWS):
        logits = np.random.default_rng(number).normal(0, 3, (LENGTH, wanted.vocab_size))
        plain = tokens_of(number, wanted)
        entries, scalars = top_k_of(logits, wanted.k, plain["tokens_S1"][1:], wanted.temperatures)
        records.append(SampleRecord(number, **plain, entries=entries, scalars=scalars))
    return records, columns_of(records)


def of_two_tokenizers(context: int) -> Batch:
    whole = replace(batch_of(ROWS, LENGTH // 2), teacher=batch_of(ROWS, LENGTH))
    return whole.context_shard(1, context)


def tensors(found: Recorded) -> list[Tensor]:
    assert found.entropy is not None
    assert found.label_log_prob is not None
    of_terms = [one for one in found.by_term if isinstance(one, TopK)]
    assert len(of_terms) == len(found.by_term)
    parts = [part for one in of_terms for part in (one.ids, one.log_probs, one.log_tail)]
    return [found.entropy, found.label_log_prob, *parts]


BATCHES = {
    "one tokenizer": batch_of(ROWS, LENGTH),
    "two tokenizers": of_two_tokenizers(1),
    "two tokenizers, context 2": of_two_tokenizers(2),
}


@pytest.mark.parametrize("case", BATCHES)
def test_a_sent_top_k_has_the_bits_of_records(case: str) -> None:
    batch = BATCHES[case]
    records, columns = sent(SETTINGS)
    host = HostBatch.of(batch)
    expected = signal_of_records(
        records, TERMS, SETTINGS, host.sequence_index_s, labels_bs=host.labels_bs
    )
    found = signal_of_columns(columns, batch, TERMS, SETTINGS, CPU)
    for ours, theirs in zip(tensors(found), tensors(expected), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.is_contiguous()
        assert torch.equal(ours, theirs)
    assert [one.temperature for one in found.by_term[:5]] == [1.0, 1.0, 1.0, 0.5, 3.0]


def test_terms_that_read_alike_share_a_signal() -> None:
    terms = (Term(top_k=5), Term(top_k=5, support="renormalized", temperature=2.0))
    _, columns = sent(SETTINGS)
    found = signal_of_columns(columns, batch_of(ROWS, LENGTH), terms, SETTINGS, CPU)
    assert found.by_term[0] is found.by_term[1]

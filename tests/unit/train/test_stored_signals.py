"""Records as signals of micro-batches: each position has the record of its own token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_distill.data.collation import micro_batch, pack_samples
from megatron_distill.data.samples import Sample, untrained_sample
from megatron_distill.errors import StoreError
from megatron_distill.losses import Term
from megatron_distill.runtime.batch import Batch
from megatron_distill.signals import Recorded, Sampled, TopK
from megatron_distill.store import (
    CaptureSettings,
    SampleRecord,
    SampleTokens,
    pack,
    sampled_signal,
    top_k_signal,
    unpack,
)
from megatron_distill.train.teachers.stored import (
    HostBatch,
    on_device,
    recorded_signal,
    require_same_tokens,
)
from tests.support.store_samples import made_up, settings, tokens_of, top_k_of

UID = b"12345678"
LENGTH = 16


def exact(temperatures: tuple[float, ...] = ()) -> CaptureSettings:
    return settings(codec="f32", vocab_size=40, temperatures=temperatures)


def record_of(sample_id: int, wanted: CaptureSettings) -> SampleRecord:
    logits = np.random.default_rng(sample_id).normal(0, 3, (LENGTH, wanted.vocab_size))
    plain = tokens_of(sample_id, wanted)
    entries, scalars = top_k_of(logits, wanted.k, plain["tokens_S1"][1:], wanted.temperatures)
    return SampleRecord(sample_id, **plain, entries=entries, scalars=scalars)


def batch_of(*samples: Sample, isolate_documents: bool = True) -> Batch:
    rows = slice(0, len(samples))
    return micro_batch(pack_samples(samples), rows, isolate_documents=isolate_documents)


def sample_of(sample_id: int, wanted: CaptureSettings) -> Sample:
    return Sample(**tokens_of(sample_id, wanted), sample_id=sample_id)


def signal_for(
    batch: Batch,
    terms: list[Term],
    wanted: CaptureSettings,
    records: list[SampleRecord],
    vocab_size: int | None = None,
) -> Recorded:
    packed = [pack(record, wanted, UID) for record in records]
    return recorded_signal(
        packed, HostBatch.of(batch), terms, wanted, vocab_size=vocab_size or wanted.vocab_size
    )


def assert_same(one: TopK | Sampled, other: TopK | Sampled) -> None:
    assert type(one) is type(other)
    for name, value in vars(one).items():
        torch.testing.assert_close(value, getattr(other, name), rtol=0, atol=0)


def test_each_term_gets_its_own_ids_and_temperature_and_shares_equal_signals() -> None:
    wanted = exact((2.0,))
    records = [record_of(number, wanted) for number in (4, 7)]
    batch = batch_of(*(sample_of(number, wanted) for number in (4, 7)))
    terms = [
        Term("forward_kl"),
        Term("reverse_kl"),
        Term("forward_kl", temperature=2.0, top_k=3),
        Term("js_divergence", temperature=0.7, support="renormalized"),
    ]
    found = signal_for(batch, terms, wanted, records)
    plain = top_k_signal([unpack(pack(record, wanted, UID)) for record in records])
    assert_same(found.by_term[0], plain)
    assert found.by_term[1] is found.by_term[0]
    third = found.by_term[2]
    assert third.ids.shape == (2 * LENGTH, 3)
    assert third.temperature == 2.0
    # Everything that is not among three ids is in the tail.
    mass = third.log_probs.double().exp().sum(1) + third.log_tail.double().exp()
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-6)
    # Renormalised by the objective, whatever the temperature: ratios are all that it needs.
    assert found.by_term[3] is found.by_term[0]
    for name, values in (("entropy", found.entropy), ("label_log_prob", found.label_log_prob)):
        stored = np.concatenate([getattr(record.scalars, f"{name}_S") for record in records])
        np.testing.assert_array_equal(values, stored)


def test_ids_of_padding_in_an_older_store_belong_to_the_tail() -> None:
    wanted, real = exact(), 30
    records = [record_of(number, wanted) for number in (4, 7)]
    batch = batch_of(*(sample_of(number, wanted) for number in (4, 7)))
    (whole,), (kept,) = (
        signal_for(batch, [Term("forward_kl")], wanted, records, size).by_term
        for size in (None, real)
    )
    is_padding = whole.ids >= real
    assert bool(is_padding.any()), "else this test shows nothing"
    assert bool((kept.log_probs[is_padding] == -torch.inf).all())
    assert torch.equal(kept.log_probs[~is_padding], whole.log_probs[~is_padding])
    mass = torch.where(is_padding, whole.log_probs.exp(), 0.0).sum(1)
    torch.testing.assert_close(kept.log_tail.exp(), whole.log_tail.exp() + mass)


def test_draws_of_padding_in_an_older_store_do_not_count() -> None:
    wanted, real = settings(mode="sampled", sampling_seed=3, codec="f16", vocab_size=40), 30
    batch = batch_of(sample_of(5, wanted))
    found = signal_for(batch, [Term("forward_kl")], wanted, [made_up(5, wanted)], real).by_term[0]
    assert bool((found.counts[found.ids >= real] == 0).all())
    assert bool((found.counts[found.ids < real] > 0).any())
    assert bool((found.target(Term("forward_kl")).counts.sum(1) <= 1 + 1e-9).all())


def test_draws_are_handed_on_in_their_places() -> None:
    wanted = settings(mode="sampled", sampling_seed=3, codec="f16")
    records = [made_up(number, wanted) for number in (5, 6)]
    batch = batch_of(*(sample_of(number, wanted) for number in (5, 6)))
    found = signal_for(batch, [Term("forward_kl")], wanted, records)
    assert_same(found.by_term[0], sampled_signal(records))


def test_which_records_are_needed_is_asked_on_the_host() -> None:
    batch = batch_of(sample_of(4, settings()))
    found, expected = vars(HostBatch.of(batch.to("meta"))), vars(HostBatch.of(batch))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


@pytest.mark.parametrize("mode", ["top_k", "sampled"])
def test_a_row_that_is_not_trained_needs_no_record(mode: str) -> None:
    drawn = {"mode": mode, "sampling_seed": 3} if mode == "sampled" else {"temperatures": (2.0,)}
    wanted = settings(codec="f32", vocab_size=40, **drawn)
    filler = untrained_sample(LENGTH, token=3, sample_id=99)
    batch = batch_of(sample_of(4, wanted), filler)
    host = HostBatch.of(batch)
    assert host.is_trained_b == (True, False)
    record = made_up(4, wanted) if mode == "sampled" else record_of(4, wanted)
    terms = [Term("forward_kl", temperature=1.0 if mode == "sampled" else 2.0)]
    found = recorded_signal([pack(record, wanted, UID), b""], host, terms, wanted, vocab_size=40)
    kept = found.by_term[0]
    assert kept.ids.shape == (2 * LENGTH, wanted.k)
    values = kept.counts if isinstance(kept, Sampled) else kept.log_probs[:, :1]
    assert bool(torch.isfinite(values.float()).all())
    alone = signal_for(batch_of(sample_of(4, wanted)), terms, wanted, [record])
    assert torch.equal(kept.ids[:LENGTH], alone.by_term[0].ids)


@pytest.mark.parametrize(
    ("place", "rank"), [(7, None), *((place, rank) for place in (0, 7, 16) for rank in (0, 1))]
)
def test_another_token_is_found_by_the_rank_that_holds_it(place: int, rank: int | None) -> None:
    wanted = exact()
    batch = batch_of(sample_of(4, wanted))
    if rank is not None:
        batch = batch.context_shard(rank, 2)
    plain = tokens_of(4, wanted)
    require_same_tokens(SampleTokens(**plain), HostBatch.of(batch), 0, "here")
    plain["tokens_S1"][place] ^= 1
    held = {*batch.sequence_index_s.tolist(), *(batch.sequence_index_s + 1).tolist()}
    if place in held:
        with pytest.raises(
            StoreError, match="here: the tokens in the store and in this run differ"
        ):
            require_same_tokens(SampleTokens(**plain), HostBatch.of(batch), 0, "here")
    else:
        require_same_tokens(SampleTokens(**plain), HostBatch.of(batch), 0, "here")


def test_another_document_is_found_where_documents_are_distinguished() -> None:
    wanted = exact()
    plain = tokens_of(4, wanted)
    end = int(np.flatnonzero(np.diff(plain["document_ids_S1"]))[0])
    plain["document_ids_S1"][end] += 1
    found = SampleTokens(**plain)
    together = batch_of(sample_of(4, wanted), isolate_documents=False)
    require_same_tokens(found, HostBatch.of(together), 0, "here")
    with pytest.raises(StoreError, match="document boundaries in the store and in this run differ"):
        require_same_tokens(found, HostBatch.of(batch_of(sample_of(4, wanted))), 0, "here")


def test_signals_shared_by_terms_stay_shared_on_a_device() -> None:
    kept = TopK(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2), torch.zeros(3))
    signal = Recorded((kept, kept), torch.zeros(3), torch.zeros(3))
    assert on_device(signal, torch.device("cpu")) is signal
    moved = on_device(signal, torch.device("meta"))
    assert moved.by_term[0] is moved.by_term[1]
    assert moved.by_term[0].ids.is_meta
    assert moved.entropy.is_meta
    drawn = Recorded((Sampled(kept.ids, kept.ids),))
    assert on_device(drawn, torch.device("meta")).by_term[0].ids.is_meta


def test_the_path_is_not_used_up(tmp_path: Path) -> None:
    """A record read again is the same: decoding does not write into the bytes."""
    wanted = settings(vocab_size=40)
    packed = pack(record_of(2, wanted), wanted, UID)
    before = bytes(packed)
    first = top_k_signal([unpack(packed, is_checked=True)])
    assert_same(first, top_k_signal([unpack(packed, is_checked=True)]))
    assert packed == before

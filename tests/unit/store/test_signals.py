"""Signals of a store: the teacher's own distribution, at every captured temperature."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_distill.errors import StoreError
from megatron_distill.ops.topk import vocab_parallel_topk
from megatron_distill.store import (
    CaptureSettings,
    SampleRecord,
    cut_to_mass,
    draw_ids,
    pack,
    top_k_signal,
    unpack,
)
from megatron_distill.store.drawn_entries import uniforms
from tests.support.store_samples import settings, tokens_of, top_k_of

UID = b"12345678"
TEMPERATURES = (0.5, 2.0, 4.0)
V = 500
TOLERANCE = {"f32": 2e-6, "f16": 2e-3, "u8": 1.5e-2}


def wanted(codec: str = "f32", k: int = 40) -> CaptureSettings:
    return settings(codec=codec, k=k, vocab_size=V, sequence_length=60, temperatures=TEMPERATURES)


def captured(capture: CaptureSettings, sample_id: int = 0) -> tuple[SampleRecord, np.ndarray]:
    """A record and the logits [S, V] that it is of."""
    rng = np.random.default_rng(sample_id)
    logits = (rng.normal(0, 3, (capture.sequence_length, V)) + 20).astype(np.float32)
    plain = tokens_of(sample_id, capture)
    entries, scalars = top_k_of(logits, capture.k, plain["tokens_S1"][1:], capture.temperatures)
    return SampleRecord(sample_id, **plain, entries=entries, scalars=scalars), logits


@pytest.mark.parametrize(
    ("codec", "k", "temperature"),
    [
        *(("f32", 40, temperature) for temperature in (1.0, *TEMPERATURES)),
        ("f32", 7, 2.0), ("f16", 40, 4.0), ("u8", 7, 0.5), ("u8", 7, 1.0),
    ],
)  # fmt: skip
def test_a_temperature_is_that_of_the_whole_softmax(codec: str, k: int, temperature: float) -> None:
    record, logits = captured(wanted(codec))
    signal = top_k_signal([unpack(pack(record, wanted(codec), UID), k)], temperature=temperature)
    exact = vocab_parallel_topk(torch.from_numpy(logits).double(), k, temperature=temperature)
    assert signal.temperature == temperature
    assert torch.equal(signal.ids, exact.ids)
    bound = TOLERANCE[codec] / min(temperature, 1.0)
    for name in ("log_probs", "log_tail"):
        found, expected = getattr(signal, name).double().exp(), getattr(exact, name).exp()
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    mass = signal.log_probs.exp().sum(1) + signal.log_tail.exp()
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-4)


def test_scalars_are_the_teachers() -> None:
    record, logits = captured(wanted("f32"))
    found = unpack(pack(record, wanted("f32"), UID))
    dense = torch.from_numpy(logits).double().log_softmax(1)
    entropy = -(dense.exp() * dense).sum(1)
    labels = torch.from_numpy(found.tokens_S1[1:]).long()
    np.testing.assert_allclose(found.scalars.entropy_S, entropy, rtol=1e-5)
    label = dense.gather(1, labels[:, None])[:, 0]
    np.testing.assert_allclose(found.scalars.label_log_prob_S, label, rtol=1e-5)
    raw = found.entries.log_probs_SK + found.scalars.log_sum_exp_S[:, None]
    exact = np.take_along_axis(logits, found.entries.ids_SK.astype(np.int64), 1)
    np.testing.assert_allclose(raw, exact, atol=1e-5)


@pytest.mark.parametrize("codec", ["f32", "u8"])
def test_rows_of_unequal_length_know_their_temperatures(codec: str) -> None:
    capture = replace(wanted(codec), top_p=0.7)
    record = cut_to_mass(captured(capture)[0], 0.7)
    found = unpack(pack(record, capture, UID), 12)
    for temperature in (1.0, *TEMPERATURES):
        signal = top_k_signal([found], temperature=temperature)
        mass = signal.log_probs.double().exp().sum(1) + signal.log_tail.double().exp()
        torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=2e-4)
        kept = signal.log_probs > -torch.inf
        assert (kept.sum(1).numpy() == found.entries.n_kept_S).all()


def test_other_temperatures_need_the_renormalised_support() -> None:
    record, logits = captured(wanted())
    with pytest.raises(StoreError, match="sample 0: not captured at temperature 3;"):
        top_k_signal([record], temperature=3.0)
    signal = top_k_signal([record, record], temperature=3.0, support="renormalized")
    assert signal.ids.shape == (120, 40)
    kept = torch.from_numpy(logits).double().gather(1, signal.ids[:60])
    exact = (kept / 3.0).log_softmax(1)
    torch.testing.assert_close(signal.log_probs[:60].double(), exact, rtol=0, atol=1e-6)


def test_without_a_tail_only_the_renormalised_support_is_served() -> None:
    record, _ = captured(wanted())
    kept = replace(record, entries=replace(record.entries, log_tail_S=None))
    for support in ("tail", "raw"):
        with pytest.raises(StoreError, match=f"sample 0: the store has no log_tail .*{support}"):
            top_k_signal([kept], support=support)  # type: ignore[arg-type]
    assert torch.isneginf(top_k_signal([kept], support="renormalized").log_tail).all()


# Drawing


def rows(count: int = 3, vocab_size: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randn(count, vocab_size, generator=generator)).log_softmax(1)


def test_draws_are_without_bias() -> None:
    log_probs, total, repeats, draws = rows(), torch.zeros(3, 40, dtype=torch.float64), 1000, 40
    for sample_id in range(repeats):
        ids, counts = draw_ids(log_probs, draws, seed=1, sample_id=sample_id)
        total.scatter_add_(1, ids.long(), counts.double())
    p = log_probs.double().exp()
    deviation = (total / (repeats * draws) - p) / (p * (1 - p) / (repeats * draws)).sqrt()
    assert deviation.abs().max() < 4.5, "in standard deviations"
    assert 0.8 < deviation.std() < 1.2


def test_draws_depend_on_seed_sample_and_position_alone() -> None:
    log_probs = rows(5)
    ids, counts = draw_ids(log_probs, 7, seed=3, sample_id=11)
    again = draw_ids(log_probs, 7, seed=3, sample_id=11)
    assert torch.equal(ids, again[0])
    assert torch.equal(counts, again[1])
    part = draw_ids(log_probs[2:4], 7, seed=3, sample_id=11, first=2)
    assert torch.equal(part[0], ids[2:4])
    for other in ({"seed": 4, "sample_id": 11}, {"seed": 3, "sample_id": 12}):
        assert not torch.equal(draw_ids(log_probs, 7, **other)[0], ids)
    assert (counts.sum(1) == 7).all()
    drawn = counts > 0
    assert (ids.diff(dim=1) > 0)[drawn[:, 1:]].all(), "ascending, each once"
    assert (ids[~drawn] == 0).all()


def test_uniform_numbers_are_those_of_the_generators_definition() -> None:
    found = uniforms(seed=5, sample_id=1 << 40, first=2, positions=2, draws=5)
    assert found.shape == (2, 5)
    # Written down from the first run: another release of numpy must give the same.
    assert [int(x * 2**32) for x in found[0, :3].tolist()] == RECORDED


RECORDED = [405865055, 860246326, 4079608137]


def test_ids_without_mass_are_not_drawn_and_a_sure_one_always_is() -> None:
    log_probs = torch.full((2, 6), -torch.inf)
    log_probs[0, 4] = 0.0
    log_probs[1, 1] = log_probs[1, 5] = np.log(0.5)
    ids, counts = draw_ids(log_probs, 64, seed=0, sample_id=0)
    assert (ids[0, 0], counts[0, 0]) == (4, 64)
    assert ids[1, :2].tolist() == [1, 5]
    assert counts[1, :2].sum() == 64
    with pytest.raises(ValueError, match="do not sum to one"):
        draw_ids(torch.full((1, 6), -torch.inf), 4, seed=0, sample_id=0)
    with pytest.raises(ValueError, match="do not sum to one"):
        draw_ids(torch.randn(1, 6), 4, seed=0, sample_id=0)

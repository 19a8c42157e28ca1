"""The stored values of a live teacher have the bits of the student's objective."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.data.collation import micro_batch, pack_samples
from megatron_distill.data.samples import Sample
from megatron_distill.losses import Term, fused_linear_objective
from megatron_distill.ops import VocabShard, topk_divergence
from megatron_distill.runtime.batch import Batch
from megatron_distill.signals import HiddenState, TopK
from megatron_distill.store import CaptureSettings, draw_ids
from megatron_distill.train.capture.positions import PositionCapture
from tests.distributed.pool import Pool

SIZE = 301
LENGTH = 24
K = 7
HIDDEN = 64
# Products of three rows and fewer are made in another way, with other roundings.
CHUNK = 5


def batch_of(trained: str) -> Batch:
    """Two samples whose labels are trained here and there, everywhere or nowhere."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, SIZE, (2, LENGTH + 1), generator=generator, dtype=torch.int32)
    some = torch.randint(0, 4, (2, LENGTH + 1), generator=generator)
    flags = {"all": torch.full_like(some, 3), "none": torch.zeros_like(some)}.get(trained, some)
    documents = np.zeros(LENGTH + 1, np.int32)
    samples = [
        Sample(tokens[row].numpy(), documents, flags[row].numpy().astype(np.uint8), sample_id)
        for row, sample_id in enumerate((5, 1 << 33))
    ]
    batch = pack_samples(samples)
    return micro_batch(batch, slice(None), isolate_documents=True).with_trained_rows()


def state_of(shard: VocabShard, dtype: torch.dtype, softcap: float | None) -> HiddenState:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2 * LENGTH, HIDDEN, generator=generator)
    weight = torch.randn(SIZE, HIDDEN, generator=generator)
    own = torch.full((shard.width, HIDDEN), 1e3)  # padding that would be seen
    own[: shard.real_width] = weight[shard.start : shard.start + shard.real_width]
    return HiddenState(hidden.to(dtype), own.to(dtype), softcap, 0.7 if softcap else 1.0)


def settings(**changes: Any) -> CaptureSettings:
    plain: dict[str, Any] = {"k": K, "vocab_size": SIZE, "sequence_length": LENGTH}
    return CaptureSettings(**(plain | changes))


def bits(
    rank: int, world: int, padded: int, trained: str, dtype: torch.dtype, softcap: float | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Ids, log-probs and log tail of the trained rows: captured, and chosen by the objective."""
    shard = VocabShard.for_rank(SIZE, padded, rank, world)
    group, batch, state = dist.group.WORLD, batch_of(trained), state_of(shard, dtype, softcap)
    assert group is not None
    captured = PositionCapture(settings(), shard, group, CHUNK)(state, batch)
    rows = batch.trained_rows_n
    assert rows is not None
    found = [captured.integers[rows], captured.floats[rows, -K:], captured.floats[rows, 3]]
    chosen: list[TopK] = []

    def spy(*given: Any, **named: Any) -> Any:
        kept = select(*given, **named)
        chosen.append(kept[0])
        return kept

    select = topk_divergence.select
    ones = torch.zeros(2 * LENGTH)
    ones[rows] = 1.0
    with patch.object(topk_divergence, "select", spy):
        fused_linear_objective(
            state.hidden,
            state.weight,
            state,
            batch.labels_bs.reshape(-1),
            ce_weights=ones,
            kd_weights=ones,
            terms=[Term("forward_kl", top_k=K, support="tail")],
            chunk_tokens=CHUNK,
            shard=shard,
            group=group,
            rows=rows,
        )
    parts = [
        torch.cat([getattr(one, name) for one in chosen])
        for name in ("ids", "log_probs", "log_tail")
    ]
    return found, parts


ROUNDED = ("some", torch.bfloat16, 9.0)


@pytest.mark.parametrize(
    ("world", "padded", "trained", "dtype", "softcap"),
    [
        (1, SIZE, "some", torch.float32, None),
        (1, SIZE, *ROUNDED),
        (4, 512, *ROUNDED),
        (4, 512, "all", torch.float32, None),
        pytest.param(2, 384, *ROUNDED, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_top_k_has_the_bits_that_the_objective_chooses(
    pool: Pool, world: int, padded: int, trained: str, dtype: torch.dtype, softcap: float | None
) -> None:
    for found, chosen in pool.run(world, bits, padded, trained, dtype, softcap):
        ids, log_probs, log_tail = found
        assert (len(ids) == 2 * LENGTH) == (trained == "all")
        assert trained == "all" or len(ids) % CHUNK in (1, 2, 3), (
            "the last chunk is another product"
        )
        assert torch.equal(ids.long(), chosen[0])
        assert torch.equal(log_probs, chosen[1])
        assert torch.equal(log_tail, chosen[2])
        assert ids.max() < SIZE


def capture_whole(
    rank: int, world: int, padded: int, trained: str, changes: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    shard = VocabShard.for_rank(SIZE, padded, rank, world)
    group, batch = dist.group.WORLD, batch_of(trained)
    assert group is not None
    found = PositionCapture(settings(**changes), shard, group, 10)(
        state_of(shard, torch.float32, None), batch
    )
    assert found.integers.dtype == torch.int32
    assert found.floats.dtype == torch.float32
    return found.integers, found.floats


@pytest.mark.parametrize(
    ("trained", "world", "padded"),
    [("some", 1, 384), ("all", 2, 384), ("some", 2, 768), ("none", 2, 384), ("some", 4, 512)],
)
def test_every_position_is_that_of_whole_logits(
    pool: Pool, trained: str, world: int, padded: int
) -> None:
    # Of 768 columns on two ranks, those of the second are padding, all of them.
    results = pool.run(world, capture_whole, padded, trained, {"temperatures": (0.5, 3.0)})
    state = state_of(VocabShard(SIZE, 0, SIZE), torch.float32, None)
    logits = state.hidden.double() @ state.weight.double().t()
    labels = batch_of(trained).labels_bs.reshape(-1, 1)
    dense = logits.log_softmax(1)
    values, ids = dense.sort(dim=1, descending=True, stable=True)
    tails = [
        logits.gather(1, ids[:, K:]).div(t).logsumexp(1) - (logits / t).logsumexp(1)
        for t in (1.0, 0.5, 3.0)
    ]
    expected = [
        *((logits / t).logsumexp(1) for t in (1.0, 0.5, 3.0)),
        -(dense.exp() * dense).sum(1),
        dense.gather(1, labels).squeeze(1),
        *tails,
    ]
    whole = torch.cat([torch.stack(expected, 1), values[:, :K]], 1).float()
    for integers, floats in results:
        assert torch.equal(integers.long(), ids[:, :K])
        torch.testing.assert_close(floats, whole, rtol=1e-5, atol=1e-5)
        assert torch.equal(floats, results[0][1]), "identical bits on every rank"


def test_draws_of_positions_are_those_of_their_samples(pool: Pool) -> None:
    changes = {"mode": "sampled", "k": 30, "sampling_seed": 4}
    batch = batch_of("some")
    state = state_of(VocabShard(SIZE, 0, SIZE), torch.float32, None)
    log_probs = (state.hidden @ state.weight.t()).log_softmax(1).view(2, LENGTH, SIZE)
    for world in (1, 2):
        integers, floats = pool.run(world, capture_whole, 384, "some", changes)[-1]
        assert floats.shape == (2 * LENGTH, 3)
        for row, sample_id in enumerate(batch.sample_ids_b.tolist()):
            ids, counts = draw_ids(log_probs[row], 30, seed=4, sample_id=sample_id)
            found = integers.view(2, LENGTH, 60)[row]
            assert torch.equal(found[:, :30], ids)
            assert torch.equal(found[:, 30:], counts)


def draw_split(rank: int, world: int, log_probs: Tensor, starts: list[int]) -> tuple[Any, Any]:
    """Draws where ranks begin at these columns; the last one may have none."""
    vocab = log_probs.shape[1]
    shard = VocabShard(vocab, starts[rank], starts[rank + 1])
    own = log_probs[:, shard.start : shard.start + shard.real_width]
    return draw_ids(own, 25, seed=1, sample_id=9, first=3, shard=shard, group=dist.group.WORLD)


@pytest.mark.parametrize("starts", [[0, 3, 40], [0, 10, 20, 30, 40], [0, 25, 50], [0, 40, 80]])
def test_draws_of_the_same_log_probs_are_the_same_for_every_split(
    pool: Pool, starts: list[int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = (3 * torch.randn(300, 40, generator=generator)).log_softmax(1)
    log_probs[7] = -torch.inf
    log_probs[7, 33] = 0.0
    whole = draw_ids(log_probs, 25, seed=1, sample_id=9, first=3)
    for ids, counts in pool.run(len(starts) - 1, draw_split, log_probs, starts):
        assert torch.equal(ids, whole[0])
        assert torch.equal(counts, whole[1])


def draw_wrong(rank: int, world: int) -> str:
    log_probs = torch.full((3, 20), -2.0 if rank else -9.0)
    shard = VocabShard(40, 20 * rank, 20 * rank + 20)
    try:
        draw_ids(log_probs, 4, seed=0, sample_id=0, shard=shard, group=dist.group.WORLD)
    except ValueError as error:
        dist.barrier()  # all ranks are here
        return str(error)
    return "no error"


def test_logits_without_a_distribution_over_all_ranks_are_refused_on_all(pool: Pool) -> None:
    text = "log_probs contain a row whose probabilities do not sum to one"
    assert pool.run(2, draw_wrong) == [text, text]

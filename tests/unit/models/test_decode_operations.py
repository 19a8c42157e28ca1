"""Operations of a decode step that a CPU computes in its own way: fp32, against fp64."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from megatron_distill.models.attention_kernels.rule import AttentionRule
from megatron_distill.models.generation import attend, linear
from megatron_distill.models.generation.attend import Core, FirstRows, attend_once
from megatron_distill.models.generation.cache import Cache, KeyShape
from megatron_distill.models.generation.layer import GenerationNorm, HeadNorm, RootMeanSquare
from megatron_distill.models.generation.linear import COPIED_BYTES, Limits, Linear, WeightCopies
from megatron_distill.models.generation.rotation import (
    paired_order,
    paired_rows,
    rotary_table,
    rotate_,
)


@pytest.mark.parametrize("gains", [(6,), (3, 6)], ids=str)
def test_a_norm_has_its_eps_below_the_root(gains: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    gain = torch.randn(gains, generator=generator)
    for size in (0.0, 1e-6, 1e-3, 1.0, 1e4):  # eps is most of it, or nothing
        x = size * torch.randn(4, 3, 6, generator=generator)
        expected = F.rms_norm(x.double(), (6,), eps=1e-5) * gain.double()
        found = RootMeanSquare.of(gain, 1e-5)(x)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-12)


def test_norms_of_heads_in_bf16_round_once() -> None:
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(64, generator=generator).bfloat16() for _ in range(2))
    norms = [GenerationNorm(one, None, 1e-6, RootMeanSquare.of(one, 1e-6)) for one in (query, key)]
    heads = torch.randn(50, 2, 4, 64, generator=generator).bfloat16()
    norm = HeadNorm.of(*norms, 3, None)
    assert norm is not None
    gains = torch.stack([query] * 3 + [key])
    expected = F.rms_norm(heads.float(), (64,), eps=1e-6) * gains.float()
    assert torch.equal(norm(heads), expected.bfloat16())


def test_a_request_has_no_kernel_with_a_plan_for_each_length() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()

    def request(places: int) -> tuple[int, bool, bool]:
        cuda = torch.backends.cuda
        kernels = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
        return places, torch.is_inference_mode_enabled() and all(kernels), cuda.cudnn_sdp_enabled()

    assert attend.reading(request)(3) == (3, True, False)
    assert torch.backends.cuda.cudnn_sdp_enabled() is before is True


@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_of_one_position_has_every_key_that_is_its_own(is_masked: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(3, 2, 2, 8, generator=generator)
    keys, values = torch.randn(2, 6, 11, 8, generator=generator)
    added = None
    if is_masked:
        added = torch.zeros(6, 1, 1, 11)
        for head in range(6):
            added[head, ..., :head] = -torch.inf
    wide = [one.double() for one in (query.view(6, 1, 2, 8), keys[:, None], values[:, None])]
    mask = None if added is None else added.double()
    added = None if added is None else added.squeeze(1)
    expected = F.scaled_dot_product_attention(*wide, attn_mask=mask, scale=0.7).view_as(query)
    for stored in (keys, keys.mT.contiguous().mT):  # in both orders in memory
        found = attend_once(query, stored, values, added=added, scale=0.7)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("few_scores", [0, 2**20])
@pytest.mark.parametrize("padding", [0, 2])
def test_short_first_rows_attend_to_their_own_earlier_positions(
    padding: int, few_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend, "_FEW_SCORES", few_scores)
    counts, (groups, repeats, size) = (5, 9, 7), (2, 3, 8)
    cache = Cache.empty(
        [KeyShape(groups, size, None)], 3, 16, dtype=torch.float32, device=torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(4)
    positions = sum(counts) + padding
    query = torch.randn(positions, groups, repeats, size, generator=generator)
    pair = torch.randn(positions, groups, 2, size, generator=generator)
    rule = AttentionRule(scale=0.7, window=9)
    # The module's kernels are for longer rows.
    found = FirstRows(cache, counts, padding).attend(0, Core(cast("Any", None), rule), query, pair)
    start = 0
    for row, count in enumerate(counts):
        own = slice(start, start + count)
        q, (k, v) = query[own].double(), pair[own].double().unbind(2)
        expected = F.scaled_dot_product_attention(
            q.permute(1, 2, 0, 3), k.transpose(0, 1)[:, None], v.transpose(0, 1)[:, None],
            is_causal=True, scale=0.7,
        ).permute(2, 0, 1, 3)  # fmt: skip
        torch.testing.assert_close(found[own].double(), expected, rtol=1e-5, atol=1e-6)
        store = cache.layers[0]  # rows end at the same slot
        torch.testing.assert_close(
            store.keys[row, :, 9 - count : 9], pair[own, :, 0].transpose(0, 1)
        )
        start += count
    assert not found[start:].any()


@pytest.mark.parametrize("width", [8, 4])
def test_a_rotation_of_pairs_is_that_of_halves(width: int) -> None:
    generator = torch.Generator().manual_seed(6)
    groups, repeats, size, hidden = 3, 2, 8, 10
    rows = groups * (repeats + 2) * size
    weight = torch.randn(rows, hidden, generator=generator, dtype=torch.float64)
    x = torch.randn(5, hidden, generator=generator, dtype=torch.float64)
    angles = torch.randn(5, width // 2, generator=generator, dtype=torch.float64).repeat(1, 2)
    halves = (x @ weight.t()).view(5, groups, -1, size)
    order = paired_order(size, width)
    both = halves[:, :, :-1]
    table = rotary_table(angles, head_size=size, dtype=torch.float64, paired=False)
    rotate_(both, table.unbind(1), width, out=both)

    copied = paired_rows(weight, order, groups=groups)
    pairs = (x @ copied.t()).view(5, groups, -1, size).float()
    found = pairs[:, :, :-1]
    table = rotary_table(angles.float(), head_size=size, dtype=torch.float32, paired=True)
    rotate_(found, table.unbind(1), width, out=found)
    torch.testing.assert_close(found.double(), both[..., order], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pairs[:, :, -1].double(), halves[:, :, -1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 40])
def test_products_are_those_of_weights_in_the_order_of_any_processor(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(5)
    weight, x = torch.randn(700, 96, generator=generator), torch.randn(rows, 96)
    product = x.double() @ weight.double().t()
    for orders_columns in (False, True):
        monkeypatch.setattr(linear, "limits", lambda: Limits(2**62, 2**62, orders_columns))  # noqa: B023
        copies = WeightCopies()
        own = Linear(weight.t(), None, copies)
        with torch.inference_mode():
            for _ in range(130):
                torch.testing.assert_close(own(x).double(), product, rtol=1e-5, atol=1e-5)
        assert own.matrix.is_contiguous() == orders_columns
        assert copies.left == COPIED_BYTES - orders_columns * weight.nbytes


# Rows of a call: MKL's product, oneDNN's from the weight and from its copy, and of many rows.
@pytest.mark.parametrize("rows", [1, 4, 16, 160])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_large_product_is_that_of_its_weight(rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(700, 96, generator=generator)
    x, sums = (
        torch.randn(rows, 96, generator=generator),
        torch.randn(rows, 700, generator=generator),
    )
    bias = torch.randn(700, generator=generator) if has_bias else None
    copies = WeightCopies()
    own = Linear(weight.t(), bias, copies)
    product = x.double() @ weight.double().t()
    whole = product if bias is None else product + bias.double()
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(own.product(x).double(), product, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(own(x).double(), whole, rtol=1e-5, atol=1e-5)
            total = sums.clone()
            own.add_(total, x)
            torch.testing.assert_close(total.double(), sums.double() + whole, rtol=1e-5, atol=1e-5)
    # One copy, where calls of few rows were many.
    assert copies.left == COPIED_BYTES - (weight.nbytes if rows == 16 else 0)


def test_a_copy_is_made_once_it_pays() -> None:
    copies, weight = WeightCopies(), torch.randn(700, 96)
    own = Linear(weight.t(), None, copies)
    calls = 0
    with torch.inference_mode():
        while copies.left == COPIED_BYTES:
            own(torch.randn(16, 96))
            calls += 1
    assert calls * 16 == 128


def test_copies_of_weights_end_at_their_bound() -> None:
    weight = torch.randn(700, 96)
    copies = WeightCopies(left=2 * weight.nbytes - 1)
    first, second = copies.of(weight), copies.of(weight)
    assert first is not None
    assert second is None
    assert copies.of(weight[:100]) is None, "small"
    assert WeightCopies().of(weight.to(torch.bfloat16)) is None

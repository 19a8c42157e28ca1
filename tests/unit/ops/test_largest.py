"""The selection of a top-k on one shard: ties, few distinct values, columns beyond the last
segment, rows that leave nothing out, and its speed's detour."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_distill.ops import topk as selection
from megatron_distill.ops.row_math import descending
from megatron_distill.ops.topk import largest


def by_value_and_column(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, columns = logits.double().sort(dim=1, descending=True, stable=True)
    return values[:, :k].to(logits.dtype), columns[:, :k]


def assert_chosen(logits: Tensor, k: int) -> None:
    """By the function, and by the one for GPUs where it is meant for these."""
    chosen = [largest(logits, k)]
    if logits.dtype != torch.float64 and logits.shape[1] >= k * selection._GPU_SEGMENT:
        chosen.append(selection._largest_of_segments(logits, k))
    expected_values, expected_columns = by_value_and_column(logits, k)
    for values, columns in chosen:
        assert torch.equal(values, expected_values)
        assert torch.equal(columns, expected_columns)


def drawn(rows: int, width: int, *, distinct: int = 10**9, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-distinct, distinct, (rows, width), generator=generator).float() / 1e6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_order_is_by_value_and_lowest_column(dtype: torch.dtype) -> None:
    for width, k in product((64, 1000, 6400, 6401, 20_031), (1, 20)):
        assert_chosen(drawn(9, width).to(dtype), k)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 12), st.integers(0, 80), st.sampled_from([1, 3, 50]), st.integers(0, 2**31 - 1)
)
def test_ties_go_to_the_lowest_column(k: int, more: int, distinct: int, seed: int) -> None:
    assert_chosen(drawn(5, 64 * 3 * k + more, distinct=distinct, seed=seed), k)


@pytest.mark.parametrize("shape", [(3, 0), (0, 5000), (0, 0)])
def test_nothing_to_choose_from(shape: tuple[int, int]) -> None:
    values, columns = largest(torch.empty(shape), min(4, shape[1]))
    assert values.shape == columns.shape == (shape[0], min(4, shape[1]))


def test_rows_of_a_wider_matrix() -> None:
    assert_chosen(drawn(6, 9000)[:, 100:7000], 7)


def test_neighbours_and_equal_rows_and_forbidden_columns() -> None:
    logits = drawn(4, 8192)
    logits[0] = 1.0
    logits[1, 3:60] += 1e6
    logits[2, :8000] = -torch.inf
    logits[3, 20:] = -torch.inf
    assert_chosen(logits, 16)
    # All of the last segment's columns, of which there are too few for one of their own.
    logits = drawn(4, 8199)
    logits[:, 8192:] += 1e6
    assert_chosen(logits, 16)


def test_few_columns_are_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        selection, "_largest_of_all", lambda *_: pytest.fail("went through all columns")
    )
    assert_chosen(drawn(50, 32_000), 64)
    with pytest.raises(pytest.fail.Exception, match="went through all"):
        largest(torch.ones(3, 32_000), 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("column", [77, 8195])  # the latter beyond the last whole segment
def test_nan_is_never_left_out(dtype: torch.dtype, column: int) -> None:
    logits = drawn(3, 8199).to(dtype)
    logits[1, column] = torch.nan
    for choose in (largest, selection._largest_of_segments):
        values, columns = choose(logits, 16)
        assert columns[1, 0] == column
        assert values[1, 0].isnan()
        assert torch.equal(columns[[0, 2]], by_value_and_column(logits[[0, 2]], 16)[1])


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 300),
    st.sampled_from([2, 9, 10**9]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.integers(0, 2**31 - 1),
)
def test_descending_is_a_stable_sort(
    columns: int, distinct: int, dtype: torch.dtype, seed: int
) -> None:
    values = drawn(4, columns, distinct=distinct, seed=seed).to(dtype)
    values[1] *= 1e-42  # of fp32, numbers below the smallest normal one
    values[2] = torch.where(values[2] > 0, 0.0, -0.0)
    values[3, ::3] = torch.inf
    values[3, 1::3] = -torch.inf
    ordered, places = descending(values)
    expected, expected_places = values.sort(dim=1, descending=True, stable=True)
    assert torch.equal(ordered, expected)
    assert torch.equal(places, expected_places)
    assert torch.equal(ordered.signbit(), expected.signbit())

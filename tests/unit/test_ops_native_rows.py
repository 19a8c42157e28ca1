"""The row functions in C against float64, over every order of magnitude and what is no number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_distill.ops.native import RowFunctions, native_rows
from tests.reference.logits import logit_pair

INFINITY, NAN = math.inf, math.nan
TINY = torch.finfo(torch.float32).tiny
# One column, less than a vector, a vector and a bit, more than a segment and more than a grain.
WIDTHS = [1, 7, 67, 2049, 20011]


@pytest.fixture
def native() -> RowFunctions:
    functions = native_rows(torch.zeros(1, 1))
    if functions is None:
        pytest.skip("no C compiler for this CPU")
    return functions


def within(wide: Tensor) -> Tensor:
    """A matrix whose rows do not follow each other in memory."""
    rows, columns = wide.shape
    room = torch.full((rows, columns + 5), NAN)
    room[:, 3 : 3 + columns] = wide
    return room[:, 3 : 3 + columns]


def relative_error(found: Tensor, expected: Tensor) -> float:
    gap = (found.double() - expected).abs()
    return float((gap / expected.abs()).nan_to_num(0.0).max())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_exponentials_and_their_sums(native: RowFunctions, width: int, temperature: float) -> None:
    logits, _ = logit_pair(5, width, seed=width, spread=6.0)
    points = torch.tensor([0.0, 0.0, 1.5, -2.0, 20.0])
    expected = ((logits - points[:, None]).double() / temperature).exp()
    sums = torch.full((5,), NAN, dtype=torch.float64)
    out = within(torch.zeros_like(logits))
    native.exponentials(within(logits), points, temperature, out, sums)
    normal = expected >= TINY
    assert relative_error(out[normal], expected[normal]) < 1.5e-7
    assert relative_error(sums, out.double().sum(1)) < 1e-14
    again = logits.clone()
    native.exponentials(again, points, temperature, again, None)
    assert torch.equal(again, out)


def test_exponentials_from_one_to_nothing(native: RowFunctions) -> None:
    logits = torch.linspace(0, -120, 40_001).unsqueeze(0)
    out, sums = torch.empty_like(logits), torch.empty(1, dtype=torch.float64)
    native.exponentials(logits, torch.zeros(1), 1.0, out, sums)
    expected = logits.double().exp()
    normal = expected >= TINY
    assert relative_error(out[normal], expected[normal]) < 1.5e-7
    assert float(out[~normal].max()) <= TINY
    assert out[0, 0] == 1
    assert float(out[0, -1]) == 0


def test_exponentials_of_what_is_no_number(native: RowFunctions) -> None:
    logits = torch.tensor([[0.0, -INFINITY, -3e38, 1.0], [0.0, NAN, 1.0, 2.0]])
    out, sums = torch.empty_like(logits), torch.empty(2, dtype=torch.float64)
    native.exponentials(logits, torch.tensor([1.0, 2.0]), 1.0, out, sums)
    assert out[0, 1:].tolist() == [0.0, 0.0, 1.0]
    assert out[1].isnan().tolist() == [False, True, False, False]
    assert sums.isnan().tolist() == [False, True]


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9, 0.999])
def test_logarithms_of_mixtures(native: RowFunctions, share: float) -> None:
    of = torch.logspace(-25, 0, 401, dtype=torch.float64).float()[:, None].repeat(1, 211)
    ratios = torch.cat([torch.logspace(-36, 36, 105), -torch.logspace(-7, -0.01, 50)])
    other = of * torch.cat([ratios[:105], 1 + ratios[105:], 1 - ratios[105:], torch.ones(6)])
    other = other.clamp(min=1e-33, max=1.0)
    mine, others = of.double(), other.double()
    out = torch.empty_like(of)
    near = torch.log1p(share * (others - mine) / mine)
    native.surprises(of, other, share, out, anchored=True)
    assert relative_error(out, near) < 4e-7
    assert bool((out[of == other] == 0).all())
    # Near equality the digits of the difference are kept whatever the share is.
    close = (others - mine).abs() < 0.01 * mine
    assert relative_error(out[close], near[close]) < 3e-7
    far = torch.log1p(share / (1 - share) * others / mine)
    anchored = torch.arange(len(of)).unsqueeze(1) % 2 == 0
    native.surprises(of, other, share, out, anchored=anchored)
    both = torch.where(anchored, near, far)
    assert relative_error(out[1::2], both[1::2]) < 4e-7
    assert relative_error(out[::2], both[::2]) < 4e-7


@pytest.mark.parametrize("anchored", [True, False])
def test_logarithms_of_what_is_no_number(native: RowFunctions, anchored: bool) -> None:
    of, other = torch.full((2, 70), 0.5), torch.full((2, 70), 0.25)
    of[0, 3::7], other[1, 2::7] = NAN, NAN
    out = torch.empty_like(of)
    native.surprises(of, other, 0.3, out, anchored=anchored)
    assert torch.equal(out.isnan(), of.isnan() | other.isnan())


@pytest.mark.parametrize("width", WIDTHS)
def test_tops_are_the_largest_in_the_lowest_column(native: RowFunctions, width: int) -> None:
    values = torch.randint(-3, 4, (9, width), generator=torch.Generator().manual_seed(width))
    values = values.float()
    values[1] = -INFINITY
    values[2, width // 2] = NAN
    values[3, -1] = NAN
    values[4, -1] = INFINITY
    top, column = native.tops(within(values))
    expected = values.max(1)
    assert torch.equal(column[2:4], torch.tensor([width // 2, width - 1]))
    assert bool(top[2:4].isnan().all())
    for row in (0, 1, 4, 5, 6, 7, 8):
        assert top[row] == expected.values[row]
        assert column[row] == int((values[row] == top[row]).nonzero()[0])


@pytest.mark.parametrize("width", WIDTHS)
def test_products_and_differences_are_those_of_torch(native: RowFunctions, width: int) -> None:
    left, right = logit_pair(5, width, seed=width)
    left[0, 0] = NAN
    factors, others = torch.linspace(-0.1, 3, 5).unsqueeze(1), torch.full((5, 1), 0.7)
    out = torch.empty_like(left)
    native.bounded_products(within(left), factors, TINY, out)
    assert torch.equal(out.nan_to_num(7), (left * factors).clamp(min=TINY).nan_to_num(7))
    native.differences(within(left), factors, within(right), others, out)
    assert torch.equal(out.nan_to_num(7), (left * factors - right * others).nan_to_num(7))
    native.differences(right, others, right.clone(), others, right)
    assert not right.any()


def test_weighted_gaps_have_a_bound(native: RowFunctions) -> None:
    weights = torch.tensor([[1.0, 2.0, 3.0, 0.5], [NAN, 0.0, 0.0, 0.0]])
    left = torch.tensor([[2.0, -INFINITY, -INFINITY, 1.0]] * 2)
    right = torch.tensor([[1.0, -INFINITY, 0.0, -INFINITY]] * 2)
    sums = torch.empty(2, dtype=torch.float64)
    native.weighted_gaps(weights, left, right, sums, most=100.0)
    assert float(sums[0]) == 1 - 300 + 50
    assert bool(sums[1].isnan())


@pytest.mark.parametrize("width", WIDTHS)
def test_weighted_gaps_are_summed_in_fp64(native: RowFunctions, width: int) -> None:
    left, right = logit_pair(5, width, seed=width)
    weights = left.abs()
    sums = torch.empty(5, dtype=torch.float64)
    native.weighted_gaps(within(weights), within(left), right, sums, most=1e30)
    expected = (weights * (left - right)).double().sum(1)
    assert torch.allclose(sums, expected, rtol=0, atol=1e-11 * width)


@pytest.mark.parametrize("width", WIDTHS)
def test_pulls_and_their_sums(native: RowFunctions, width: int) -> None:
    slopes, weights = logit_pair(5, width, seed=width)
    references = torch.linspace(-1, 1, 5).unsqueeze(1)
    expected = weights.double() * (slopes.double() * -0.5 - references)
    out = torch.empty_like(slopes)
    sums = native.pulls(within(slopes), -0.5, references, within(weights), out)
    torch.testing.assert_close(out.double(), expected, rtol=2e-7, atol=0)
    torch.testing.assert_close(sums, out.double().sum(1), rtol=0, atol=1e-12 * width)
    native.pulls(slopes, -0.5, references, weights, slopes)
    assert torch.equal(slopes, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 640, 2003, 20_011])
@pytest.mark.parametrize("k", [1, 9])
def test_largest_are_in_order(native: RowFunctions, dtype: torch.dtype, width: int, k: int) -> None:
    # Coarse enough for ties, wide enough for both signs of zero.
    values = (logit_pair(7, width, seed=width)[0] * 4).round().div(4).to(dtype)
    values[values == 0] *= -1
    k = min(k, width // 64)
    columns, found = native.largest(values, k, most=width)
    assert bool(found.all())
    order = (values + 0.0).double().sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(columns, order[:, :k])


def test_largest_leaves_rows_to_others(native: RowFunctions) -> None:
    values = logit_pair(5, 1000)[0]
    values[1, 999], values[2, 70] = NAN, NAN
    values[3] = 1.0
    values[4] = -INFINITY
    columns, found = native.largest(values, 4, most=16)
    assert found.tolist() == [True, False, False, False, False]
    assert columns[0].tolist() == values[0].topk(4).indices.tolist()


@pytest.mark.parametrize(
    "matrix",
    [
        torch.zeros(3, 4, dtype=torch.float64),
        torch.zeros(3, 4, dtype=torch.bfloat16),
        torch.zeros(4, 3).t(),
        torch.zeros(3, 4, device="meta"),
    ],
    ids=["fp64", "bf16", "columns apart", "elsewhere"],
)
def test_other_matrices_are_for_torch(matrix: Tensor) -> None:
    assert native_rows(torch.zeros(3, 4), matrix) is None

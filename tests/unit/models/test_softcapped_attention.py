"""Soft-capped attention in blocks against its definition in float64.

Regimes: blocks of one query, of some and of all; a last block that is shorter; grouped queries
matched to the wrong key; a mask and plain causality; a cap that binds and one that does not; more
memory than a block's.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_distill.models.attention import softcapped_attention

SCALE = 0.4


def inputs(
    *, b: int = 2, n: int = 4, g: int = 2, s: int = 7, d: int = 3, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((b, n, s, d), (b, g, s, d), (b, g, s, d))
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )
    return 2 * query, key, value


def some_mask(*, b: int = 2, s: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(b, 1, s, s, generator=generator) > 0.4
    return mask | torch.eye(s, dtype=torch.bool)


def definition(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, softcap: float) -> Tensor:
    queries_per_key = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(queries_per_key, dim=1) for x in (key, value))
    scores = softcap * torch.tanh(SCALE * query @ key.mT / softcap)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value


def block_bytes(queries: int, *, b: int = 2, n: int = 4, s: int = 7) -> int:
    return 4 * b * n * s * queries


@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("queries", [1, 3, 7, 100])
def test_it_is_its_definition(queries: int, masked: bool, softcap: float) -> None:
    exact = [x.requires_grad_() for x in inputs(dtype=torch.float64)]
    single = [x.requires_grad_() for x in inputs(dtype=torch.float32)]
    mask = some_mask() if masked else None
    expected = definition(
        *exact, torch.ones(7, 7, dtype=torch.bool).tril() if mask is None else mask, softcap
    )
    found = softcapped_attention(
        *single, mask, scale=SCALE, softcap=softcap, block_bytes=block_bytes(queries)
    )
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)
    for ours, theirs in zip(single, exact, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=2e-6, rtol=0)


@pytest.mark.parametrize("masked", [True, False])
def test_its_gradient_is_that_of_finite_differences(masked: bool) -> None:
    tensors = [x.requires_grad_() for x in inputs(dtype=torch.float64, s=5)]
    mask = some_mask(s=5) if masked else None

    def attend(*tensors: Tensor) -> Tensor:
        return softcapped_attention(
            *tensors, mask, scale=SCALE, softcap=0.7, block_bytes=block_bytes(2, s=5)
        )

    assert torch.autograd.gradcheck(attend, tensors)


def test_half_precision_rounds_results_only() -> None:
    tensors = [x.requires_grad_() for x in inputs(dtype=torch.bfloat16, d=32)]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    found = softcapped_attention(*tensors, None, scale=SCALE, softcap=2.0)
    expected = definition(*exact, torch.ones(7, 7, dtype=torch.bool).tril(), 2.0)
    found.sum().backward()
    expected.sum().backward()
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), expected, atol=1e-7, rtol=2**-8)
    for ours, theirs in zip(tensors, exact, strict=True):
        assert ours.grad is not None
        assert ours.grad.dtype is torch.bfloat16
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-5, rtol=2**-8)


def test_no_tensor_is_larger_than_a_block_of_scores() -> None:
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):  # type: ignore[no-untyped-def]
            result = function(*arguments, **(named or {}))
            if isinstance(result, Tensor):
                sizes.append(result.numel())
            return result

    tensors = [x.requires_grad_() for x in inputs(dtype=torch.float32, s=64)]
    with Sizes():
        found = softcapped_attention(
            *tensors, None, scale=SCALE, softcap=2.0, block_bytes=block_bytes(4, s=64)
        )
        found.sum().backward()
    assert max(sizes) <= block_bytes(4, s=64) // 4

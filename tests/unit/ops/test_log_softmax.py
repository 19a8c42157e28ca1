"""Log-softmax of the whole vocabulary: value, gradient, padding at -inf, input left alone."""

import pytest
import torch

from megatron_distill.ops import VocabShard, vocab_parallel_log_softmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_value_and_gradient_equal_torch_on_the_real_columns(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(6, 40, generator=generator, dtype=torch.float64) * 4).to(dtype)
    logits[:, 33:] = 1e4  # padding that would take all the probability
    before = logits.clone()
    upstream = torch.randn(6, 40, generator=generator, dtype=torch.float64)
    leaf = logits.requires_grad_()
    ours = vocab_parallel_log_softmax(leaf, VocabShard(33, 0, 40))
    assert ours.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    oracle_leaf = before[:, :33].double().requires_grad_()
    oracle = oracle_leaf.log_softmax(1)
    torch.testing.assert_close(ours[:, :33].double(), oracle, rtol=1e-6, atol=1e-6)
    assert (ours[:, 33:] == -torch.inf).all()
    (gradient,) = torch.autograd.grad(ours, leaf, upstream.to(ours.dtype))
    (expected,) = torch.autograd.grad(oracle, oracle_leaf, upstream[:, :33])
    tolerance = 2**-7 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(gradient[:, :33].double(), expected, rtol=tolerance, atol=tolerance)
    assert not gradient[:, 33:].any()
    assert torch.equal(leaf.detach(), before)


def test_no_tokens_and_wrong_width() -> None:
    assert vocab_parallel_log_softmax(torch.zeros(0, 4), VocabShard(3, 0, 4)).shape == (0, 4)
    with pytest.raises(ValueError, match="the shard has 5 columns"):
        vocab_parallel_log_softmax(torch.zeros(2, 4), VocabShard(5, 0, 5))

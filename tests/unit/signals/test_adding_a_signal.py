"""The kind of signal of docs/extending/adding_a_signal.md, in both losses and on shards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses import Term, fused_linear_objective, token_divergence
from megatron_distill.ops import VocabShard
from tests.distributed.pool import Pool

PAGE = Path(__file__).parents[3] / "docs" / "extending" / "adding_a_signal.md"
TOKENS, VOCAB = 6, 48


def page_names() -> dict[str, Any]:
    """The names that the page's blocks define; their own assertions have held."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def accepted_ids() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:4] for _ in range(TOKENS)])
    counted = torch.ones(TOKENS, 4, dtype=torch.bool)
    counted[0, 2:] = False
    ids[1] = torch.tensor([1, 2, 3, 4])  # none of them on the second of two shards
    return ids, counted


def definition(logits: Tensor, ids: Tensor, counted: Tensor) -> Tensor:
    """``-log sum q_k`` in float64."""
    chosen = logits.log_softmax(1).gather(1, ids).masked_fill(~counted, -torch.inf)
    return -chosen.logsumexp(1)


def test_value_and_gradient_are_those_of_the_definition() -> None:
    ids, counted = accepted_ids()
    signal = page_names()["Accepted"](ids, counted)
    logits = torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    upstream = torch.tensor([1.0, 2.0, 0.0, -1.0, 0.5, 1.0])
    leaf = logits.clone().requires_grad_()
    value = token_divergence(leaf, signal, divergence="forward_kl")
    value.backward(upstream)
    exact = logits.double().requires_grad_()
    expected = definition(exact, ids, counted)
    expected.backward(upstream.double())
    torch.testing.assert_close(value.detach().double(), expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)


def test_a_term_that_it_is_not_defined_for_is_named() -> None:
    signal = page_names()["Accepted"](*accepted_ids())
    with pytest.raises(ValueError, match="reverse_kl is not defined on accepted ids"):
        token_divergence(torch.zeros(TOKENS, VOCAB), signal, divergence="reverse_kl")


def on_shards(rank: int, world: int) -> tuple[float, Tensor]:
    shard = VocabShard.for_rank(VOCAB, VOCAB, rank, world)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, 8, generator=generator, dtype=torch.float64)
    own = weight[shard.start : shard.stop].clone().requires_grad_()
    kd = torch.tensor([0.5, 1.0, 0.0, 0.25, 1.0, 2.0], dtype=torch.float64)
    total, _ = fused_linear_objective(
        hidden,
        own,
        page_names()["Accepted"](*accepted_ids()),
        torch.zeros(TOKENS, dtype=torch.int64),
        ce_weights=torch.zeros_like(kd),
        kd_weights=kd,
        terms=[Term("forward_kl")],
        chunk_tokens=4,
        shard=shard,
        group=dist.group.WORLD,
    )
    total.backward()
    assert own.grad is not None
    exact = weight.requires_grad_()
    expected = (kd * definition(hidden @ exact.t(), *accepted_ids())).sum()
    expected.backward()
    torch.testing.assert_close(own.grad, exact.grad[shard.start : shard.stop])
    return float(total), expected.detach()


@pytest.mark.parametrize("world", [1, 2])
def test_the_objective_on_shards_is_that_of_the_definition(pool: Pool, world: int) -> None:
    for total, expected in pool.run(world, on_shards):
        assert total == pytest.approx(float(expected), rel=1e-9)

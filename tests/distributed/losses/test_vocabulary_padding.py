"""Rows of a model beyond its tokenizer's ids, against float64 over the real ids alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import Term, fused_linear_objective
from megatron_distill.signals import HiddenState
from tests.distributed.megatron_world import megatron_groups, small_architecture
from tests.distributed.pool import Pool
from tests.reference.distillation import Problem, row_error, solve

TOKENS = 203
# Rows of the student and of the teacher: each the larger one, half of the ranks padding.
ROWS = [(208, 264), (520, 216)]


def rows_of_rank(weight_GH: Tensor, rows: int, groups: Any) -> tuple[Tensor, Any]:
    """A rank's rows of a head of `rows` rows whose padding has huge logits, and its shard."""
    from megatron_distill.models.gpt import vocab_shard

    architecture = small_architecture(vocab_size=rows)
    shard = vocab_shard(architecture, groups, tokens=TOKENS)
    padded = architecture.padded_vocab_size(groups.tensor.size())
    extra = 1e3 * torch.ones(padded - TOKENS, weight_GH.shape[1])
    return torch.cat([weight_GH, extra])[shard.start : shard.stop].clone(), shard


def objective(
    rank: int, world: int, problem: Problem, rows: tuple[int, int], terms: list[Term]
) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
    with megatron_groups(tensor=world) as groups:
        from megatron_distill.models.gpt import align_head

        weight, shard = rows_of_rank(problem.weight_GH, rows[0], groups)
        other, own = rows_of_rank(problem.teacher_weight, rows[1], groups)
        head = align_head(other, own=own, wanted=shard, group=groups.tensor)
        hidden = problem.hidden_NH.requires_grad_()
        total, report = fused_linear_objective(
            hidden,
            weight.requires_grad_(),
            HiddenState(problem.teacher_hidden, head),
            problem.labels_N,
            ce_weights=problem.ce_weights_N,
            kd_weights=problem.kd_weights_N,
            terms=terms,
            chunk_tokens=6,
            shard=shard,
            group=groups.tensor,
        )
        total.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        return total.detach(), report, hidden.grad, weight.grad


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_padding_has_no_probability_and_no_gradient(
    pool: Pool, rows: tuple[int, int], world: int
) -> None:
    problem = Problem.random(vocab=TOKENS)
    oracle = solve(problem, [(0.5, 1.0), (2.0, 2.0)])
    terms = [Term(weight=0.5), Term(weight=2.0, temperature=2.0)]
    answers = pool.run(world, objective, problem, rows, terms)
    for total, report, _, _ in answers:
        assert float(total) == pytest.approx(float(oracle.total), rel=1e-6)
        for name in ("ce", "kd", "teacher_ce", "student_entropy", "teacher_entropy"):
            assert float(report[name]) == pytest.approx(float(oracle.report[name]), rel=1e-5), name
    hidden = torch.stack([answer[2] for answer in answers]).sum(0)
    assert row_error(hidden, oracle.hidden_gradient) < 1e-5
    weight = torch.cat([answer[3] for answer in answers])
    assert row_error(weight[:TOKENS], oracle.weight_gradient) < 1e-5
    assert weight[TOKENS:].count_nonzero() == 0


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_top_k_of_all_tokens_is_the_whole_distribution_for_any_padding(
    pool: Pool, world: int
) -> None:
    """With K = V every real id is in the top-k, so one id of padding would displace a token."""
    problem = Problem.random(vocab=TOKENS)
    oracle = solve(problem)
    for total, report, _, _ in pool.run(
        world, objective, problem, (300, 264), [Term(top_k=TOKENS)]
    ):
        assert float(total) == pytest.approx(float(oracle.total), rel=1e-6)
        assert float(report["topk_mass"]) == pytest.approx(float(problem.kd_weights_N.sum()))


def next_logits(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Logits of the real ids, and of all rows, of a head whose padding is always the largest."""
    with megatron_groups(tensor=world) as groups:
        from megatron_distill.models.execution import Execution
        from megatron_distill.models.gpt import build_gpt, vocab_shard
        from megatron_distill.train.next_token import logits_after

        device, architecture = torch.device("cpu"), small_architecture(vocab_size=216)
        execution = Execution(torch.float32, device)
        (model,) = build_gpt(architecture, groups=groups, execution=execution, seed=11)
        shard = vocab_shard(architecture, groups, tokens=TOKENS)
        with torch.no_grad():
            head = model.head_weight()
            head[shard.real_width :] *= 50
        tokens = torch.arange(14).view(2, 7)
        real, every = (
            logits_after(
                model,
                tokens,
                positions=slice(6, 7),
                architecture=architecture,
                groups=groups,
                device=device,
                vocab_size=size,
            )[:, 0]
            for size in (TOKENS, None)
        )
        return real, every


@pytest.mark.parametrize("world", [1, 4])
def test_padding_is_never_the_next_token(pool: Pool, world: int) -> None:
    for real, every in pool.run(world, next_logits):
        assert real.shape == (2, TOKENS)
        assert every.shape == (2, 216)
        assert torch.equal(real, every[:, :TOKENS])
        assert bool((every.argmax(-1) >= TOKENS).all()), "else this test shows nothing"

"""Losses on vocabulary shards equal the dense float64 oracle for every number of ranks: uneven
vocabularies, a wholly padded shard, all temperatures; identical bits on all ranks; and the
collectives that the docstrings promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses import Term, token_divergence
from megatron_distill.ops import VocabShard, vocab_parallel_log_softmax
from megatron_distill.signals import DenseLogits, HiddenState
from tests.distributed.pool import Pool
from tests.reference.distillation import Problem, row_error, solve
from tests.reference.tracing import traced
from tests.support.objective_runs import objective

# Real and padded sizes: none padded; the last shard partly; the last of four wholly.
VOCABULARIES = [(204, 204), (203, 224), (129, 256)]
TERMS = [Term(weight=0.5), Term(weight=2.0, temperature=2.0), Term(temperature=0.5)]
SOLVED = [(0.5, 1.0), (2.0, 2.0), (1.0, 0.5)]


def padded(matrix: Tensor, rows: int) -> Tensor:
    """Append rows of NaN, so that reading them shows in the result."""
    extra = torch.full((rows - len(matrix), matrix.shape[1]), torch.nan, dtype=matrix.dtype)
    return torch.cat([matrix, extra])


@dataclass(frozen=True)
class Answer:
    """The result of one rank."""

    total: Tensor
    report: dict[str, Tensor]
    hidden_gradient: Tensor
    weight_gradient: Tensor
    forward: list[str]
    backward: list[str]


def objective_on_shard(
    rank: int,
    world: int,
    problem: Problem,
    sizes: tuple[int, int],
    terms: Sequence[Term],
    chunk_tokens: int,
) -> Answer:
    shard = VocabShard.for_rank(*sizes, rank, world)
    columns = slice(shard.start, shard.stop)
    teacher_weight = padded(problem.teacher_weight, sizes[1])[columns]
    signal = HiddenState(problem.teacher_hidden, teacher_weight)
    hidden = problem.hidden_NH.requires_grad_()
    weight = padded(problem.weight_GH, sizes[1])[columns].requires_grad_()
    results: list[tuple[Tensor, dict[str, Tensor]]] = []
    given = {"terms": terms, "chunk_tokens": chunk_tokens, "shard": shard}
    forward = traced(
        lambda: results.append(
            objective(problem, hidden, weight, signal, **given, group=dist.group.WORLD)
        )
    )
    total, report = results[0]
    backward = traced(total.backward)
    assert hidden.grad is not None
    assert weight.grad is not None
    return Answer(
        total.detach(),
        report,
        hidden.grad,
        weight.grad,
        forward.collectives,
        backward.collectives,
    )


def solve_on_shards(
    pool: Pool,
    world: int,
    problem: Problem,
    sizes: tuple[int, int],
    terms: Sequence[Term],
    chunk_tokens: int = 6,
) -> tuple[Answer, list[Answer]]:
    """The whole answer, and those of the ranks, which must agree to the bit where they overlap."""
    answers: list[Answer] = pool.run(world, objective_on_shard, problem, sizes, terms, chunk_tokens)
    for answer in answers[1:]:
        assert torch.equal(answer.total, answers[0].total)
        for name, value in answers[0].report.items():
            assert torch.equal(answer.report[name], value), name
    whole = replace(
        answers[0],
        hidden_gradient=torch.stack([answer.hidden_gradient for answer in answers]).sum(0),
        weight_gradient=torch.cat([answer.weight_gradient for answer in answers]),
    )
    return whole, answers


# On one rank: tests/unit/losses/test_objective_terms.py.
@pytest.mark.parametrize("sizes", VOCABULARIES)
@pytest.mark.parametrize("world", [2, 4])
def test_objective_equals_the_dense_oracle(pool: Pool, world: int, sizes: tuple[int, int]) -> None:
    problem = Problem.random(vocab=sizes[0], seed=1)
    whole, _ = solve_on_shards(pool, world, problem, sizes, TERMS)
    answer = solve(problem, SOLVED)
    assert float(whole.total) == pytest.approx(float(answer.total), rel=1e-6)
    for name, expected in answer.report.items():
        assert float(whole.report[name]) == pytest.approx(float(expected), rel=1e-6), name
    assert row_error(whole.hidden_gradient, answer.hidden_gradient) < 2e-6
    error = (whole.weight_gradient[: sizes[0]] - answer.weight_gradient).abs().max()
    assert float(error) < 1e-6 * float(answer.weight_gradient.abs().max())
    assert not whole.weight_gradient[sizes[0] :].any()


def test_number_of_ranks_changes_no_more_than_bf16_rounds(pool: Pool) -> None:
    problem = Problem.random(vocab=203, seed=2, dtype=torch.bfloat16)
    dense, _ = solve_on_shards(pool, 1, problem, (203, 224), TERMS)
    for world in (2, 4):
        split, _ = solve_on_shards(pool, world, problem, (203, 224), TERMS)
        assert float(split.total) == pytest.approx(float(dense.total), rel=1e-6)
        for name, value in dense.report.items():
            assert float(split.report[name]) == pytest.approx(float(value), rel=1e-6), name
        for ours, other in (
            (split.hidden_gradient, dense.hidden_gradient),
            (split.weight_gradient, dense.weight_gradient),
        ):
            assert float((ours - other).abs().max()) <= 2e-2 * float(other.abs().max())


@pytest.mark.parametrize("world", [1, 4])
def test_one_all_gather_per_chunk_and_none_in_backward(pool: Pool, world: int) -> None:
    problem = Problem.random(seed=4).with_weights(torch.ones(23), torch.ones(23))
    for chunk_tokens, chunks in ((23, 1), (6, 4)):
        _, answers = solve_on_shards(pool, world, problem, (203, 224), TERMS, chunk_tokens)
        for answer in answers:
            assert answer.forward == (["_allgather_base_"] * chunks if world > 1 else [])
            assert answer.backward == []


@pytest.mark.parametrize("tokens", [0, 7])
def test_ranks_agree_that_there_is_nothing_to_learn(pool: Pool, tokens: int) -> None:
    problem = Problem.random(tokens).with_weights(torch.zeros(tokens), torch.zeros(tokens))
    whole, answers = solve_on_shards(pool, 4, problem, (203, 224), TERMS)
    assert float(whole.total) == 0.0
    assert whole.hidden_gradient.shape == (tokens, 12)
    assert not whole.hidden_gradient.any()
    assert not whole.weight_gradient.any()
    assert [answer.forward for answer in answers] == [[]] * 4


def test_labels_on_no_shard_are_not_silently_right(pool: Pool) -> None:
    problem = Problem.random(vocab=203, seed=6)
    labels = problem.labels_N.clone()
    labels[int(problem.ce_weights_N.argmax())] = 210  # a padded column of the last shard
    whole, _ = solve_on_shards(pool, 4, replace(problem, labels_N=labels), (203, 224), TERMS)
    assert float(whole.total) == float("inf")


def log_softmax_on_shard(
    rank: int, world: int, logits: Tensor, upstream: Tensor, sizes: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    shard = VocabShard.for_rank(*sizes, rank, world)
    columns = slice(shard.start, shard.stop)
    leaf = padded(logits.t(), sizes[1]).t()[:, columns].requires_grad_()
    value = vocab_parallel_log_softmax(leaf, shard, dist.group.WORLD)
    value.backward(padded(upstream.t(), sizes[1]).t()[:, columns])
    assert leaf.grad is not None
    return value.detach(), leaf.grad


@pytest.mark.parametrize(
    ("world", "sizes"), [(2, VOCABULARIES[0]), (2, VOCABULARIES[1]), (4, VOCABULARIES[2])]
)
def test_log_softmax_equals_torch(pool: Pool, world: int, sizes: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(8)
    logits, upstream = torch.randn(2, 9, sizes[0], generator=generator) * 4
    answers = pool.run(world, log_softmax_on_shard, logits, upstream, sizes)
    value, gradient = (torch.cat(parts, 1) for parts in zip(*answers, strict=True))
    leaf = logits.double().requires_grad_()
    expected = leaf.log_softmax(1)
    (expected_gradient,) = torch.autograd.grad(expected, leaf, upstream.double())
    real = slice(0, sizes[0])
    torch.testing.assert_close(value[:, real].double(), expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient[:, real].double(), expected_gradient, rtol=1e-5, atol=1e-5)
    assert (value[:, sizes[0] :] == -torch.inf).all()
    assert not gradient[:, sizes[0] :].any()


def misuse_on_shard(rank: int, world: int) -> list[str]:
    shard = VocabShard.for_rank(20, 24, rank, world)
    student = torch.zeros(3, shard.width)
    messages = []
    for teacher, given in ((shard.width + 4, shard), (24, VocabShard(20, 0, 24))):
        with pytest.raises(ValueError, match="vocabulary columns on this rank") as caught:
            token_divergence(
                student,
                DenseLogits(torch.zeros(3, teacher)),
                divergence="forward_kl",
                shard=given,
                group=dist.group.WORLD,
            )
        messages.append(str(caught.value))
    return messages


def test_shards_of_different_widths_are_refused_on_every_rank(pool: Pool) -> None:
    for first, second in pool.run(2, misuse_on_shard):
        assert "teacher has 16 vocabulary columns on this rank, the student 12" in first
        assert "student has 12 vocabulary columns on this rank, its shard [0, 24) has 24" in second

"""Logits whose rows are further apart than they are wide, as on a GPU: the same figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import Term
from megatron_distill.ops import VocabShard, workspace
from megatron_distill.ops.aligned.executor import aligned_linear
from megatron_distill.ops.aligned.published_projection import published_ids
from megatron_distill.ops.frozen_head import output_chunks, row_statistics
from megatron_distill.ops.topk import select
from megatron_distill.ops.workspace import allocate_logits
from megatron_distill.signals import HiddenState, LogitRule
from tests.reference.cross_tokenizer import AlignedProblem
from tests.reference.distillation import Problem
from tests.support.objective_runs import Rule, run
from tests.support.several_teachers import Inputs, on_shard
from tests.unit.losses.test_objective_terms import BETWEEN, CAPS, PLAIN, RANKED
from tests.unit.losses.test_several_teachers import NAMES, TERMS
from tests.unit.ops.test_aligned_linear import work_for

Figures = list[Tensor]


@pytest.fixture
def of_both(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Figures]], list[Figures]]:
    """Run with rows side by side, and with NaN between them; on a CPU as on a GPU."""
    of_gpu, allocate = workspace._row_stride, workspace.allocate

    def with_nan(*given: Any) -> Tensor:
        return allocate(*given).fill_(torch.nan)

    def run_both(figures: Callable[[], Figures]) -> list[Figures]:
        found = []
        for is_gpu in (False, True):
            device = torch.device("meta" if is_gpu else "cpu")
            strides: list[int] = []

            def stride(columns: int, _: torch.device, at: torch.device = device) -> int:
                strides.append(of_gpu(columns, at))  # noqa: B023
                return strides[-1]  # noqa: B023

            with monkeypatch.context() as patch:
                patch.setattr(workspace, "_row_stride", stride)
                patch.setattr(workspace, "allocate", with_nan)
                found.append(figures())
            assert strides
            assert all(one % 64 == 0 for one in strides) == is_gpu
        return found

    return run_both


def assert_close(found: list[Figures]) -> None:
    for ours, theirs in zip(*found, strict=True):
        assert bool(ours.isfinite().all())
        torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("columns", [1, 64, 37_713, 151_665])
def test_rows_on_a_device_begin_at_aligned_addresses(columns: int) -> None:
    matrix = allocate_logits(5, columns, torch.bfloat16, torch.device("meta"))
    assert matrix.shape == (5, columns)
    assert matrix.stride(1) == 1
    assert matrix.stride(0) * matrix.element_size() % 128 == 0
    assert matrix.stride(0) - columns < 64
    assert allocate_logits(5, columns, torch.bfloat16, torch.device("cpu")).is_contiguous()


@pytest.mark.parametrize("rules", [(PLAIN, PLAIN), CAPS], ids=["plain", "caps"])
@pytest.mark.parametrize("terms", [BETWEEN, RANKED, [Term()]], ids=["between", "kept", "one"])
@pytest.mark.parametrize("vocab", [157, 1000])  # less and more than the lanes of a sum
def test_an_objective_is_that_of_rows_side_by_side(
    vocab: int, terms: list[Term], rules: tuple[Rule, Rule], of_both: Any
) -> None:
    problem = Problem.random(vocab=vocab)
    signal = HiddenState(problem.teacher_hidden, problem.teacher_weight, *rules[1])

    def figures() -> Figures:
        total, report, *gradients = run(
            problem, terms, signal=signal, chunk_tokens=8, student_rule=rules[0]
        )
        return [total, *report.values(), *gradients]

    assert_close(of_both(figures))


def test_mixtures_of_teachers_are_those_of_rows_side_by_side(of_both: Any) -> None:
    inputs = Inputs.random()

    def figures() -> Figures:
        found = on_shard(0, 1, inputs, TERMS["all"], NAMES)
        return [found.total, *found.report.values(), found.hidden_gradient, found.weight_gradient]

    assert_close(of_both(figures))


def test_a_capture_is_that_of_rows_side_by_side(of_both: Any) -> None:
    problem = Problem.random(vocab=1000)
    state = HiddenState(problem.teacher_hidden, problem.teacher_weight)
    shard, counted = VocabShard(1000, 0, 1000), torch.arange(0, state.tokens, 2)

    def figures() -> Figures:
        found: Figures = []
        for chunk in output_chunks(state, counted, chunk_tokens=5, columns=1000):
            labels = problem.labels_N[chunk.rows]
            found += row_statistics(
                chunk.raw, LogitRule(), shard, None, labels=labels, temperatures=(2.0,)
            )
            for top_k in select(chunk.raw, LogitRule(), shard, None, k=4, temperatures=[1.0, 2.0]):
                found += [top_k.ids.double(), top_k.log_probs, top_k.log_tail]
        return found

    assert_close(of_both(figures))


@pytest.mark.parametrize("tile_tokens", [1, 6])
def test_losses_between_tokenizers_are_those_of_rows_side_by_side(
    tile_tokens: int, of_both: Any
) -> None:
    problem = AlignedProblem.random()
    work = work_for(problem, tile_tokens)
    leaves = problem.hidden.requires_grad_(), problem.weight.requires_grad_()

    def figures() -> Figures:
        total, sums = aligned_linear(HiddenState(*leaves, 3.0, 0.5), work)
        return [total.detach(), sums, *torch.autograd.grad(total, leaves)]

    assert_close(of_both(figures))


def test_published_ids_are_those_of_rows_side_by_side(of_both: Any) -> None:
    work = work_for(AlignedProblem.random())
    close, apart = of_both(lambda: [published_ids(work.rows, 9)])
    assert torch.equal(apart[0], close[0])
    assert len(close[0].unique()) == 9

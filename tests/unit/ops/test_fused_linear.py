"""The chunked executor: which products it computes, on what, and how much memory it takes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import Term
from megatron_distill.ops import vocab_parallel_topk, weight_gradient
from megatron_distill.ops import workspace as blocks
from megatron_distill.signals import DenseLogits, Sampled
from tests.reference.distillation import Problem
from tests.reference.logits import logit_pair
from tests.reference.tracing import Trace, traced
from tests.support.divergence_runs import EACH, REPRESENTATIVE, term_of
from tests.support.objective_runs import objective
from tests.support.objective_runs import run as run_once

TOKENS, HIDDEN, VOCAB, CHUNK = 256, 8, 1024, 16


def step(
    problem: Problem,
    chunk_tokens: int | None,
    *,
    hidden: bool = True,
    weight: bool = True,
    buffer: Tensor | None = None,
) -> Callable[[], Tensor]:
    """Forward, and backward into the leaves that are wanted."""
    student = problem.hidden_NH.detach().requires_grad_(hidden)
    head = problem.weight_GH.detach().requires_grad_(weight)

    def run() -> Tensor:
        total, _ = objective(
            problem, student, head, chunk_tokens=chunk_tokens, weight_gradient_sum=buffer
        )
        if total.requires_grad:
            total.backward()
        return total

    return run


def trace_of(
    problem: Problem, chunk_tokens: int | None, *, buffer: Tensor | None = None, **wanted: bool
) -> Trace:
    return traced(
        step(problem, chunk_tokens, buffer=buffer, **wanted),
        problem.hidden_NH,
        problem.weight_GH,
        problem.teacher_hidden,
        problem.teacher_weight,
        *(() if buffer is None else (buffer,)),
    )


def test_peak_memory_is_two_chunks_of_logits_and_does_not_grow_with_tokens() -> None:
    peaks = [
        trace_of(Problem.random(tokens, HIDDEN, VOCAB), CHUNK).peak_bytes
        for tokens in (TOKENS, 2 * TOKENS)
    ]
    logits = 4 * CHUNK * VOCAB
    # Two chunk buffers, three scratch blocks of at most a chunk, the weight gradient.
    assert peaks[0] < 5 * logits + 4 * VOCAB * HIDDEN + TOKENS * 200
    assert peaks[1] - peaks[0] < TOKENS * 200
    assert peaks[0] < 4 * TOKENS * VOCAB / 2


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_defect_01_no_accumulator_in_the_fused_objective(name: str, one_thread: None) -> None:
    def peak(support: str, tokens: int) -> int:
        problem = Problem.random(tokens, 8, 2048)
        problem = problem.with_weights(torch.ones(tokens), torch.ones(tokens))
        return traced(
            partial(run_once, problem, [term_of(name, support)], chunk_tokens=16),
            *vars(problem).values(),
        ).peak_bytes

    for support in ("dense", "tail"):
        assert peak(support, 64) - peak(support, 32) < 32 * 300


@pytest.mark.parametrize(
    ("dtype", "has_buffer"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)],
)
def test_peak_memory_does_not_grow_with_the_vocabulary(
    dtype: torch.dtype, has_buffer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_CPU_CHUNK", CHUNK * VOCAB)
    monkeypatch.setattr(blocks, "_CPU_ELEMENTS", VOCAB)
    monkeypatch.setattr(weight_gradient, "_PRODUCT_ELEMENTS", VOCAB)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    blocks_of_a_row = 3 if dtype == torch.float32 else 5  # each as large as the vocabulary
    working = []
    for vocab in (VOCAB, 8 * VOCAB):
        problem = Problem.random(2 * CHUNK, HIDDEN, vocab, dtype=dtype)
        buffer = torch.zeros(vocab, HIDDEN) if has_buffer else None
        gradients = 0 if has_buffer else 4 * HIDDEN * (2 * CHUNK + vocab)
        peak = trace_of(problem, None, buffer=buffer).peak_bytes
        working.append(peak - gradients - blocks_of_a_row * 4 * vocab)
    logits = 2 * dtype.itemsize * CHUNK * VOCAB
    product = 0 if dtype == torch.float32 else dtype.itemsize * VOCAB
    assert all(abs(bytes_ - logits - product) < 0.1 * logits for bytes_ in working)


def test_peak_memory_of_a_large_chunk_is_its_logits() -> None:
    # Where a chunk exceeds the cache, scratch is a fraction of it.
    peak = trace_of(Problem.random(256, HIDDEN, 40_000), 256).peak_bytes
    assert peak < 1.25 * 2 * 4 * 256 * 40_000


KINDS = [one for one in EACH if one[0] in REPRESENTATIVE]


def products_of(problem: Problem, terms: list[Term], signal: Any = None) -> Trace:
    return traced(partial(run_once, problem, terms, signal=signal, chunk_tokens=8))


def dtypes_of(trace: Trace) -> set[torch.dtype]:
    return {operand.dtype for operands in trace.products for operand in operands}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_defect_10_products_run_in_the_dtype_of_their_inputs(dtype: torch.dtype) -> None:
    # NeMo-RL's path from hidden states ran the products of backward in fp32.
    problem = Problem.random(24, HIDDEN, 64, dtype=dtype)
    for name, support in KINDS if dtype is torch.bfloat16 else KINDS[:1]:
        trace = products_of(problem, [term_of(name, support, temperature=2.0)])
        assert len(trace.products) == 3 * 4  # logits of both models, both gradients
        assert dtypes_of(trace) == {dtype}
    # Nor does a given teacher in fp32 widen them.
    _, teacher = logit_pair(24, 64)
    kept = vocab_parallel_topk(teacher, 4)
    for signal in (DenseLogits(teacher), kept, Sampled(kept.ids, torch.ones_like(kept.ids))):
        trace = products_of(problem, [Term()], signal)
        assert len(trace.products) == 3 * 3
        assert dtypes_of(trace) == {dtype}


def test_student_and_teacher_products_keep_their_own_dtype() -> None:
    problem = Problem.random(32, HIDDEN, 64, teacher_dtype=torch.bfloat16)
    dtypes = [operands[0].dtype for operands in trace_of(problem, 32).products]
    assert sorted(map(str, dtypes)) == ["torch.bfloat16"] + ["torch.float32"] * 3


@pytest.mark.parametrize(
    ("hidden", "weight", "products"),
    [(True, True, 4), (True, False, 3), (False, True, 3), (False, False, 2)],
)
def test_only_gradients_that_are_wanted_are_computed(
    hidden: bool, weight: bool, products: int
) -> None:
    trace = trace_of(Problem.random(32, HIDDEN, 64), 32, hidden=hidden, weight=weight)
    assert len(trace.products) == products


def test_without_autograd_no_gradient_is_computed() -> None:
    run = step(Problem.random(32, HIDDEN, 64), 16)
    with torch.no_grad(), Trace() as trace:
        total = run()
    assert not total.requires_grad
    assert len(trace.products) == 2 * 2


def test_backward_computes_no_product() -> None:
    problem = Problem.random(32, HIDDEN, 64)
    head = problem.weight_GH.requires_grad_()
    total, _ = objective(problem, problem.hidden_NH, head, chunk_tokens=16)
    assert not traced(total.backward).products
    assert head.grad is not None


def test_masked_tokens_are_left_out_of_every_product() -> None:
    problem = Problem.random(40, HIDDEN, 64)
    used = int(((problem.ce_weights_N != 0) | (problem.kd_weights_N != 0)).sum())
    assert 0 < used < 40
    trace = trace_of(problem, 64)
    for left, right in trace.products:
        assert used in (*left.shape, *right.shape)
        assert 40 not in (*left.shape, *right.shape)


def test_defect_02_chunks_are_of_tokens_of_one_size_and_never_larger_than_asked() -> None:
    # TRL's chunked JSD cut the batch axis of [b, s, H]: with b = 1 nothing was chunked.
    problem = Problem.random(40, HIDDEN, 64)
    problem = problem.with_weights(torch.ones(40), torch.ones(40))
    trace = trace_of(problem, 32)
    rows = [left.shape[0] for left, right in trace.products if left.shape[1] != VOCAB]
    assert 20 in rows
    assert 32 not in rows
    assert len(trace.products) == 2 * 4

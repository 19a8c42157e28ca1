"""Defects of memory and products that shipped losses had: accumulators of the size of the logits,
chunks of the wrong axis, products in fp32, blocks that grow with the vocabulary.

The list of all of them is in tests/guards/test_known_defects.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import Term, fused_linear_objective, token_divergence
from megatron_distill.ops import vocab_parallel_topk
from megatron_distill.ops.workspace import row_blocks
from megatron_distill.signals import DenseLogits, HiddenState, Sampled, TopK
from tests.reference.distillation import Problem
from tests.reference.logits import logit_pair
from tests.reference.tracing import Trace, traced
from tests.support.divergence_runs import EACH, MAINLY, NAMES, signal_of, term_of
from tests.support.objective_runs import run


def divergence_step(
    student: Tensor, signal: DenseLogits | TopK, name: str, support: str
) -> Callable[[], None]:
    """Forward and backward of the mean over tokens, whose upstream gradient is not one."""
    leaf = student.detach().requires_grad_()
    given: dict[str, Any] = {} if support == "dense" else {"support": support}

    def step() -> None:
        token_divergence(leaf, signal, divergence=name, **given).mean().backward()

    return step


def tensors_of(signal: DenseLogits | TopK) -> list[Tensor]:
    return [value for value in vars(signal).values() if isinstance(value, Tensor)]


def extra_bytes(
    name: str, support: str, tokens: int, vocab: int, dtype: torch.dtype = torch.float32
) -> int:
    """Most bytes alive beyond the inputs and the gradient."""
    student, teacher = logit_pair(1, vocab, dtype=dtype)
    student, teacher = (logits.repeat(tokens, 1) for logits in (student, teacher))
    signal = signal_of(support, teacher)
    step = divergence_step(student, signal, name, support)
    return traced(step, student, *tensors_of(signal)).peak_bytes - student.nbytes


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("name", "support"), EACH)
def test_defect_01_no_accumulator_of_the_size_of_the_logits(
    name: str, support: str, dtype: torch.dtype, one_thread: None
) -> None:
    # Liger-Kernel's JSD kept its loss as [N, V] in a kernel whose point was to hold no logits.
    few, many = (extra_bytes(name, support, tokens, 32_768, dtype) for tokens in (16, 32))
    # Where the teacher's tail begins is found with 256 sums per token, and those up to each.
    bins = 16 * 2 * 256 * 8 if name == "adaptive_kl" else 0
    assert many - few < 0.02 * 16 * 32_768 * 4 + bins


@pytest.mark.parametrize(("name", "support"), MAINLY)
def test_defect_01_no_accumulator_in_the_fused_objective(
    name: str, support: str, one_thread: None
) -> None:
    def peak(tokens: int) -> int:
        problem = Problem.random(tokens, 8, 2048)
        problem = problem.with_weights(torch.ones(tokens), torch.ones(tokens))
        return traced(
            partial(run, problem, [term_of(name, support)], chunk_tokens=16),
            *vars(problem).values(),
        ).peak_bytes

    assert peak(64) - peak(32) < 32 * 300


@pytest.mark.parametrize("name", NAMES)
def test_defect_01_nothing_grows_where_the_gradient_takes_the_place_of_the_logits(
    name: str, one_thread: None
) -> None:
    def extra(tokens: int) -> int:
        student, teacher = (logits.repeat(tokens, 1) for logits in logit_pair(1, 30_000))
        leaf, weights = student.requires_grad_(), torch.linspace(0.5, 1.0, tokens)
        given = {"divergence": name, "overwrite_logits": True}

        def step() -> None:
            logits = leaf * 1
            value = token_divergence(logits, DenseLogits(teacher), **given)  # type: ignore[arg-type]
            (value * weights).sum().backward()

        # The layer's logits, and the gradient that it hands on in turn.
        return traced(step, student, teacher).peak_bytes - 2 * student.nbytes

    assert extra(32) - extra(16) < 0.02 * 16 * 30_000 * 4


def test_defect_02_hidden_states_of_three_dimensions_are_refused() -> None:
    # TRL's chunked JSD cut the batch axis of [b, s, H]: with b = 1 nothing was chunked.
    problem = Problem.random(24)

    def total(**given: Any) -> Tensor:
        tensors: dict[str, Any] = {
            "student": problem.hidden_NH,
            "labels": problem.labels_N,
            "ce_weights": problem.ce_weights_N,
            "kd_weights": problem.kd_weights_N,
        } | given
        signal = HiddenState(problem.teacher_hidden, problem.teacher_weight)
        student, labels = tensors.pop("student"), tensors.pop("labels")
        return fused_linear_objective(
            student,
            problem.weight_GH,
            signal,
            labels,
            terms=[Term()],
            chunk_tokens=8,
            **tensors,
        )[0]

    assert bool(total().isfinite())
    for shape in ((1, 24, 12), (2, 12, 12), (24, 1, 12)):
        with pytest.raises(ValueError, match=rf"hidden is .* of shape \({shape[0]}, {shape[1]}, "):
            total(student=problem.hidden_NH.reshape(shape))
    with pytest.raises(ValueError, match=r"HiddenState.hidden is .* of shape \(2, 12, 16\)"):
        HiddenState(problem.teacher_hidden.reshape(2, 12, 16), problem.teacher_weight)
    with pytest.raises(ValueError, match=r"DenseLogits.logits is .* of shape \(2, 3, 5\)"):
        token_divergence(
            torch.zeros(2, 3, 5), DenseLogits(torch.zeros(6, 5)), divergence="forward_kl"
        )
    with pytest.raises(ValueError, match=r"logits are \(2, 3, 5\)"):
        vocab_parallel_topk(torch.zeros(2, 3, 5), 2)
    # A second dimension beside the tokens would be broadcast against them.
    every = {"rows": torch.arange(24)}
    for name in ("ce_weights", "kd_weights"):
        with pytest.raises(
            ValueError, match=rf"{name} is of shape \(24, 1\); .* each of 24 tokens"
        ):
            total(**every, **{name: torch.ones(24, 1)})
    with pytest.raises(ValueError, match=r"labels is of shape \(2, 12\)"):
        total(labels=problem.labels_N.view(2, 12))


@pytest.mark.parametrize("shape", [(1, 48), (48, 1), (4, 12)])
def test_defect_02_a_flattened_batch_is_chunked_by_tokens(shape: tuple[int, int]) -> None:
    problem = Problem.random(48, 8, 4096)
    problem = problem.with_weights(torch.ones(48), torch.ones(48))
    hidden = problem.hidden_NH.reshape(*shape, 8).flatten(0, 1).requires_grad_()
    signal = HiddenState(
        problem.teacher_hidden.reshape(*shape, 12).flatten(0, 1), problem.teacher_weight
    )

    def step() -> None:
        fused_linear_objective(
            hidden,
            problem.weight_GH,
            signal,
            problem.labels_N,
            ce_weights=problem.ce_weights_N,
            kd_weights=problem.kd_weights_N,
            terms=[Term()],
            chunk_tokens=16,
        )[0].backward()

    trace = traced(step, *vars(problem).values())
    logits = [left.shape[0] for left, right in trace.products if right.shape[1] == 4096]
    assert logits == [16] * 6  # three chunks of both models
    assert trace.peak_bytes < 48 * 4096 * 4 * 2


def products_of(terms: list[Term], signal: Any) -> Trace:
    problem = Problem.random(24, 8, 64, dtype=torch.bfloat16)
    trace = traced(partial(run, problem, terms, signal=signal, chunk_tokens=8))
    assert len(trace.products) % 3 == 0
    return trace


@pytest.mark.parametrize(("name", "support"), EACH)
def test_defect_10_no_product_is_wider_than_its_inputs(name: str, support: str) -> None:
    # NeMo-RL's path from hidden states ran the products of backward in fp32.
    trace = products_of([term_of(name, support, temperature=2.0)], None)
    assert len(trace.products) == 3 * 4  # logits of both models, both gradients
    dtypes = {operand.dtype for operands in trace.products for operand in operands}
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["logits", "top-k", "samples"])
def test_defect_10_no_product_is_wider_beside_a_given_teacher(kind: str) -> None:
    _, teacher = logit_pair(24, 64)  # fp32, as a teacher elsewhere may be
    kept = vocab_parallel_topk(teacher, 4)
    signals: dict[str, Any] = {
        "logits": DenseLogits(teacher),
        "top-k": kept,
        "samples": Sampled(kept.ids, torch.ones_like(kept.ids)),
    }
    trace = products_of([Term()], signals[kind])
    assert len(trace.products) == 3 * 3
    dtypes = {operand.dtype for operands in trace.products for operand in operands}
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize(("name", "support"), EACH)
def test_defect_11_scratch_does_not_grow_with_the_vocabulary(
    name: str, support: str, one_thread: None
) -> None:
    # Liger-Kernel ran blocks of 65,536 columns with the warps meant for few; Fast-LLM held more
    # than fits for two softmaxes. Here a block is a megabyte per buffer, whatever the vocabulary.
    narrow, wide = (
        extra_bytes(name, support, tokens, vocab) for tokens, vocab in ((20, 32_768), (3, 262_144))
    )
    assert wide <= narrow * 1.05
    assert wide < 13 * 2**20


@pytest.mark.parametrize("vocab", [32_000, 128_256, 151_936, 262_144])
@pytest.mark.parametrize(("device", "elements"), [("cpu", 2**18), ("cuda", 2**25)])
def test_defect_11_blocks_hold_a_bounded_number_of_logits(
    device: str, elements: int, vocab: int, one_thread: None
) -> None:
    blocks = list(row_blocks(8192, vocab, torch.device(device)))
    sizes = {block.stop - block.start for block in blocks[:-1]}
    (rows,) = sizes
    assert elements / 2 < rows * vocab <= elements * 4 / 3

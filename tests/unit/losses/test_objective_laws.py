"""Laws of the fused objective: masks, chunks, padding, upstream factors, no tokens, equal
models, labels that do not exist, repeated calls."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import Term
from megatron_distill.ops import vocab_parallel_topk
from megatron_distill.signals import DenseLogits, HiddenState, Sampled
from tests.reference.distillation import Problem, row_error, solve
from tests.reference.tracing import HostWaits
from tests.support.divergence_runs import EACH, KEPT_SUPPORTS, NAMES, term_of, value_of
from tests.support.objective_runs import assert_same, objective, run


@pytest.mark.parametrize("chunk_tokens", [4, 1024])
def test_rows_known_beforehand_change_nothing_and_spare_the_wait(chunk_tokens: int) -> None:
    problem = Problem.random(seed=9)
    used = (problem.ce_weights_N != 0) | (problem.kd_weights_N != 0)
    assert 0 < int(used.sum()) < used.numel()
    rows = used.nonzero().squeeze(1)
    run(problem, chunk_tokens=chunk_tokens)  # compiling reads numbers of its own, once
    with HostWaits() as looked_for:
        expected = run(problem, chunk_tokens=chunk_tokens)
    with HostWaits() as given:
        found = run(problem, chunk_tokens=chunk_tokens, rows=rows)
    # The others are those of the loops over row blocks on a CPU, which a GPU does not run.
    assert given.count == looked_for.count - 1
    assert torch.equal(found[0], expected[0])
    for ours, other in zip(found[2:], expected[2:], strict=True):
        assert torch.equal(ours, other)
    # Rows that carry no weight may be among them; they are computed for nothing.
    assert_same(run(problem, chunk_tokens=chunk_tokens, rows=torch.arange(used.numel())), expected)


@pytest.mark.parametrize("upstream", [0.0, 1.0, -3.0, 1 / 1024])
def test_upstream_scalar_scales_gradients_and_not_the_total(upstream: float) -> None:
    problem = Problem.random(seed=7)
    plain, scaled = run(problem), run(problem, upstream=upstream)
    assert torch.equal(plain[0], scaled[0])
    for ours, other in zip(scaled[2:], plain[2:], strict=True):
        torch.testing.assert_close(ours, other * upstream, rtol=1e-6, atol=0)


def signals(problem: Problem) -> dict[str, Any]:
    """One of each kind."""
    logits = problem.teacher_hidden @ problem.teacher_weight.t()
    kept = vocab_parallel_topk(logits, 4)
    return {
        "logits": DenseLogits(logits),
        "hidden": HiddenState(problem.teacher_hidden, problem.teacher_weight, 5.0, 0.7),
        "top-k": replace(kept, temperature=None),
        "samples": Sampled(kept.ids, torch.ones_like(kept.ids)),
    }


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("logits", torch.bfloat16),
        ("hidden", torch.float32),
        ("hidden", torch.bfloat16),
        ("top-k", torch.bfloat16),
        ("samples", torch.float32),
    ],
)
def test_defect_12_calls_repeat_exactly_and_leave_their_inputs_alone(
    kind: str, dtype: torch.dtype
) -> None:
    # Fast-LLM and SkyRL let an autotuner run kernels again that work in place.
    problem = Problem.random(12, 8, 40, dtype=dtype)
    signal = signals(problem)[kind]
    names = NAMES[:1] if kind == "samples" else NAMES
    terms = [Term(name, temperature=2.0) for name in names]
    if kind in ("logits", "hidden"):
        terms += [term_of(name, support) for name in names for support in KEPT_SUPPORTS]
    given = [*vars(problem).values(), *vars(signal).values()]
    tensors = [value for value in given if isinstance(value, Tensor)]
    before = [tensor.clone() for tensor in tensors]
    for one in (problem, problem.with_weights(torch.ones(12), torch.ones(12))):
        first, second = (
            run(one, terms, signal=signal, chunk_tokens=5, student_rule=(4.0, 0.5))
            for _ in range(2)
        )
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(tensors, before, rtol=0, atol=0)


def test_backward_may_run_again() -> None:
    problem = Problem.random(seed=8)
    hidden = problem.hidden_NH.requires_grad_()
    terms = [Term(name) for name in NAMES]
    total, _ = objective(problem, hidden, problem.weight_GH, terms=terms)
    total.backward(retain_graph=True)
    once = hidden.grad.clone()
    total.backward()
    assert torch.equal(hidden.grad, 2 * once)


@pytest.mark.parametrize("kind", ["forward", "dense", "kept"])
def test_defect_05_masked_tokens_change_nothing_even_if_they_are_not_finite(kind: str) -> None:
    # MiniLLM's mask was true everywhere, so that prompts and padding were learnt from.
    problem = Problem.random(seed=9)
    terms = [term for term in TERMS if (term.top_k is None) is (kind == "dense")]
    terms = [Term()] if kind == "forward" else terms
    clean = run(problem, terms)
    unused = (problem.ce_weights_N == 0) & (problem.kd_weights_N == 0)
    no_divergence = (problem.kd_weights_N == 0) & ~unused
    no_label = (problem.ce_weights_N == 0) & ~unused
    assert unused.any()
    assert no_divergence.any()
    assert no_label.any()
    hidden, teacher = problem.hidden_NH.clone(), problem.teacher_hidden.clone()
    labels = problem.labels_N.clone()
    hidden[unused], teacher[unused] = torch.nan, torch.inf
    teacher[no_divergence] = torch.nan
    labels[no_label | unused] = -100
    spoiled = replace(problem, hidden_NH=hidden, teacher_hidden=teacher, labels_N=labels)
    dirty = run(spoiled, terms)
    # Of a token without divergence, curved terms round the gradient of the label otherwise.
    exact = {"rtol": 0, "atol": 0} if kind == "forward" else {"rtol": 1e-5, "atol": 1e-9}
    torch.testing.assert_close(dirty[0], clean[0], rtol=0, atol=0)
    torch.testing.assert_close(dirty[2:], clean[2:], **exact)
    for name in clean[1].keys() - {"teacher_ce"}:  # the teacher is asked for those labels as well
        assert torch.equal(clean[1][name], dirty[1][name]), name


@pytest.mark.parametrize("garbage", [1.0, torch.nan])
def test_defect_15_all_tokens_masked(garbage: float) -> None:
    # A mean over no tokens is 0/0 where the count comes after the sum.
    for tokens in (0, 4):
        problem = Problem.random(tokens, 6, 30).with_weights(*torch.zeros(2, tokens))
        problem = replace(problem, hidden_NH=problem.hidden_NH * garbage)
        for term in TERMS:
            total, report, hidden, weight = run(problem, [term])
            assert float(total) == 0.0
            assert not any(float(value) for value in report.values())
            assert torch.equal(hidden, torch.zeros(tokens, 6))
            assert torch.equal(weight, torch.zeros(30, 6))


TERMS = [Term(), *(term_of(name, support) for name, support in EACH if name != "forward_kl")]


@pytest.mark.parametrize("label", [-1, -100, 203, 5000])
def test_labels_that_do_not_exist_are_not_silently_right(label: int) -> None:
    problem = Problem.random(seed=16)
    labels = problem.labels_N.clone()
    labels[int(problem.ce_weights_N.argmax())] = label
    total = run(replace(problem, labels_N=labels))[0]
    assert float(total) == float("inf")


@pytest.mark.parametrize("top_k", [None, 3])
def test_defect_07_large_vocabularies_in_the_fused_objective(top_k: int | None) -> None:
    vocab = 2**18
    problem = Problem.random(3, 4, vocab).with_weights(torch.ones(3) / 3, torch.ones(3) / 3)
    problem = replace(problem, labels_N=torch.tensor([vocab - 1, vocab // 2, 0]))
    total, report, hidden, weight = run(problem, [Term(top_k=top_k)], chunk_tokens=2)
    answer = solve(problem, [(1.0, 1.0)] if top_k is None else [])
    assert float(report["ce"]) == pytest.approx(float(answer.report["ce"]), rel=1e-6)
    if top_k is None:
        assert float(total) == pytest.approx(float(answer.total), rel=1e-6)
        # The product sums up as many fp32 numbers as there are ids.
        assert row_error(hidden, answer.hidden_gradient) < 2e-5
        error = (weight - answer.weight_gradient).abs().max()
        assert float(error) < 2e-6 * float(answer.weight_gradient.abs().max())
    else:
        student = problem.hidden_NH.double() @ problem.weight_GH.double().t()
        teacher = problem.teacher_hidden.double() @ problem.teacher_weight.double().t()
        value = value_of(Term(top_k=top_k), student, teacher).mean()
        assert float(report["forward_kl_top3"]) == pytest.approx(float(value), rel=1e-5)

"""Laws of the fused objective: masks, chunks, padding, upstream factors, no tokens, equal
models, labels that do not exist, repeated calls."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_distill.losses import Term
from megatron_distill.ops import VocabShard
from megatron_distill.signals import HiddenState
from tests.reference.distillation import Problem
from tests.reference.tracing import HostWaits
from tests.support.objective_runs import assert_same, objective, run


@pytest.mark.parametrize("chunk_tokens", [1, 2, 5, 7, 64])
def test_chunk_size_changes_nothing(chunk_tokens: int) -> None:
    problem = Problem.random(seed=6)
    assert_same(run(problem, chunk_tokens=chunk_tokens), run(problem, chunk_tokens=1024))


@pytest.mark.parametrize("chunk_tokens", [4, 1024])
def test_rows_known_beforehand_change_nothing_and_spare_the_wait(chunk_tokens: int) -> None:
    problem = Problem.random(seed=9)
    used = (problem.ce_weights_N != 0) | (problem.kd_weights_N != 0)
    assert 0 < int(used.sum()) < used.numel()
    rows = used.nonzero().squeeze(1)
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


def test_backward_may_run_again_and_calls_repeat_exactly() -> None:
    problem = Problem.random(seed=8)
    hidden = problem.hidden_NH.requires_grad_()
    before = [tensor.clone() for tensor in vars(problem).values()]
    total, _ = objective(problem, hidden, problem.weight_GH)
    total.backward(retain_graph=True)
    assert hidden.grad is not None
    once = hidden.grad.clone()
    total.backward()
    assert torch.equal(hidden.grad, 2 * once)
    first, second = run(problem), run(problem)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[2], second[2])
    assert torch.equal(first[3], second[3])
    for tensor, original in zip(vars(problem).values(), before, strict=True):
        assert torch.equal(tensor, original)


def test_masked_tokens_change_nothing_even_if_they_are_not_finite() -> None:
    problem = Problem.random(seed=9)
    clean = run(problem)
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
    dirty = run(replace(problem, hidden_NH=hidden, teacher_hidden=teacher, labels_N=labels))
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[2], dirty[2])
    assert torch.equal(clean[3], dirty[3])
    for name in clean[1].keys() - {"teacher_ce"}:  # the teacher is asked for those labels as well
        assert torch.equal(clean[1][name], dirty[1][name]), name


def test_weights_that_never_vanish_leave_nothing_out() -> None:
    problem = Problem.random(seed=10)
    mask = torch.tensor([index % 3 != 0 for index in range(23)])
    masked = run(problem.with_weights(mask.float(), mask.float()))
    rest = replace(
        problem,
        hidden_NH=problem.hidden_NH[mask],
        teacher_hidden=problem.teacher_hidden[mask],
        labels_N=problem.labels_N[mask],
    ).with_weights(torch.ones(15), torch.ones(15))
    dense = run(rest)
    assert float(masked[0]) == pytest.approx(float(dense[0]), rel=1e-6)
    torch.testing.assert_close(masked[2][mask], dense[2], rtol=1e-5, atol=1e-6)
    assert not masked[2][~mask].any()


@pytest.mark.parametrize("tokens", [0, 5])
def test_nothing_to_learn_from_gives_zeros_and_a_graph(tokens: int) -> None:
    problem = Problem.random(tokens).with_weights(torch.zeros(tokens), torch.zeros(tokens))
    total, report, hidden, weight = run(problem)
    assert float(total) == 0.0
    assert set(report) == {
        "ce",
        "kd",
        "forward_kl",
        "teacher_ce",
        "student_entropy",
        "teacher_entropy",
        "top1_agreement",
    }
    assert not any(float(value) for value in report.values())
    assert hidden.shape == (tokens, 12)
    assert not hidden.any()
    assert not weight.any()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_equal_models_have_exactly_zero_divergence_and_gradient(
    seed: int, temperature: float
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        problem = Problem.random(seed=seed, dtype=dtype)
        signal = HiddenState(problem.hidden_NH.clone(), problem.weight_GH.clone())
        total, report, hidden, weight = run(
            problem, [Term(temperature=temperature)], signal=signal, ce_coefficient=0.0
        )
        assert float(total) == 0.0
        assert not hidden.any()
        assert not weight.any()
        assert float(report["top1_agreement"]) == pytest.approx(
            float(problem.kd_weights_N.sum()), rel=1e-6
        )
        assert torch.equal(report["student_entropy"], report["teacher_entropy"])
        assert torch.equal(report["ce"], report["teacher_ce"])


@pytest.mark.parametrize("padding", [torch.nan, torch.inf, 1e4, 0.0])
def test_padded_columns_never_carry_probability(padding: float) -> None:
    problem = Problem.random(seed=11)
    width = len(problem.weight_GH)

    def padded(weight: Tensor, rows: int) -> Tensor:
        return torch.cat([weight, torch.full((rows, weight.shape[1]), padding)])

    total, report, hidden, weight = run(
        replace(
            problem,
            weight_GH=padded(problem.weight_GH, 21),
            teacher_weight=padded(problem.teacher_weight, 85),
        ),
        shard=VocabShard(width, 0, width + 21),
    )
    plain = run(problem)
    assert torch.equal(total, plain[0])
    assert torch.equal(hidden, plain[2])
    assert torch.equal(weight[:width], plain[3])
    assert not weight[width:].any()
    for name, value in plain[1].items():
        assert torch.equal(report[name], value), name


@pytest.mark.parametrize("label", [-1, -100, 203, 5000])
def test_labels_that_do_not_exist_are_not_silently_right(label: int) -> None:
    problem = Problem.random(seed=16)
    labels = problem.labels_N.clone()
    labels[int(problem.ce_weights_N.argmax())] = label
    total = run(replace(problem, labels_N=labels))[0]
    assert float(total) == float("inf")

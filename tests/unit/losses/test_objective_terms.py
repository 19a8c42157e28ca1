"""The fused objective against float64: totals, terms, reports, masks, graphs used again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import Term, token_divergence
from megatron_distill.ops import vocab_parallel_topk
from megatron_distill.signals import DenseLogits, HiddenState, Sampled, TopK
from tests.reference import divergences as oracles
from tests.reference.distillation import Problem, capped, cross_entropy, entropy, row_error, solve
from tests.reference.tracing import HostWaits
from tests.support.divergence_runs import EACH, KEPT_SUPPORTS, NAMES, term_of, value_of
from tests.support.objective_runs import KEPT, Rule, assert_same, objective, run


@pytest.mark.parametrize(
    ("temperature", "ce_coefficient"), [(0.5, 0.7), (1.0, 0.0), (2.0, 0.7), (4.0, 0.0)]
)
def test_total_report_and_gradients_equal_the_oracle(
    temperature: float, ce_coefficient: float
) -> None:
    problem = Problem.random(vocab=1003, seed=1)
    term = Term(weight=0.3, temperature=temperature)
    total, report, hidden, weight = run(problem, [term], ce_coefficient=ce_coefficient)
    answer = solve(problem, [(0.3, temperature)], ce_coefficient=ce_coefficient)
    assert float(total) == pytest.approx(float(answer.total), rel=1e-6)
    assert total.dtype is torch.float32
    # Of a row's largest entry, over the sum of a thousand columns that cancel.
    assert row_error(hidden, answer.hidden_gradient) < 2e-6
    assert float((weight - answer.weight_gradient).abs().max()) < 1e-6 * float(
        answer.weight_gradient.abs().max()
    )
    for name, expected in answer.report.items():
        assert float(report[name]) == pytest.approx(float(expected), rel=1e-6), name
        assert not report[name].requires_grad
    assert float(report[term.name]) == pytest.approx(float(answer.report["kd"]) / 0.3, rel=1e-6)


def test_bf16_products_with_fp32_statistics() -> None:
    problem = Problem.random(vocab=1003, seed=3, dtype=torch.bfloat16)
    total, report, hidden, weight = run(problem, [Term(temperature=2.0)])

    class Bf16Product(torch.autograd.Function):
        """The product as the hardware rounds it, with the gradient of the exact one."""

        @staticmethod
        def forward(ctx, left: Tensor, right: Tensor) -> Tensor:
            ctx.save_for_backward(left, right)
            return (left.bfloat16() @ right.bfloat16()).double()

        @staticmethod
        def backward(ctx, upstream: Tensor) -> tuple[Tensor, Tensor]:
            left, right = ctx.saved_tensors
            return upstream @ right.t(), left.t() @ upstream

    answer = solve(problem, [(1.0, 2.0)], product=Bf16Product.apply)
    assert total.dtype is torch.float32
    assert (hidden.dtype, weight.dtype) == (torch.bfloat16, torch.bfloat16)
    assert float(total) == pytest.approx(float(answer.total), rel=1e-6)
    for name, expected in answer.report.items():
        assert float(report[name]) == pytest.approx(float(expected), rel=2e-6), name
    assert row_error(hidden, answer.hidden_gradient) < 2e-2
    error = (weight.double() - answer.weight_gradient).abs().max()
    assert float(error) < 2e-2 * float(answer.weight_gradient.abs().max())


def test_labels_alone_need_no_teacher() -> None:
    problem = Problem.random(seed=14)
    hidden = problem.hidden_NH.requires_grad_()
    total, report = objective(
        problem, hidden, problem.weight_GH, terms=[], is_taught=False, ce_coefficient=2.0
    )
    answer = solve(problem, [], ce_coefficient=2.0)
    assert set(report) == {"ce"}
    assert float(total.detach()) == pytest.approx(float(answer.total), rel=1e-6)
    assert float(report["ce"]) == pytest.approx(float(answer.report["ce"]), rel=1e-6)
    (gradient,) = torch.autograd.grad(total, hidden)
    assert row_error(gradient, answer.hidden_gradient) < 2e-6


def test_a_teacher_without_terms_is_only_reported() -> None:
    problem = Problem.random(seed=15)
    total, report, hidden, _ = run(problem, [])
    answer = solve(problem, [])
    assert float(total) == pytest.approx(float(answer.total), rel=1e-6)
    assert row_error(hidden, answer.hidden_gradient) < 2e-6
    assert float(report["kd"]) == 0.0
    expected = float(answer.report["teacher_entropy"])
    assert float(report["teacher_entropy"]) == pytest.approx(expected, rel=1e-6)


def test_teacher_gets_no_gradient() -> None:
    problem = Problem.random(seed=17)
    teacher = problem.teacher_hidden.requires_grad_(), problem.teacher_weight.requires_grad_()
    hidden = problem.hidden_NH.requires_grad_()
    objective(problem, hidden, problem.weight_GH, HiddenState(*teacher))[0].backward()
    assert problem.hidden_NH.grad is not None
    assert [leaf.grad for leaf in teacher] == [None, None]


def test_defect_02_hidden_states_of_three_dimensions_are_refused() -> None:
    # TRL's chunked JSD cut the batch axis of [b, s, H]: with b = 1 nothing was chunked.
    problem = Problem.random(24)
    for shape in ((1, 24, 12), (2, 12, 12), (24, 1, 12)):
        with pytest.raises(ValueError, match=rf"hidden is .* of shape \({shape[0]}, {shape[1]}, "):
            run(replace(problem, hidden_NH=problem.hidden_NH.reshape(shape)))
    with pytest.raises(ValueError, match=r"HiddenState.hidden is .* of shape \(2, 12, 16\)"):
        HiddenState(problem.teacher_hidden.reshape(2, 12, 16), problem.teacher_weight)
    with pytest.raises(ValueError, match=r"DenseLogits.logits is .* of shape \(2, 3, 5\)"):
        token_divergence(
            torch.zeros(2, 3, 5), DenseLogits(torch.zeros(6, 5)), divergence="forward_kl"
        )
    with pytest.raises(ValueError, match=r"logits are \(2, 3, 5\)"):
        vocab_parallel_topk(torch.zeros(2, 3, 5), 2)
    # A second dimension beside the tokens would be broadcast against them.
    for name in ("ce_weights", "kd_weights"):
        with pytest.raises(
            ValueError, match=rf"{name} is of shape \(24, 1\); .* each of 24 tokens"
        ):
            run(replace(problem, **{f"{name}_N": torch.ones(24, 1)}), rows=torch.arange(24))
    with pytest.raises(ValueError, match=r"labels is of shape \(2, 12\)"):
        run(replace(problem, labels_N=problem.labels_N.view(2, 12)))


def test_misuse_is_named() -> None:
    problem = Problem.random()
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        run(problem, chunk_tokens=0)
    with pytest.raises(ValueError, match="labels has 22 rows for 23 tokens"):
        run(replace(problem, labels_N=problem.labels_N[1:]))
    with pytest.raises(ValueError, match="kd_weights has 22 rows for 23 tokens"):
        run(replace(problem, kd_weights_N=problem.kd_weights_N[1:]))
    with pytest.raises(ValueError, match="teacher_signal has 22 rows"):
        run(replace(problem, teacher_hidden=problem.teacher_hidden[1:]))
    with pytest.raises(ValueError, match="teacher has 202 vocabulary columns; .* has 203"):
        run(replace(problem, teacher_weight=problem.teacher_weight[1:]))
    with pytest.raises(ValueError, match="k is 204; it must be between 1 and the voc"):
        run(problem, [Term(top_k=204)])
    with pytest.raises(ValueError, match="1 divergence term without a teacher signal"):
        objective(problem, problem.hidden_NH, problem.weight_GH, is_taught=False)


BETWEEN = [
    Term("js_divergence", 0.7, 2.0, scale_by_temperature_squared=True),
    Term("skewed_reverse_kl", 1.3, parameters={"skew_lambda": 0.4}),
    Term("adaptive_kl", 0.4, 0.5),
    Term("forward_kl", 0.5, 2.0),
]
RANKED = [*KEPT, Term("total_variation", 0.2, 2.0, top_k=3, support="raw")]
GIVEN = [
    Term("forward_kl", 0.6),
    Term("skewed_forward_kl", 0.3, support="renormalized"),
    Term("squared_hellinger", 2.0, support="raw"),
]
PLAIN: Rule = (None, 1.0)


def expected(
    problem: Problem, terms: Sequence[Term], student_rule: Rule, teacher_rule: Rule
) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
    hidden = problem.hidden_NH.double().requires_grad_()
    weight = problem.weight_GH.double().requires_grad_()
    student = capped(hidden @ weight.t(), *student_rule)
    teacher = capped(
        problem.teacher_hidden.double() @ problem.teacher_weight.double().t(), *teacher_rule
    )
    ce_weights, kd_weights = problem.ce_weights_N.double(), problem.kd_weights_N.double()
    ce = (ce_weights * cross_entropy(student, problem.labels_N)).sum()
    values = {term.name: (kd_weights * value_of(term, student, teacher)).sum() for term in terms}
    kd = sum((term.weight * values[term.name] for term in terms), torch.zeros(()).double())
    gradients = torch.autograd.grad(ce + kd, (hidden, weight))
    report = {
        "ce": ce,
        "kd": kd,
        **values,
        "student_entropy": (kd_weights * entropy(student)).sum(),
        "teacher_entropy": (kd_weights * entropy(teacher)).sum(),
        "top1_agreement": (kd_weights * (student.argmax(1) == teacher.argmax(1))).sum(),
    }
    kept = [term for term in terms if term.top_k is not None]
    if kept:
        first = kept[0]
        log_probs = oracles.topk(teacher, first.top_k, first.temperature)[1]
        report["topk_mass"] = (kd_weights * log_probs.exp().sum(1)).sum()
    return (ce + kd).detach(), report, *gradients


def assert_close(ours: Any, oracle: Any, *, without: Sequence[str] = ()) -> None:
    torch.testing.assert_close(ours[0].double(), oracle[0], rtol=2e-6, atol=0)
    for name, value in oracle[1].items():
        if name not in without:
            torch.testing.assert_close(ours[1][name].double(), value, rtol=4e-6, atol=1e-7)
    assert row_error(ours[2], oracle[2]) < 4e-6
    assert row_error(ours[3], oracle[3]) < 4e-6


CAPS: tuple[Rule, Rule] = ((4.0, 1.5), (6.0, 0.5))


@pytest.mark.parametrize(
    ("terms", "chunk_tokens", "rules"),
    [
        (BETWEEN, 3, CAPS), (BETWEEN, 8, (PLAIN, PLAIN)), (RANKED, 8, (PLAIN, PLAIN)),
        (RANKED, 1024, CAPS), ([*BETWEEN, *RANKED], 3, CAPS), (RANKED[2:3], 3, CAPS),
        (BETWEEN[:1], 1024, CAPS),
    ],
)  # fmt: skip
def test_live_teacher(terms: list[Term], chunk_tokens: int, rules: tuple[Rule, Rule]) -> None:
    problem = Problem.random(vocab=157)
    signal = HiddenState(problem.teacher_hidden, problem.teacher_weight, *rules[1])
    ours = run(problem, terms, signal=signal, chunk_tokens=chunk_tokens, student_rule=rules[0])
    assert_close(ours, expected(problem, terms, *rules))


def test_teacher_as_logits_equals_teacher_as_hidden_state() -> None:
    problem = Problem.random(vocab=157)
    logits = problem.teacher_hidden @ problem.teacher_weight.t()
    terms = [*BETWEEN, *RANKED]
    assert_close(
        run(problem, terms, signal=DenseLogits(logits), chunk_tokens=8),
        expected(problem, terms, PLAIN, PLAIN),
    )


@pytest.mark.parametrize("chunk_tokens", [4, 1024])
def test_given_top_k(chunk_tokens: int) -> None:
    problem = Problem.random(vocab=157)
    teacher = problem.teacher_hidden.double() @ problem.teacher_weight.double().t()
    ids, log_probs, log_tail = oracles.topk(teacher, 6, 1.0)
    signal = TopK(ids, log_probs.float(), log_tail.float())
    ours = run(problem, GIVEN, signal=signal, chunk_tokens=chunk_tokens)
    online = [Term(term.divergence, term.weight, top_k=6, support=term.support) for term in GIVEN]
    oracle = expected(problem, online, PLAIN, PLAIN)
    for given, live in zip(GIVEN, online, strict=True):
        oracle[1][given.name] = oracle[1].pop(live.name)
    assert "teacher_ce" not in ours[1]
    assert_close(ours, oracle, without=["teacher_entropy"])


def test_given_samples() -> None:
    problem = Problem.random(vocab=157)
    teacher = (problem.teacher_hidden @ problem.teacher_weight.t()).softmax(1)
    generator = torch.Generator().manual_seed(3)
    ids = torch.multinomial(teacher, 20, replacement=True, generator=generator)
    ours = run(problem, [Term()], signal=Sampled(ids, torch.ones_like(ids)), chunk_tokens=8)
    hidden = problem.hidden_NH.double().requires_grad_()
    weight = problem.weight_GH.double().requires_grad_()
    log_q = (hidden @ weight.t()).log_softmax(1)
    drawn = -log_q.gather(1, ids).mean(1)
    ce = (
        problem.ce_weights_N.double() * cross_entropy(hidden @ weight.t(), problem.labels_N)
    ).sum()
    kd = (problem.kd_weights_N.double() * drawn).sum()
    gradients = torch.autograd.grad(ce + kd, (hidden, weight))
    torch.testing.assert_close(ours[0].double(), (ce + kd).detach(), rtol=1e-6, atol=0)
    assert row_error(ours[2], gradients[0]) < 2e-6
    assert row_error(ours[3], gradients[1]) < 2e-6
    assert "topk_mass" not in ours[1]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_the_device_have_the_bits_of_host_numbers(dtype: torch.dtype) -> None:
    problem = Problem.random(vocab=203, seed=31, dtype=dtype)
    terms = [
        Term(weight=1 / 3),
        Term("reverse_kl", weight=0.7, temperature=2.0, scale_by_temperature_squared=True),
        Term("adaptive_kl", weight=1.1),
        Term(weight=0.3, top_k=7, temperature=3.0),
        Term("js_divergence", weight=1e-3, top_k=5, support="renormalized"),
    ]
    expected = run(problem, terms, ce_coefficient=0.9)
    late = [replace(one, weight=torch.tensor(one.weight, dtype=torch.float64)) for one in terms]
    found = run(problem, late, ce_coefficient=0.9)
    assert found[0].dtype is expected[0].dtype
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert found[1][name].dtype is value.dtype
        assert torch.equal(found[1][name], value), name
    for ours, theirs in zip((found[0], *found[2:]), (expected[0], *expected[2:]), strict=True):
        assert torch.equal(ours, theirs)

"""Defects in what shipped losses did with their inputs: padding of unequal width, masks that did
not mask, tensors changed in place, ids cut to 17 bits, kernels that do not repeat.

The list of all of them is in tests/guards/test_known_defects.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import Term
from megatron_distill.ops import VocabShard, vocab_parallel_topk
from megatron_distill.signals import DenseLogits, HiddenState, Sampled, Signal
from tests.reference import divergences as oracles
from tests.reference.distillation import GRADIENT_TOLERANCE, Problem, row_error, solve
from tests.reference.logits import logit_pair
from tests.support.divergence_runs import (
    EACH,
    MAINLY,
    NAMES,
    SUPPORTS,
    expected,
    signal_of,
    solved,
    term_of,
)
from tests.support.objective_runs import objective, run

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
GARBAGE = [0.0, 1e4, torch.nan, torch.inf]
VOCABULARIES = [
    *(pytest.param(size, marks=pytest.mark.slow) for size in (32_000, 128_256, 151_936)),
    262_144,
]


def assert_identical(found: Any, other: Any) -> None:
    torch.testing.assert_close(found, other, rtol=0, atol=0)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize(("name", "support"), EACH)
def test_defect_04_padding_of_unequal_width_carries_no_probability(
    name: str, support: str, garbage: float
) -> None:
    # Liger-Kernel filled the narrower vocabulary with zeros: e^0 each, where -inf was meant.
    student, teacher = logit_pair(4, 50)
    given = {"divergence": name, "support": support}
    plain = solved(student, signal_of(support, teacher), torch.ones(4), **given)
    wide = torch.nn.functional.pad(student, (0, 14), value=garbage)
    for extra in (0, 3, 30):
        other = torch.nn.functional.pad(teacher, (0, extra), value=garbage)
        signal = signal_of(support, other, shard=VocabShard(50, 0, 50 + extra))
        value, gradient = solved(wide, signal, torch.ones(4), shard=VocabShard(50, 0, 64), **given)
        assert_identical((value, gradient[:, :50]), plain)
        assert not gradient[:, 50:].any()


@pytest.mark.parametrize(("name", "support"), MAINLY)
def test_defect_04_padding_of_unequal_width_in_the_fused_objective(name: str, support: str) -> None:
    problem = Problem.random(6, 4, 50)

    def padded(weight: Tensor, rows: int) -> Tensor:
        rest = torch.tensor(GARBAGE * rows)[:rows, None]
        return torch.cat([weight, rest.expand(rows, weight.shape[1])])

    terms = [term_of(name, support)]
    plain = run(problem, terms)
    wide = replace(
        problem,
        weight_GH=padded(problem.weight_GH, 14),
        teacher_weight=padded(problem.teacher_weight, 3),
    )
    total, report, hidden, weight = run(wide, terms, shard=VocabShard(50, 0, 64))
    # Products of other widths may round differently.
    torch.testing.assert_close((total, report), plain[:2], rtol=2e-6, atol=1e-6)
    torch.testing.assert_close((hidden, weight[:50]), plain[2:], rtol=1e-5, atol=1e-6)
    assert not weight[50:].any()


@pytest.mark.parametrize(("name", "support"), EACH)
def test_defect_05_a_token_without_upstream_gradient_changes_nothing(
    name: str, support: str
) -> None:
    # MiniLLM's mask was true everywhere, so that prompts and padding were learnt from.
    student, teacher = logit_pair(5, 40)
    upstream = torch.tensor([1.0, 0.0, 0.5, 0.0, 2.0])
    masked = upstream == 0
    given = {"divergence": name, "support": support}

    def found() -> tuple[Tensor, Tensor]:
        value, gradient = solved(student, signal_of(support, teacher), upstream, **given)
        return (torch.where(masked, 0.0, value) * upstream).sum(), gradient

    clean = found()
    assert not clean[1][masked].any()
    for of_student, of_teacher in ((3.0, -1.0), (torch.nan, 1.0), (-torch.inf, torch.nan)):
        student[masked, ::2], teacher[masked, 1::2] = of_student, of_teacher
        assert_identical(found(), clean)
    student[0, int(teacher[0].argmax())] += 1  # and a token that counts does count
    changed = found()
    assert float(changed[0]) != float(clean[0])
    assert not torch.equal(changed[1], clean[1])


@pytest.mark.parametrize(("name", "support"), MAINLY)
def test_defect_05_a_token_without_weight_changes_nothing_in_the_fused_objective(
    name: str, support: str
) -> None:
    problem = Problem.random(12, 6, 40)
    terms = [term_of(name, support)]
    clean = run(problem, terms)
    unused = (problem.ce_weights_N == 0) & (problem.kd_weights_N == 0)
    assert 0 < int(unused.sum()) < 12
    for garbage in (7.0, torch.nan, torch.inf):
        dirty = replace(
            problem,
            hidden_NH=problem.hidden_NH.masked_fill(unused[:, None], garbage),
            teacher_hidden=problem.teacher_hidden.masked_fill(unused[:, None], -garbage),
            labels_N=problem.labels_N.masked_fill(unused, -100),
        )
        assert_identical(run(dirty, terms), clean)
    moved = problem.hidden_NH.clone()
    moved[int(problem.kd_weights_N.argmax())] += 1
    assert float(run(replace(problem, hidden_NH=moved), terms)[0]) != float(clean[0])


def signals(dtype: torch.dtype, tokens: int, vocab: int) -> dict[str, Signal]:
    """One of each kind."""
    _, teacher = logit_pair(tokens, vocab, dtype=dtype)
    kept = vocab_parallel_topk(teacher, 4)
    problem = Problem.random(tokens, 8, vocab, dtype=dtype)
    return {
        "logits": DenseLogits(teacher),
        "hidden": HiddenState(problem.teacher_hidden, problem.teacher_weight, 5.0, 0.7),
        "top-k": replace(kept, temperature=None),
        "samples": Sampled(kept.ids, torch.arange(4 * tokens).view(tokens, 4)),
    }


def tensors_of(*holders: object) -> list[Tensor]:
    values = [value for holder in holders for value in vars(holder).values()]
    return [value for value in values if isinstance(value, Tensor)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["logits", "top-k", "samples"])
@pytest.mark.parametrize("name", NAMES)
def test_defect_06_inputs_are_as_they_were(name: str, kind: str, dtype: torch.dtype) -> None:
    # Megatron-LM's cached distillation subtracted the maximum in place from `.float()`, which is
    # the caller's own tensor where that is fp32 already.
    signal: Any = signals(dtype, 5, 40)[kind]
    student, _ = logit_pair(5, 40, seed=1, dtype=dtype)
    upstream = torch.tensor([1.0, 0.0, 2.0, 1.0, -1.0])
    tensors = [student, upstream, *tensors_of(signal)]
    before = [tensor.clone() for tensor in tensors]
    for support in SUPPORTS:
        if (support == "dense") is (kind == "logits") and (kind != "samples" or name == NAMES[0]):
            solved(student, signal, upstream, divergence=name, support=support, temperature=2.0)
    if kind == "logits":
        solved(student, signal, upstream, divergence=name, top_k=3)
    assert_identical(tensors, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["logits", "hidden", "top-k", "samples"])
def test_defect_06_inputs_of_the_fused_objective_are_as_they_were(
    kind: str, dtype: torch.dtype
) -> None:
    problem = Problem.random(12, 8, 40, dtype=dtype)
    signal = signals(dtype, 12, 40)[kind]
    live = kind in ("logits", "hidden")
    names = NAMES[:1] if kind == "samples" else NAMES
    terms = [Term(name, temperature=2.0) for name in names]
    if live:
        terms += [term_of(name, support) for name in names for support in SUPPORTS[1:]]
    tensors = tensors_of(problem, signal)
    before = [tensor.clone() for tensor in tensors]
    run(problem, terms, signal=signal, chunk_tokens=5, student_rule=(4.0, 0.5))
    run(problem.with_weights(torch.ones(12), torch.ones(12)), terms, signal=signal)
    assert_identical(tensors, before)


@cache
def large_pair(vocab: int) -> tuple[Tensor, Tensor]:
    """Teachers that like best what lies at the end, and just above 2^17 where there is such."""
    student, teacher = logit_pair(2, vocab)
    teacher[:, vocab - 1] = 14.0
    teacher[:, min(2**17 + 1, vocab - 2)] = 13.0
    return student, teacher


@pytest.mark.parametrize("support", ["dense", "tail"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_defect_07_large_vocabularies(vocab: int, name: str, support: str) -> None:
    # Megatron-LM's stored logits have 17 bits per id, and SpecForge's blocks ended at 131,072.
    student, teacher = large_pair(vocab)
    signal = signal_of(support, teacher)
    found = solved(student, signal, torch.ones(2), divergence=name, support=support)
    value, gradient = expected(student, signal, torch.ones(2), divergence=name, support=support)
    torch.testing.assert_close(found[0].double(), value, rtol=1e-6, atol=0)
    assert row_error(found[1], gradient) < 2e-6


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_defect_07_ids_of_large_vocabularies_are_whole(vocab: int) -> None:
    _, teacher = large_pair(vocab)
    kept = vocab_parallel_topk(teacher, 6)
    ids, log_probs, log_tail = oracles.topk(teacher, 6, 1.0)
    assert kept.ids[:, :2].tolist() == [[vocab - 1, min(2**17 + 1, vocab - 2)]] * 2
    assert torch.equal(kept.ids, ids)
    torch.testing.assert_close(kept.log_probs.double(), log_probs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(kept.log_tail.double(), log_tail, rtol=1e-6, atol=1e-6)


def test_defect_07_ids_are_exact_up_to_what_fp32_counts() -> None:
    # Ids travel as fp32 between ranks.
    last = VocabShard(2**24, 2**24 - 8, 2**24)
    logits = torch.arange(8.0).flip(0).view(1, 8)
    assert vocab_parallel_topk(logits, 8, last).ids.tolist() == [[*range(2**24 - 8, 2**24)]]
    with pytest.raises(ValueError, match="size is 16777217; .* up to 16777216"):
        VocabShard(2**24 + 1, 0, 8)


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_defect_07_large_vocabularies_in_the_fused_objective(vocab: int, top_k: int | None) -> None:
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
        kept = oracles.topk(teacher, top_k, 1.0)
        value = oracles.kept("forward_kl", student, *kept, "tail", 1.0).mean()
        assert float(report["forward_kl_top3"]) == pytest.approx(float(value), rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "support"), EACH)
def test_defect_12_the_first_call_equals_the_second(
    name: str, support: str, dtype: torch.dtype
) -> None:
    # Fast-LLM and SkyRL let an autotuner run kernels again that work in place.
    student, teacher = logit_pair(5, 70, dtype=dtype)
    upstream = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0])
    given = {"divergence": name, "temperature": 2.0}
    kept: dict[str, Any] = {} if support == "dense" else {"top_k": 4, "support": support}
    problem = Problem.random(12, 8, 70, dtype=dtype)
    terms = [term_of(name, support, temperature=2.0)]
    first, second = (
        (
            solved(
                student,
                signal_of(support, teacher, temperature=2.0),
                upstream,
                support=support,
                **given,
            ),
            solved(student, DenseLogits(teacher), upstream, **given, **kept),
            run(problem, terms, chunk_tokens=5),
        )
        for _ in range(2)
    )
    assert_identical(first, second)


def test_defect_12_a_graph_gives_the_same_gradient_twice() -> None:
    problem = Problem.random(12, 8, 70)
    hidden = problem.hidden_NH.requires_grad_()
    terms = [Term(name) for name in NAMES]
    total, _ = objective(problem, hidden, problem.weight_GH, terms=terms, chunk_tokens=5)
    first, second = (torch.autograd.grad(total, hidden, retain_graph=True) for _ in range(2))
    assert_identical(first, second)
    student, teacher = logit_pair(5, 70)
    tolerance = GRADIENT_TOLERANCE[torch.float32]
    leaf = student.requires_grad_()
    for name in NAMES:
        found = solved(leaf, DenseLogits(teacher), torch.full((5,), 3.0), divergence=name)
        once = solved(leaf, DenseLogits(teacher), torch.ones(5), divergence=name)
        assert row_error(found[1], 3.0 * once[1].double()) < tolerance

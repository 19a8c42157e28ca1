"""The Triton executors against float64: every divergence, dense and on kept ids, several terms at
several temperatures with labels, soft-caps and scales, tiles, rows that are degenerate.

Run by `test_row_kernels`, in a process in which Triton interprets from the start, or on a GPU. The
interpreter leaves out what is marked for a GPU: further values on a path that it has taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import Term, fused_linear_objective, token_divergence
from megatron_distill.ops import VocabShard, workspace
from megatron_distill.ops.fused_linear import Partition
from megatron_distill.ops.kernels.launch import TritonRows
from megatron_distill.ops.torch_rows import Block
from megatron_distill.signals import DenseLogits, HiddenState
from tests.reference.distillation import GRADIENT_TOLERANCE, Problem, row_error, solve
from tests.reference.logits import logit_pair, neighbours
from tests.support.divergence_runs import (
    NAMES,
    SUPPORTS,
    assert_six_digits,
    expected,
    signal_of,
    solved,
)
from tests.support.objective_runs import run
from tests.unit.losses.test_objective_terms import (
    BETWEEN,
    PLAIN,
    RANKED,
    Rule,
    assert_close,
)
from tests.unit.losses.test_objective_terms import expected as expected_objective

# The interpreter cuts off what bf16 cannot hold, a GPU rounds.
CUT_OFF = {**GRADIENT_TOLERANCE, torch.bfloat16: 2**-7}
UPSTREAM = torch.tensor([1.0, -0.5, 0.0, 2.0])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Tensors here are the kernels' affair; the test fails if none was launched on them."""
    launched = []
    for name in ("measure", "write_gradient"):
        original = getattr(TritonRows, name)

        def counted(*arguments: Any, name: str = name, original: Any = original) -> Any:
            launched.append(name)
            return original(*arguments)

        monkeypatch.setattr(TritonRows, name, counted)
    yield torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert launched


def on(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.to(device) for tensor in tensors)


@pytest.mark.parametrize(
    ("dtype", "temperature"),
    [
        (torch.float32, 0.5),
        pytest.param(torch.float32, 3.0, marks=pytest.mark.gpu),
        pytest.param(torch.bfloat16, 1.0, marks=pytest.mark.slow),
    ],
)
# Renormalised, nothing outside the kept ids counts: no row is swept.
@pytest.mark.parametrize("support", [one for one in SUPPORTS if one != "renormalized"])
@pytest.mark.parametrize("name", NAMES)
def test_every_divergence_on_every_support(
    name: str, support: str, dtype: torch.dtype, temperature: float, device: torch.device
) -> None:
    student, teacher = on(device, *logit_pair(4, 300, dtype=dtype))
    signal = signal_of(support, teacher, temperature=temperature)
    given = {"divergence": name, "support": support, "temperature": temperature}
    value, gradient = solved(student, signal, UPSTREAM.to(device), **given)
    oracle_value, oracle_gradient = expected(student, signal, UPSTREAM.to(device), **given)
    scale = oracle_value.abs().clamp(min=1.0 if support == "raw" else 0.0)
    assert float(((value - oracle_value).abs() / scale).max()) < 1e-6
    assert row_error(gradient, oracle_gradient) < CUT_OFF[dtype]


@pytest.mark.parametrize("noise", [0.1, pytest.param(0.01, marks=pytest.mark.gpu), 0.001])
@pytest.mark.parametrize("name", NAMES)
def test_a_student_near_its_teacher_in_some_tokens(
    name: str, noise: float, device: torch.device
) -> None:
    student, teacher = on(device, *neighbours(3, 5000, noise))
    student[0] = student[0].flip(0)
    assert_six_digits(name, student, teacher, 0.5, {})


@pytest.mark.parametrize("apart", [31.7, -301.7])
@pytest.mark.parametrize("name", ["forward_kl", "js_divergence"])
def test_a_constant_between_the_models_costs_no_digits(
    name: str, apart: float, device: torch.device
) -> None:
    student, teacher = on(device, *neighbours(4, 5000, 0.01))
    student += apart
    assert_six_digits(name, student, teacher, 1.0, {})


@pytest.mark.parametrize("name", NAMES)
def test_a_row_without_an_allowed_id_has_no_finite_loss(name: str, device: torch.device) -> None:
    student, teacher = on(device, *logit_pair(4, 300))
    student[1] = -torch.inf
    value, _ = solved(student, DenseLogits(teacher), UPSTREAM.to(device), divergence=name)
    assert value.isfinite().tolist() == [True, False, True, True]


def test_nan_outside_of_the_top_k_is_never_hidden(device: torch.device) -> None:
    student, teacher = on(device, *logit_pair(4, 300))
    kept = teacher[0].topk(3).indices
    outside = torch.ones(300, dtype=torch.bool, device=device)
    outside[kept] = False
    student[0, outside] = torch.nan
    given = {"divergence": "forward_kl", "support": "tail", "top_k": 3}
    value, _ = solved(student, DenseLogits(teacher), UPSTREAM.to(device), **given)
    assert value.isnan().tolist() == [True, False, False, False]


@pytest.mark.parametrize("width", [1, 15, 4096, 4097, 9001])
@pytest.mark.parametrize("name", ["forward_kl", "js_divergence"])
def test_tiles_of_a_row_are_one_row(name: str, width: int, device: torch.device) -> None:
    student, teacher = on(device, *logit_pair(2, width, seed=width))
    # The peaks lie in the last tile, where all sums so far are scaled down.
    student[:, -1] += 9
    teacher[0, -1] += 30
    upstream = torch.ones(2, device=device)
    given = {"divergence": name, "support": "dense"}
    value, gradient = solved(student, DenseLogits(teacher), upstream, **given)
    oracle = expected(student, DenseLogits(teacher), upstream, **given)
    # Of large and nearly equal numbers a small one is the difference.
    torch.testing.assert_close(value.double(), oracle[0], rtol=1e-6, atol=3e-6)
    torch.testing.assert_close(gradient.double(), oracle[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_no_block_goes_the_other_way(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher = on(device, *logit_pair(4, 50))
    monkeypatch.setattr(Block, "gradient", lambda *_: pytest.fail("a chunked block"))
    monkeypatch.setattr(Block, "sum_slopes", lambda *_: pytest.fail("a chunked block"))
    for given in ({}, {"top_k": 3}):
        signal = DenseLogits(teacher)
        value, _ = solved(student, signal, UPSTREAM.to(device), divergence=name, **given)
        assert value.isfinite().all()


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param((PLAIN, PLAIN), id="plain", marks=pytest.mark.slow),
        pytest.param(((4.0, 1.5), (6.0, 0.5)), id="caps"),
    ],
)
@pytest.mark.parametrize(
    "terms",
    [BETWEEN, RANKED[:1], RANKED, [*BETWEEN, *RANKED]],
    ids=["between", "tail", "kept", "all"],
)
def test_objective_of_several_terms(
    terms: list[Term], rules: tuple[Rule, Rule], device: torch.device
) -> None:
    problem = on_device(Problem.random(vocab=157), device)
    signal = HiddenState(problem.teacher_hidden, problem.teacher_weight, *rules[1])
    ours = run(problem, terms, signal=signal, chunk_tokens=8, student_rule=rules[0])
    assert_close(ours, expected_objective(problem, terms, *rules))


def test_rows_may_be_further_apart_than_they_are_wide(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = on_device(Problem.random(vocab=157), device)
    terms, rules = [*BETWEEN, RANKED[0]], ((4.0, 1.5), PLAIN)
    oracle, strides = expected_objective(problem, terms, *rules), set()
    launch = TritonRows._launch

    def noted(rows: TritonRows, *given: Any, **named: Any) -> None:
        strides.add(tuple(raw.stride() for raw in rows.raw.values()))
        launch(rows, *given, **named)

    monkeypatch.setattr(TritonRows, "_launch", noted)
    for stride in (157, 192):
        monkeypatch.setattr(workspace, "_row_stride", lambda *_, stride=stride: stride)
        assert_close(run(problem, terms, chunk_tokens=8, student_rule=rules[0]), oracle)
    assert strides == {((157, 1), (157, 1)), ((192, 1), (192, 1))}


def on_device(problem: Problem, device: torch.device) -> Problem:
    return Problem(**{name: value.to(device) for name, value in vars(problem).items()})


@pytest.mark.parametrize("name", NAMES)
def test_equal_models_leave_exactly_nothing(name: str, device: torch.device) -> None:
    (student,) = on(device, logit_pair(4, 5000, spread=5.0)[0])
    given = {"divergence": name, "temperature": 2.0}
    value, gradient = solved(student, DenseLogits(student.clone()), UPSTREAM.to(device), **given)
    assert not value.any()
    assert not gradient.any()


@pytest.mark.parametrize("name", NAMES)
def test_forbidden_columns_and_rows_that_do_not_count(name: str, device: torch.device) -> None:
    student, teacher = on(device, *logit_pair(4, 200))
    teacher[:, 7:20] = -torch.inf
    student[:, 15:30] = -torch.inf
    student[2] = torch.nan
    value, gradient = solved(student, DenseLogits(teacher), UPSTREAM.to(device), divergence=name)
    counted = torch.tensor([0, 1, 3], device=device)
    assert value[counted].isfinite().all()
    assert gradient.isfinite().all()
    assert not gradient[2].any()
    assert value[2].isnan()


def test_a_student_without_probability_adds_nothing_to_reverse_kl(device: torch.device) -> None:
    student, teacher = on(device, *logit_pair(4, 200))
    given = {"divergence": "reverse_kl", "support": "dense"}
    student[:, 15:30] = -100.0
    oracle = expected(student, DenseLogits(teacher), UPSTREAM.to(device), **given)
    student[:, 15:30] = -torch.inf
    value, gradient = solved(student, DenseLogits(teacher), UPSTREAM.to(device), **given)
    torch.testing.assert_close(value.double(), oracle[0], rtol=1e-6, atol=0)
    assert row_error(gradient, oracle[1]) < 1e-6


def test_the_gradient_may_take_the_place_of_the_logits(device: torch.device) -> None:
    student, teacher = on(device, *logit_pair(4, 5000, dtype=torch.bfloat16))
    for given in ({}, {"top_k": 9}):
        _, gradient = solved(
            student, DenseLogits(teacher), UPSTREAM.to(device), divergence="forward_kl", **given
        )
        leaf = student.clone().requires_grad_()
        logits = leaf + 0
        value = token_divergence(
            logits, DenseLogits(teacher), divergence="forward_kl", overwrite_logits=True, **given
        )
        (over,) = torch.autograd.grad(value, leaf, UPSTREAM.to(device))
        # Values formed beforehand are rounded before they are multiplied.
        torch.testing.assert_close(over, gradient, rtol=2**-6, atol=1e-9)


@pytest.mark.parametrize("turned", ["student", "teacher"])
def test_columns_that_are_not_next_to_each_other(turned: str) -> None:
    # Read by the chunked executor, which asks nothing of strides.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    student, teacher = on(device, *logit_pair(4, 70))
    given = {"divergence": "js_divergence", "support": "dense"}
    oracle = expected(student, DenseLogits(teacher), UPSTREAM.to(device), **given)
    if turned == "student":
        student = student.t().contiguous().t()
    else:
        teacher = teacher.t().contiguous().t()
    value, gradient = solved(student, DenseLogits(teacher), UPSTREAM.to(device), **given)
    torch.testing.assert_close(value.double(), oracle[0], rtol=1e-6, atol=0)
    assert row_error(gradient, oracle[1]) < 1e-6


def test_a_strided_matrix_and_a_shard_with_padding(device: torch.device) -> None:
    student, teacher = on(device, *logit_pair(4, 400))
    student[:, 390:] = torch.nan
    teacher[:, 390:] = 1e4
    shard, given = VocabShard(390, 0, 400), {"divergence": "reverse_kl"}
    value, gradient = solved(
        student, DenseLogits(teacher), UPSTREAM.to(device), shard=shard, **given
    )
    oracle = expected(
        student[:, :390],
        DenseLogits(teacher[:, :390]),
        UPSTREAM.to(device),
        support="dense",
        **given,
    )
    torch.testing.assert_close(value.double(), oracle[0], rtol=1e-6, atol=0)
    assert row_error(gradient[:, :390], oracle[1]) < 1e-6
    assert not gradient[:, 390:].any()


def test_parts_of_the_tokens_have_sums_of_their_own(device: torch.device) -> None:
    problem = Problem.random(tokens=19, vocab=301, seed=3)
    ids = torch.arange(19) % 3
    _, report = fused_linear_objective(
        *on(device, problem.hidden_NH.requires_grad_(), problem.weight_GH),
        HiddenState(*on(device, problem.teacher_hidden, problem.teacher_weight)),
        problem.labels_N.to(device),
        ce_weights=problem.ce_weights_N.to(device),
        kd_weights=problem.kd_weights_N.to(device),
        terms=[Term(), Term("reverse_kl", 0.5)],
        chunk_tokens=8,
        partition=Partition(ids.to(device), 3),
    )
    for part in range(3):
        is_mine = ids == part
        own = problem.with_weights(problem.ce_weights_N * is_mine, problem.kd_weights_N * is_mine)
        answer = solve(own)
        for name in ("ce", "teacher_ce", "student_entropy", "top1_agreement"):
            expected = float(answer.report[name])
            assert float(report[name][1 + part]) == pytest.approx(expected, rel=2e-6), name
        found_kl = float(report["forward_kl"][1 + part])
        assert found_kl == pytest.approx(float(answer.report["kd"]), rel=2e-6)
    whole = float(report["reverse_kl"][0])
    assert float(report["reverse_kl"][1:].sum()) == pytest.approx(whole, rel=2e-6)

"""Losses per chunk between tokenizers: oracles in fp32 and fp64, equal models, masks, layouts of
rows and columns, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_distill.losses import AlignedSide, cross_tokenizer_divergence
from megatron_distill.ops import VocabShard
from megatron_distill.ops.aligned.projected_rows import SparseMatrix
from megatron_distill.signals import HiddenState
from tests.reference.cross_tokenizer import AlignedProblem, Alignment
from tests.reference.distillation import row_error
from tests.support.aligned_losses import (
    DIVERGENCES,
    FORMS,
    SIZES,
    Loss,
    divergence,
    gradient_of,
    identity_rows,
    loss_of,
    map_rows,
    oracle,
)

EACH = pytest.mark.parametrize("form", FORMS)
# Every divergence and every form that takes one, every other one of the former with each form; the
# temperatures by turns.
CASES = [
    (form, *divergence, (1.0, 2.0)[(number + row) % 2])
    for number, form in enumerate(("likelihood", "common", "top_k", "projection", "gold"))
    for row, divergence in enumerate(DIVERGENCES[number % 2 :: 2])
]
# Its head and tail are of classes in an order, which chunk means and texts have not. The class of
# further tokens is in the head for the smaller shares, and in the tail of some chunks for 0.8.
ORDERED = ("common", "top_k")
CASES += [
    (form, "adaptive_kl", {"adaptive_alpha": alpha}, temperature)
    for form in ORDERED
    for alpha, temperature in ((0.2, 2.0), (0.5, 1.0), (0.8, 2.0))
]
CASES += [("published", "forward_kl", {}, 1.0), ("published", "reverse_kl", {}, 2.0)]
CASES += [("uld", "forward_kl", {}, 1.0), ("uld", "forward_kl", {}, 2.0)]


def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    """Values, and the gradient of their weighted sum."""
    leaf = at.clone().requires_grad_()
    values = function(leaf)
    return values.detach(), gradient_of(values, leaf)


def assert_oracle(problem: AlignedProblem, loss: Loss, tolerance: float = 1e-6) -> None:
    student, teacher = problem.logits
    values, found = gradient(lambda z: divergence(z, teacher, problem.at, loss), student)
    expected, answer = gradient(lambda z: oracle(z, teacher, problem.at, loss), student.double())
    torch.testing.assert_close(values.double(), expected, rtol=tolerance, atol=0)
    assert row_error(found, answer) < tolerance


@pytest.mark.parametrize(("form", "name", "parameters", "temperature"), CASES)
def test_values_and_gradients_equal_the_oracle(
    form: str, name: str, parameters: dict[str, float], temperature: float
) -> None:
    exact = 1e-7 if FORMS[form]["alignment"] == "projection" else 1e-11  # a map's weights are fp32
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, exact)):
        problem = AlignedProblem.random(seed=4, dtype=dtype)
        loss = loss_of(form, problem, name, temperature=temperature, **parameters)
        assert_oracle(problem, loss, tolerance)


@pytest.mark.parametrize(
    ("form", "name", "changed"),
    [
        ("common", "reverse_kl", {}),
        ("common", "adaptive_kl", {}),
        ("top_k", "reverse_kl", {}),
        ("gold", "reverse_kl", {"uncommon_top_k": 5}),
        ("gold", "reverse_kl", {"uncommon_top_k": 256}),
    ],
)
def test_every_vocabulary_may_be_common(form: str, name: str, changed: dict[str, int]) -> None:
    """Without further tokens in one vocabulary, both are normalised over the common ones."""
    problem = AlignedProblem.random(common_tokens=61)
    assert_oracle(problem, loss_of(form, problem, name, **changed))


def of_one_tokenizer(problem: AlignedProblem) -> Alignment:
    at = problem.at
    return Alignment(
        at.student_chunks, at.student_chunks, at.student_labels, at.student_labels, at.count
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_models_with_one_tokenizer_have_no_loss(dtype: torch.dtype) -> None:
    problem = AlignedProblem.random(dtype=dtype)
    student, _ = problem.logits
    at, every = of_one_tokenizer(problem), torch.arange(83)
    some = every[torch.randperm(83)[:50]]
    forms: list[dict[str, Any]] = [{"alignment": "likelihood", "temperature": 3.0}]
    forms += [{"alignment": "projection", "top_k": k} for k in (5, None)]
    forms += [{"alignment": "gold", "common_ids": (ids, ids)} for ids in (every, some)]
    forms += [
        {"alignment": "common", "common_ids": (ids, ids), "top_k": k}
        for ids in (every, some)
        for k in (None, 5)
    ]
    losses = [{"alignment": "uld", "divergence": "forward_kl", "uncommon_top_k": 9}]
    for name, parameters in DIVERGENCES if dtype is torch.float32 else DIVERGENCES[:3]:
        losses += [{"divergence": name, "temperature": 2.0, **parameters, **one} for one in forms]
    losses += [
        {"divergence": "adaptive_kl", **one} for one in forms if one["alignment"] == "common"
    ]
    for loss in losses:
        if loss["alignment"] == "projection":
            loss["map_rows"] = identity_rows(83)
        values, found = gradient(lambda z, one=loss: divergence(z, student, at, one), student)
        assert not values.any(), loss
        assert float(found.abs().max()) < 1e-5, loss


@settings(max_examples=10, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 30.0]),
    st.booleans(),
    st.sampled_from([*(name for name, _ in DIVERGENCES), "adaptive_kl"]),
)
def test_losses_are_never_negative(seed: int, noise: float, same: bool, name: str) -> None:
    """From equal to unrelated models, of one tokenizer or of two, with sure models among them."""
    problem = AlignedProblem.random(5, sizes=(23, 23), common_tokens=15, seed=seed)
    student, teacher = problem.logits
    at = problem.at
    forms = ORDERED if name == "adaptive_kl" else [form for form in FORMS if form != "published"]
    losses = [loss_of(form, problem, name) for form in forms]
    if same:
        at, teacher = of_one_tokenizer(problem), student + noise * torch.randn(student.shape)
        ids = problem.ids[0]
        same_ids = {"common_ids": (ids, ids), "map_rows": identity_rows(23)}
        losses = [loss | {key: same_ids[key] for key in same_ids if key in loss} for loss in losses]
    else:
        student = student * noise
    for loss in losses:
        values, found = gradient(lambda z, of=loss: divergence(z, teacher, at, of), student)
        assert bool((values >= 0).all()), loss
        assert bool(values.isfinite().all()), loss
        assert bool(found.isfinite().all()), loss


@EACH
def test_only_predictors_of_labels_count(form: str) -> None:
    problem = AlignedProblem.random()
    student, teacher = problem.logits
    at, loss = problem.at, loss_of(form, problem)
    outside, inside = at.student_chunks == -1, at.student_chunks >= 0
    values, found = gradient(lambda z: divergence(z, teacher, at, loss), student)
    changed, changed_teacher = student.clone(), teacher.clone()
    changed[outside] = torch.nan
    changed_teacher[at.teacher_chunks == -1] = torch.inf
    again, gradients = gradient(lambda z: divergence(z, changed_teacher, at, loss), changed)
    assert torch.equal(again, values)
    assert torch.equal(gradients, found)
    assert not found[outside].any()
    moved = student.clone()
    moved[inside] = moved[inside].roll(1, 1) * 1.1
    assert not torch.equal(divergence(moved, teacher, at, loss), values)


@EACH
def test_chunks_without_rows_on_a_side_have_no_loss(form: str) -> None:
    problem = AlignedProblem.random()
    lost = problem.at.teacher_chunks.masked_fill(problem.at.teacher_chunks == 3, -1)
    problem = replace(problem, at=replace(problem.at, teacher_chunks=lost))
    student, teacher = problem.logits
    loss = loss_of(form, problem)
    assert_oracle(problem, loss)
    assert divergence(student, teacher, problem.at, loss)[3] == 0


@EACH
def test_layout_of_rows_and_columns_changes_nothing(form: str) -> None:
    """Tiles of any size, rows of two samples in turns, padded columns, a teacher with a head."""
    problem = AlignedProblem.random()
    student, teacher = problem.logits
    at, loss = problem.at, loss_of(form, problem)
    values, found = gradient(lambda z: divergence(z, teacher, at, loss, tile_tokens=1000), student)
    for tile_tokens in (1, 2, 5):
        again, gradients = gradient(
            lambda z, size=tile_tokens: divergence(z, teacher, at, loss, tile_tokens=size), student
        )
        torch.testing.assert_close(again, values, rtol=1e-6, atol=0)
        torch.testing.assert_close(gradients, found, rtol=1e-6, atol=1e-8)
    order = torch.randperm(len(student), generator=torch.Generator().manual_seed(1))
    # Rows of one chunk stay in order, as tokens of one text do.
    order = order[at.student_chunks[order].argsort(stable=True)]
    shuffled = replace(
        at, student_chunks=at.student_chunks[order], student_labels=at.student_labels[order]
    )
    again = divergence(student[order], teacher, shuffled, loss)
    torch.testing.assert_close(again, values, rtol=1e-6, atol=0)
    pad = torch.nn.functional.pad
    shards = VocabShard(83, 0, 96), VocabShard(61, 0, 64)
    again, gradients = gradient(
        lambda z: divergence(
            z, pad(teacher, (0, 3), value=torch.nan), at, loss, tile_tokens=1000, shards=shards
        ),
        pad(student, (0, 13), value=torch.inf),
    )
    torch.testing.assert_close(again, values, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients[:, :83], found, rtol=1e-6, atol=1e-8)
    assert not gradients[:, 83:].any()
    with_head = cross_tokenizer_divergence(
        student,
        HiddenState(problem.teacher_hidden, problem.teacher_weight),
        **loss,
        student=AlignedSide(at.student_chunks, at.student_labels),
        teacher_side=AlignedSide(at.teacher_chunks, at.teacher_labels),
        chunks=at.count,
    )
    torch.testing.assert_close(with_head, values, rtol=1e-5, atol=1e-6)


@EACH
def test_weight_zero_stops_a_chunk_that_is_not_finite(form: str) -> None:
    problem = AlignedProblem.random()
    student, teacher = problem.logits
    student = student.index_fill(0, (problem.at.student_chunks == 0).nonzero()[0], torch.nan)
    leaf = student.clone().requires_grad_()
    values = divergence(leaf, teacher, problem.at, loss_of(form, problem))
    assert bool(values[0].isnan())
    values[1:].sum().backward()
    assert bool(leaf.grad.isfinite().all())
    assert bool(leaf.grad.any())


def test_equal_probabilities_take_places_by_lowest_id() -> None:
    """Three equal uncommon tokens and k = 2: the first two have the slope."""
    student = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    teacher = torch.tensor([[5.0, 0.0, 0.0]])
    at = Alignment(*[torch.tensor([0])] * 4, count=1)
    loss = {"alignment": "uld", "divergence": "forward_kl", "uncommon_top_k": 2}
    _, found = gradient(lambda z: divergence(z, teacher, at, loss), student)
    q = student.double().softmax(1).squeeze(0)
    slopes = torch.tensor([0.0, -1.0, 1.0, 0.0], dtype=torch.float64)
    expected = q * (slopes - (q * slopes).sum())
    torch.testing.assert_close(found.double().squeeze(0), expected, rtol=1e-6, atol=1e-8)


def test_both_ways_to_project_give_the_same() -> None:
    """Entries are added on a CPU, and summed by segments on other devices."""
    offsets, ids, weights = map_rows((83, 61))
    columns = torch.arange(83).repeat_interleave(offsets.diff())
    values = torch.rand(5, 83)
    for entries in (
        SparseMatrix.of(columns, ids, weights, 61),
        SparseMatrix.of(ids, columns, weights, 83),
    ):
        part = values[:, : len(entries.lengths)] if len(entries.lengths) == 83 else values
        torch.testing.assert_close(entries.by_adding(part), entries.by_segments(part))


def refused_losses() -> list[tuple[str, dict[str, Any], str]]:
    ids = AlignedProblem.random().ids
    none = ids[0][:0], ids[1][:0]
    offsets, targets, weights = map_rows(SIZES)
    return [
        ("gold", {"divergence": "adaptive_kl"}, "adaptive_kl is not defined with alignment 'gold'"),
        ("likelihood", {"temperature": 0}, "temperature of likelihood is 0; it must be positive"),
        ("common", {"common_ids": none}, "no common token"),
        ("gold", {"common_ids": none}, "no common token; use a loss that compares texts"),
        ("common", {"common_ids": (ids[0], ids[1] + 40)}, "teacher_ids has ids from .* has 61"),
        ("common", {"common_ids": (ids[0].clamp(max=20), ids[1])}, "student_ids repeats an id"),
        ("published", {"divergence": "js_divergence"}, "published projection is defined for forw"),
        ("uld", {"uncommon_top_k": 0}, "uncommon_top_k is 0; it must be at least 1"),
        ("projection", {"map_rows": (offsets[:-1], targets, weights)}, "have 83 entries; .* 84"),
        (
            "projection",
            {"map_rows": (offsets, targets + 30, weights)},
            "teacher ids from .* has 61",
        ),
        ("projection", {"map_rows": (offsets, targets, weights[1:])}, "end at .*; the three must"),
    ]


@pytest.mark.parametrize(("form", "changed", "message"), refused_losses())
def test_losses_that_are_not_defined_are_refused(
    form: str, changed: dict[str, Any], message: str
) -> None:
    problem = AlignedProblem.random()
    with pytest.raises(ValueError, match=message):
        divergence(*problem.logits, problem.at, loss_of(form, problem) | changed)


def test_rows_that_do_not_fit_are_refused() -> None:
    problem = AlignedProblem.random()
    student, teacher = problem.logits
    at, loss = problem.at, loss_of("likelihood", problem)
    with pytest.raises(ValueError, match="student_chunks has numbers from -1 to 10 for 5 chunks"):
        divergence(student, teacher, replace(at, count=5), loss)
    with pytest.raises(ValueError, match="teacher_chunks has .* rows for .* tokens"):
        divergence(student, teacher[1:], at, loss)
    with pytest.raises(ValueError, match="labels of the teacher in chunks are from"):
        divergence(student, teacher, replace(at, teacher_labels=at.teacher_labels + 61), loss)
    with pytest.raises(ValueError, match="teacher has 61 vocabulary columns on this rank"):
        divergence(student, teacher, at, loss, shards=(None, VocabShard(64, 0, 64)))

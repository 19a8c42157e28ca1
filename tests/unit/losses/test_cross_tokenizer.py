"""Losses per chunk between tokenizers: oracles, finite differences, the laws of a divergence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_distill.losses import AlignedSide, cross_tokenizer_divergence
from megatron_distill.ops import VocabShard
from megatron_distill.signals import HiddenState
from tests.reference import cross_tokenizer as oracles
from tests.reference.cross_tokenizer import AlignedProblem, Alignment
from tests.reference.distillation import row_error
from tests.support.aligned_losses import DIVERGENCES, divergence


@dataclass(frozen=True)
class LikelihoodLoss:
    divergence: str = "forward_kl"
    temperature: float = 1.0
    parameters: Mapping[str, float] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"alignment": "likelihood", **_plain(self)}


@dataclass(frozen=True)
class CommonLoss:
    student_ids: Tensor
    teacher_ids: Tensor
    divergence: str = "forward_kl"
    temperature: float = 1.0
    top_k: int | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        ids = self.student_ids, self.teacher_ids
        return {"alignment": "common", "common_ids": ids, "top_k": self.top_k, **_plain(self)}


Loss = LikelihoodLoss | CommonLoss


def _plain(loss: Loss) -> dict[str, Any]:
    return {
        "divergence": loss.divergence,
        "temperature": loss.temperature,
        **loss.parameters,
    }


def oracle(student: Tensor, teacher: Tensor, at: Alignment, loss: Loss) -> Tensor:
    if isinstance(loss, LikelihoodLoss):
        return oracles.likelihood(
            student, teacher, at, loss.divergence, loss.temperature, **loss.parameters
        )
    ids = (loss.student_ids, loss.teacher_ids)
    temperature, top_k = loss.temperature, loss.top_k
    return oracles.common(
        student, teacher, at, ids, loss.divergence, temperature, top_k, **loss.parameters
    )


def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    """Values, and the gradient of their sum with weights 1, 2, 3..."""
    leaf = at.clone().requires_grad_()
    values = function(leaf)
    upstream = torch.arange(1, len(values) + 1, dtype=values.dtype)
    (found,) = torch.autograd.grad(values, leaf, upstream)
    return values.detach(), found


def losses(problem: AlignedProblem) -> list[Loss]:
    """Both losses in their forms, with forward KL."""
    return [
        LikelihoodLoss(),
        CommonLoss(*problem.ids),
        CommonLoss(*problem.ids, top_k=5),
    ]


@pytest.mark.parametrize("number", range(3), ids=["likelihood", "common", "top_k"])
@pytest.mark.parametrize(("name", "parameters"), DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_values_and_gradients_equal_the_oracle(
    name: str, parameters: dict[str, float], number: int, temperature: float
) -> None:
    problem = AlignedProblem.random(seed=number)
    student, teacher = problem.logits
    loss = losses(problem)[number]
    loss = replace(loss, divergence=name, parameters=parameters, temperature=temperature)
    values, found = gradient(lambda z: divergence(z, teacher, problem.at, loss), student)
    expected, answer = gradient(lambda z: oracle(z, teacher, problem.at, loss), student.double())
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=0)
    assert row_error(found, answer) < 1e-6


def test_every_vocabulary_may_be_common() -> None:
    """Without further tokens in one vocabulary, both are normalised over the common ones."""
    problem = AlignedProblem.random(sizes=(83, 61), common_tokens=61)
    student, teacher = problem.logits
    for top_k in (None, 5):
        loss = CommonLoss(*problem.ids, divergence="reverse_kl", top_k=top_k)
        values, found = gradient(
            lambda z, one=loss: divergence(z, teacher, problem.at, one), student
        )
        expected, answer = gradient(
            lambda z, one=loss: oracle(z, teacher, problem.at, one), student.double()
        )
        torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=0)
        assert row_error(found, answer) < 1e-6


@pytest.mark.parametrize("number", range(3), ids=["likelihood", "common", "top_k"])
def test_gradients_are_finite_differences(number: int) -> None:
    problem = AlignedProblem.random(2, sizes=(7, 6), common_tokens=5, dtype=torch.float64)
    student, teacher = problem.logits
    loss = replace(losses(problem)[number], divergence="js_divergence")
    if isinstance(loss, CommonLoss) and loss.top_k is not None:
        loss = replace(loss, top_k=3)
    assert torch.autograd.gradcheck(
        lambda z: divergence(z, teacher, problem.at, loss), student.clone().requires_grad_()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_models_with_one_tokenizer_have_no_loss(dtype: torch.dtype) -> None:
    problem = AlignedProblem.random(dtype=dtype)
    student, _ = problem.logits
    chunks, labels, every = problem.at.student_chunks, problem.at.student_labels, torch.arange(83)
    at = Alignment(chunks, chunks, labels, labels, problem.at.count)
    some = every[torch.randperm(83)[:50]]
    for ids in (every, some):
        for name, _ in DIVERGENCES:
            forms: list[Loss] = [
                LikelihoodLoss(name),
                LikelihoodLoss(name, temperature=3.0),
                CommonLoss(ids, ids, name, temperature=2.0),
                CommonLoss(ids, ids, name, top_k=5),
            ]
            for loss in forms:
                values, found = gradient(
                    lambda z, one=loss: divergence(z, student, at, one), student
                )
                assert not values.any(), loss
                assert not found.isnan().any()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 30.0]), st.booleans())
def test_losses_are_never_negative(seed: int, noise: float, same: bool) -> None:
    """From equal to unrelated models, of one tokenizer or of two, with sure models among them."""
    problem = AlignedProblem.random(5, sizes=(23, 23), common_tokens=15, seed=seed)
    student, teacher = problem.logits
    at = problem.at
    if same:
        chunks, labels = at.student_chunks, at.student_labels
        at = Alignment(chunks, chunks, labels, labels, at.count)
        teacher = student + noise * torch.randn(student.shape)
    else:
        student = student * noise
    for loss in losses(problem):
        for name, _ in DIVERGENCES:
            values = divergence(student, teacher, at, replace(loss, divergence=name))
            assert bool((values >= 0).all()), (loss, name)
            assert bool(values.isfinite().all()), (loss, name)


def test_only_predictors_of_labels_count() -> None:
    problem = AlignedProblem.random()
    student, teacher = problem.logits
    at = problem.at
    outside, inside = at.student_chunks == -1, at.student_chunks >= 0
    for loss in losses(problem):
        values, found = gradient(lambda z, one=loss: divergence(z, teacher, at, one), student)
        changed, changed_teacher = student.clone(), teacher.clone()
        changed[-1] = changed[-1].flip(0)
        changed_teacher[-1] = changed_teacher[-1].flip(0)
        assert torch.equal(divergence(changed, changed_teacher, at, loss), values)
        changed[outside] = torch.nan
        changed_teacher[at.teacher_chunks == -1] = torch.inf
        again, gradients = gradient(
            lambda z, one=loss, other=changed_teacher: divergence(z, other, at, one), changed
        )
        assert torch.equal(again, values)
        assert torch.equal(gradients, found)
        assert not found[outside].any()
        moved = student.clone()
        moved[inside] = moved[inside].flip(1)
        assert not torch.equal(divergence(moved, teacher, at, loss), values)


def test_chunks_without_rows_on_a_side_have_no_loss() -> None:
    problem = AlignedProblem.random()
    student, teacher = problem.logits
    lost = problem.at.teacher_chunks.masked_fill(problem.at.teacher_chunks == 3, -1)
    at = replace(problem.at, teacher_chunks=lost)
    for loss in losses(problem):
        values, found = gradient(lambda z, one=loss: divergence(z, teacher, at, one), student)
        whole = divergence(student, teacher, problem.at, loss)
        assert values[3] == 0
        assert not found[at.student_chunks == 3].any()
        assert torch.equal(values[4:], whole[4:])


def test_padded_columns_are_never_read() -> None:
    problem = AlignedProblem.random()
    student, teacher = problem.logits
    padding = torch.nn.functional.pad
    shards = VocabShard(83, 0, 96), VocabShard(61, 0, 64)
    for loss in losses(problem):
        values, found = gradient(
            lambda z, one=loss: divergence(
                z, padding(teacher, (0, 3), value=torch.nan), problem.at, one, shards=shards
            ),
            padding(student, (0, 13), value=torch.inf),
        )
        expected, answer = gradient(
            lambda z, one=loss: divergence(z, teacher, problem.at, one), student
        )
        assert torch.equal(values, expected)
        torch.testing.assert_close(found[:, :83], answer, rtol=1e-6, atol=1e-9)
        assert not found[:, 83:].any()


def test_tiles_of_any_size_give_the_same() -> None:
    problem = AlignedProblem.random()
    student, teacher = problem.logits
    for loss in losses(problem):
        values, found = gradient(
            lambda z, one=loss: divergence(z, teacher, problem.at, one, tile_tokens=1000), student
        )
        for tile_tokens in (1, 2, 5):
            again, gradients = gradient(
                lambda z, one=loss, size=tile_tokens: divergence(
                    z, teacher, problem.at, one, tile_tokens=size
                ),
                student,
            )
            torch.testing.assert_close(again, values, rtol=1e-7, atol=0)
            torch.testing.assert_close(gradients, found, rtol=1e-6, atol=1e-9)


def test_interleaved_rows_of_samples_give_the_same() -> None:
    """Rows of two samples in turns, as in the layout [s, b, H]."""
    problem = AlignedProblem.random()
    student, teacher = problem.logits
    at = problem.at
    order = torch.randperm(len(student), generator=torch.Generator().manual_seed(1))
    # Rows of one chunk stay in order, as tokens of one text do.
    order = order[at.student_chunks[order].argsort(stable=True)]
    shuffled = replace(
        at, student_chunks=at.student_chunks[order], student_labels=at.student_labels[order]
    )
    for loss in losses(problem):
        values = divergence(student, teacher, at, loss)
        torch.testing.assert_close(
            divergence(student[order], teacher, shuffled, loss), values, rtol=1e-6, atol=0
        )


def test_weight_zero_stops_a_chunk_that_is_not_finite() -> None:
    problem = AlignedProblem.random()
    student, teacher = problem.logits
    student = student.index_fill(0, (problem.at.student_chunks == 0).nonzero()[0], torch.nan)
    for loss in losses(problem):
        leaf = student.clone().requires_grad_()
        values = divergence(leaf, teacher, problem.at, loss)
        assert bool(values[0].isnan())
        values[1:].sum().backward()
        assert leaf.grad is not None
        assert bool(leaf.grad.isfinite().all())
        assert bool(leaf.grad.any())


def test_a_teacher_may_be_hidden_states_with_a_head() -> None:
    problem = AlignedProblem.random()
    student, teacher = problem.logits
    for loss in losses(problem):
        found = cross_tokenizer_divergence(
            student,
            HiddenState(problem.teacher_hidden, problem.teacher_weight),
            **loss.arguments,
            student=AlignedSide(problem.at.student_chunks, problem.at.student_labels),
            teacher_side=AlignedSide(problem.at.teacher_chunks, problem.at.teacher_labels),
            chunks=problem.at.count,
        )
        expected = divergence(student, teacher, problem.at, loss)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_numbers_of_the_hand_checked_examples() -> None:
    """A chunk of three teacher tokens, and the teacher's top-k with its rest."""

    def logs(*rows: list[float]) -> Tensor:
        return torch.tensor(rows).log()

    student = logs([0.1, 0.5, 0.2, 0.2])
    digits = logs([0.05, 0.05, 0.8, 0.1], [0.6, 0.2, 0.1, 0.1], [0.2, 0.5, 0.2, 0.1])
    zero = torch.tensor([0])
    at = Alignment(zero, zero.repeat(3), zero + 1, torch.tensor([2, 0, 1]), 1)
    assert float(divergence(student, digits, at, LikelihoodLoss())) == pytest.approx(
        0.142067, abs=1e-6
    )
    student, teacher = logs([0.4, 0.3, 0.1, 0.15, 0.05]), logs([0.5, 0.2, 0.15, 0.1, 0.05])
    at, ids = Alignment(zero, zero, zero, zero, 1), torch.arange(5)
    for k, name, value in (
        (1, "forward_kl", 0.020411),
        (2, "reverse_kl", 0.032382),
        (3, "forward_kl", 0.048146),
        (None, "reverse_kl", 0.052655),
    ):
        loss = CommonLoss(ids, ids, name, top_k=k)
        assert float(divergence(student, teacher, at, loss)) == pytest.approx(value, abs=1e-6)


def test_wrong_input_is_refused() -> None:
    problem = AlignedProblem.random()
    student, teacher = problem.logits
    at, ids = problem.at, problem.ids
    with pytest.raises(ValueError, match="adaptive_kl is not defined with alignment 'common'"):
        divergence(student, teacher, at, CommonLoss(*ids, divergence="adaptive_kl"))
    with pytest.raises(ValueError, match="temperature of likelihood is 0; it must be positive"):
        divergence(student, teacher, at, LikelihoodLoss(temperature=0))
    with pytest.raises(ValueError, match="no common token"):
        divergence(student, teacher, at, CommonLoss(ids[0][:0], ids[1][:0]))
    with pytest.raises(ValueError, match="teacher_ids has ids from .* the vocabulary has 61"):
        divergence(student, teacher, at, CommonLoss(ids[0], ids[1] + 40))
    with pytest.raises(ValueError, match="student_ids repeats an id"):
        divergence(student, teacher, at, CommonLoss(ids[0].clamp(max=20), ids[1]))
    with pytest.raises(ValueError, match="student_chunks has numbers from -1 to 10 for 5 chunks"):
        divergence(student, teacher, replace(at, count=5), LikelihoodLoss())
    with pytest.raises(ValueError, match="teacher_chunks has .* rows for .* tokens"):
        divergence(student, teacher[1:], at, LikelihoodLoss())
    with pytest.raises(ValueError, match="labels of the teacher in chunks are from"):
        divergence(
            student, teacher, replace(at, teacher_labels=at.teacher_labels + 61), LikelihoodLoss()
        )
    shards = None, VocabShard(64, 0, 64)
    with pytest.raises(ValueError, match="teacher has 61 vocabulary columns on this rank"):
        divergence(student, teacher, at, LikelihoodLoss(), shards=shards)

"""Losses on chunk means between tokenizers: oracles, finite differences, hand-checked examples."""

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
from megatron_distill.ops.aligned.projected_rows import Entries
from megatron_distill.signals import HiddenState
from tests.reference import cross_tokenizer as oracles
from tests.reference.cross_tokenizer import AlignedProblem, Alignment
from tests.reference.distillation import row_error
from tests.support.aligned_losses import DIVERGENCES, divergence


@dataclass(frozen=True)
class UldLoss:
    temperature: float = 1.0
    uncommon_top_k: int = 256

    @property
    def arguments(self) -> dict[str, Any]:
        return {"alignment": "uld", "divergence": "forward_kl", **vars(self)}


@dataclass(frozen=True)
class GoldLoss:
    student_ids: Tensor
    teacher_ids: Tensor
    divergence: str = "forward_kl"
    temperature: float = 1.0
    uncommon_top_k: int = 256
    parameters: Mapping[str, float] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "alignment": "gold",
            "common_ids": (self.student_ids, self.teacher_ids),
            "divergence": self.divergence,
            "temperature": self.temperature,
            "uncommon_top_k": self.uncommon_top_k,
            **self.parameters,
        }


@dataclass(frozen=True)
class ProjectionLoss:
    row_offsets: Tensor
    row_teacher_ids: Tensor
    row_weights: Tensor
    divergence: str = "forward_kl"
    temperature: float = 1.0
    top_k: int | None = None
    published: bool = False
    parameters: Mapping[str, float] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "alignment": "projection",
            "map_rows": (self.row_offsets, self.row_teacher_ids, self.row_weights),
            "divergence": self.divergence,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "published": self.published,
            **self.parameters,
        }


Loss = ProjectionLoss | GoldLoss | UldLoss
FORMS = ["projection", "published", "gold", "uld"]


def oracle(student: Tensor, teacher: Tensor, at: Alignment, loss: Loss) -> Tensor:
    if isinstance(loss, UldLoss):
        return oracles.uld(student, teacher, at, loss.temperature, loss.uncommon_top_k)
    if isinstance(loss, ProjectionLoss):
        matrix = dense(loss, student.shape[1], teacher.shape[1])
        if loss.published:
            # The ids are of the largest logits in rows of chunks.
            inside = (at.teacher_chunks >= 0).unsqueeze(1)
            return oracles.published_projection(
                student,
                teacher.double().where(inside, -1e3),
                at,
                matrix,
                reverse=loss.divergence == "reverse_kl",
                temperature=loss.temperature,
                top_k=loss.top_k,
            )
        given, top_k = loss.parameters, loss.top_k
        return oracles.projection(
            student, teacher, at, matrix, loss.divergence, loss.temperature, top_k, **given
        )
    ids = (loss.student_ids, loss.teacher_ids)
    return oracles.gold(
        student,
        teacher,
        at,
        ids,
        loss.divergence,
        loss.temperature,
        loss.uncommon_top_k,
        **loss.parameters,
    )


def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    """Values, and the gradient of their sum with weights 1, 2, 3..."""
    leaf = at.clone().requires_grad_()
    values = function(leaf)
    upstream = torch.arange(1, len(values) + 1, dtype=values.dtype)
    (found,) = torch.autograd.grad(values, leaf, upstream)
    return values.detach(), found


def map_rows(sizes: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of one to three teacher ids in CSR form; a tenth has none, and some ids no row."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 4, sizes[:1], generator=generator)
    lengths[torch.rand(sizes[0], generator=generator) < 0.1] = 0
    reached = torch.randperm(sizes[1], generator=generator)[: sizes[1] * 3 // 4]
    ids = [reached[torch.randperm(len(reached), generator=generator)[:n]] for n in lengths.tolist()]
    weights = [0.9 * 0.1 ** torch.arange(n) for n in lengths.tolist()]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return offsets, torch.cat(ids), torch.cat([w / w.sum() for w in weights])


def dense(loss: ProjectionLoss, rows: int, columns: int) -> Tensor:
    matrix = torch.zeros(rows, columns, dtype=torch.float64)
    row = torch.arange(rows).repeat_interleave(loss.row_offsets.diff())
    matrix[row, loss.row_teacher_ids] = loss.row_weights.double()
    return matrix


def loss_named(
    form: str, problem: AlignedProblem, name: str = "forward_kl", **given: float
) -> Loss:
    if form == "uld":
        return UldLoss(uncommon_top_k=9)
    if form in ("projection", "published"):
        student, teacher = problem.logits
        rows = map_rows((student.shape[1], teacher.shape[1]))
        k = 7 if form == "projection" else 20
        return ProjectionLoss(*rows, name, top_k=k, published=form == "published", parameters=given)
    return GoldLoss(*problem.ids, name, uncommon_top_k=5, parameters=given)


CASES = [(form, name, given) for form in ("projection", "gold") for name, given in DIVERGENCES]
CASES += [("published", "forward_kl", {}), ("published", "reverse_kl", {})]
CASES += [("uld", "forward_kl", {})]


@pytest.mark.parametrize(("form", "name", "parameters"), CASES)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_values_and_gradients_equal_the_oracle(
    form: str, name: str, parameters: dict[str, float], temperature: float
) -> None:
    problem = AlignedProblem.random(seed=4)
    student, teacher = problem.logits
    loss = replace(loss_named(form, problem, name, **parameters), temperature=temperature)
    values, found = gradient(lambda z: divergence(z, teacher, problem.at, loss), student)
    expected, answer = gradient(lambda z: oracle(z, teacher, problem.at, loss), student.double())
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=0)
    assert row_error(found, answer) < 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_finite_differences(form: str) -> None:
    problem = AlignedProblem.random(4, sizes=(9, 8), common_tokens=6, dtype=torch.float64)
    student, teacher = problem.logits
    for name in ("forward_kl", "reverse_kl"):
        loss = loss_named(form, problem, name)
        assert torch.autograd.gradcheck(
            lambda z, one=loss: divergence(z, teacher, problem.at, one),
            student.clone().requires_grad_(),
            fast_mode=True,
        )


def of_one_tokenizer(problem: AlignedProblem) -> Alignment:
    at = problem.at
    return Alignment(
        at.student_chunks, at.student_chunks, at.student_labels, at.student_labels, at.count
    )


def identity_rows(size: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.arange(size + 1), torch.arange(size), torch.ones(size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_models_with_one_tokenizer_have_no_loss(dtype: torch.dtype) -> None:
    problem = AlignedProblem.random(dtype=dtype)
    student, _ = problem.logits
    at, every = of_one_tokenizer(problem), torch.arange(83)
    some = every[torch.randperm(83)[:50]]
    forms: list[Loss] = [UldLoss(uncommon_top_k=9), UldLoss(temperature=2.0)]
    for name, parameters in DIVERGENCES:
        forms += [
            ProjectionLoss(*identity_rows(83), name, 2.0, top_k=5, parameters=parameters),
            GoldLoss(some, some, name, 2.0, parameters=parameters),
        ]
    forms += [ProjectionLoss(*identity_rows(83)), GoldLoss(every, every)]
    for loss in forms:
        values, found = gradient(lambda z, one=loss: divergence(z, student, at, one), student)
        assert not values.any(), loss
        assert float(found.abs().max()) < 1e-5


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 30.0]),
    st.booleans(),
    st.sampled_from([name for name, _ in DIVERGENCES]),
)
def test_losses_are_never_negative(seed: int, noise: float, same: bool, name: str) -> None:
    """From equal to unrelated models, of one tokenizer or of two, with sure models among them."""
    problem = AlignedProblem.random(5, sizes=(23, 23), common_tokens=15, seed=seed)
    student, teacher = problem.logits
    at, losses = problem.at, [loss_named(form, problem) for form in ("projection", "gold", "uld")]
    if same:
        at, teacher = of_one_tokenizer(problem), student + noise * torch.randn(student.shape)
        losses[0] = ProjectionLoss(*identity_rows(23), top_k=6)
        losses[1] = GoldLoss(problem.ids[0], problem.ids[0])
    else:
        student = student * noise
    for loss in losses:
        one = loss if isinstance(loss, UldLoss) else replace(loss, divergence=name)
        values, found = gradient(lambda z, of=one: divergence(z, teacher, at, of), student)
        assert bool((values >= 0).all()), one
        assert bool(values.isfinite().all()), one
        assert bool(found.isfinite().all()), one


@pytest.mark.parametrize("form", FORMS)
def test_only_predictors_of_labels_count(form: str) -> None:
    problem = AlignedProblem.random()
    student, teacher = problem.logits
    at, loss = problem.at, loss_named(form, problem)
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


@pytest.mark.parametrize("form", FORMS)
def test_layout_of_rows_and_columns_changes_nothing(form: str) -> None:
    """Tiles of any size, padded columns, and a teacher given as hidden states with a head."""
    problem = AlignedProblem.random()
    student, teacher = problem.logits
    at, loss = problem.at, loss_named(form, problem)
    values, found = gradient(lambda z: divergence(z, teacher, at, loss, tile_tokens=1000), student)
    for tile_tokens in (1, 2, 5):
        again, gradients = gradient(
            lambda z, size=tile_tokens: divergence(z, teacher, at, loss, tile_tokens=size), student
        )
        torch.testing.assert_close(again, values, rtol=1e-6, atol=0)
        torch.testing.assert_close(gradients, found, rtol=1e-6, atol=1e-8)
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
        **loss.arguments,
        student=AlignedSide(at.student_chunks),
        teacher_side=AlignedSide(at.teacher_chunks),
        chunks=at.count,
    )
    torch.testing.assert_close(with_head, values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["projection", "gold", "uld", "published"])
def test_weight_zero_stops_a_chunk_that_is_not_finite(form: str) -> None:
    problem = AlignedProblem.random()
    student, teacher = problem.logits
    student = student.index_fill(0, (problem.at.student_chunks == 0).nonzero()[0], torch.nan)
    leaf = student.clone().requires_grad_()
    values = divergence(leaf, teacher, problem.at, loss_named(form, problem))
    assert bool(values[0].isnan())
    values[1:].sum().backward()
    assert leaf.grad is not None
    assert bool(leaf.grad.isfinite().all())
    assert bool(leaf.grad.any())


def test_every_vocabulary_may_be_common() -> None:
    """Without further tokens in one vocabulary, both are normalised over the common ones."""
    problem = AlignedProblem.random(sizes=(83, 61), common_tokens=61)
    student, teacher = problem.logits
    for k in (5, 256):
        loss = GoldLoss(*problem.ids, divergence="reverse_kl", uncommon_top_k=k)
        values, found = gradient(
            lambda z, one=loss: divergence(z, teacher, problem.at, one), student
        )
        expected, answer = gradient(
            lambda z, one=loss: oracle(z, teacher, problem.at, one), student.double()
        )
        torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=0)
        assert row_error(found, answer) < 1e-6


def test_equal_probabilities_take_places_by_lowest_id() -> None:
    """Three equal uncommon tokens and k = 2: the first two have the slope."""
    student = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    teacher = torch.tensor([[5.0, 0.0, 0.0]])
    at = Alignment(*[torch.tensor([0])] * 4, count=1)
    _, found = gradient(lambda z: divergence(z, teacher, at, UldLoss(uncommon_top_k=2)), student)
    q = student.double().softmax(1).squeeze(0)
    slopes = torch.tensor([0.0, -1.0, 1.0, 0.0], dtype=torch.float64)
    expected = q * (slopes - (q * slopes).sum())
    torch.testing.assert_close(found.double().squeeze(0), expected, rtol=1e-6, atol=1e-8)


def logs(*rows: list[float]) -> Tensor:
    return torch.tensor(rows).log()


# Student tokens a, b, ab, c; teacher tokens a, b, c, d; the text "abcab" as ab|c|ab and a|b|c|a|b.
EVEN = [0.25] * 4
STUDENT = logs([0.1, 0.2, 0.4, 0.3], [0.2, 0.1, 0.6, 0.1], EVEN)
TEACHER = logs(
    [0.1, 0.6, 0.2, 0.1], [0.1, 0.2, 0.6, 0.1], [0.7, 0.1, 0.1, 0.1], [0.2, 0.5, 0.2, 0.1], EVEN
)
ROWS = (
    torch.tensor([0, 1, 2, 4, 5]),
    torch.tensor([0, 1, 0, 1, 2]),
    torch.tensor([1, 1, 10 / 11, 1 / 11, 1]),
)
ZERO = torch.tensor([0])
EXAMPLE = Alignment(
    torch.tensor([0, 1, -1]), torch.tensor([-1, 0, 1, 1, -1]), ZERO.repeat(3), ZERO.repeat(5), 2
)


@pytest.mark.parametrize(
    ("k", "temperature", "name", "expected"),
    [
        (4, 1.0, "forward_kl", 2.123720),
        (4, 1.0, "reverse_kl", 0.482409),
        (4, 2.0, "forward_kl", 14.231138),
        (4, 2.0, "reverse_kl", 1.361716),
        (3, 1.0, "forward_kl", 0.153052),
        (3, 1.0, "reverse_kl", 0.377049),
        (3, 2.0, "forward_kl", 0.386654),
        (2, 1.0, "forward_kl", 0.068885),
        (2, 2.0, "reverse_kl", 0.474044),
    ],
)
def test_published_projection_of_the_example(
    k: int, temperature: float, name: str, expected: float
) -> None:
    # The example's sets of k ids are the first k: the teacher's further ones are left out.
    offsets = torch.tensor([0, 1, 2, 4, 5 if k > 2 else 4])
    entries = int(offsets[-1])
    rows = offsets, ROWS[1][:entries], ROWS[2][:entries]
    loss = ProjectionLoss(*rows, name, temperature, published=True)
    values, found = gradient(lambda z: divergence(z, TEACHER[:, :k], EXAMPLE, loss), STUDENT)
    assert float(values.mean()) == pytest.approx(expected, rel=2e-6, abs=1e-6)
    if (k, temperature, name) == (3, 1.0, "forward_kl"):
        assert values.tolist() == pytest.approx([0.359899, -0.053795], abs=1e-6)
        of_mean = found / 2 / torch.tensor([[1.0], [2.0], [1.0]])
        expected_gradient = torch.tensor(
            [
                [0.038017, 0.005983, 0.139333, -0.183333],
                [0.026363, -0.039315, 0.050454, -0.037501],
                [0.0] * 4,
            ]
        )
        torch.testing.assert_close(of_mean, expected_gradient, atol=1e-6, rtol=0)


def test_projection_of_the_example() -> None:
    """Arithmetic means over a, b, c, with the id d of the teacher renormalised away."""
    teacher = TEACHER[:, :3].log_softmax(1)
    for name, expected in (
        ("forward_kl", [0.359899, 0.141663]),
        ("reverse_kl", [0.437367, 0.127849]),
    ):
        values = divergence(STUDENT, teacher, EXAMPLE, ProjectionLoss(*ROWS, name))
        assert values.tolist() == pytest.approx(expected, abs=1e-6)


def test_gold_of_the_example() -> None:
    """Common a, b, c; uncommon ab and d at 0.4 and 0.1, then 0.6 and 0.1."""
    ids = torch.tensor([0, 1, 3]), torch.tensor([0, 1, 2])
    values = divergence(STUDENT, TEACHER, EXAMPLE, GoldLoss(*ids))
    p = torch.tensor([[0.1, 0.2, 0.6, 0.1], [0.45, 0.3, 0.15, 0.1]])
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.2, 0.1, 0.1, 0.6]])
    expected = (p * (p / q).log()).sum(1) + torch.tensor([0.3, 0.5])
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=0)


def test_equal_models_have_no_loss_where_the_published_one_has() -> None:
    rows = logs([0.7, 0.1, 0.1, 0.1], [0.2, 0.5, 0.2, 0.1])
    both = torch.tensor([0, 0])
    at = Alignment(both, both, both, both, count=1)
    for name, expected in (("forward_kl", -0.143097), ("reverse_kl", 0.180049)):
        loss = ProjectionLoss(*identity_rows(4), name, published=True)
        assert float(divergence(rows, rows, at, loss)) == pytest.approx(expected, abs=1e-6)
        assert float(divergence(rows, rows, at, replace(loss, published=False))) == 0


def test_both_ways_to_project_give_the_same() -> None:
    """Entries are added on a CPU, and summed by segments on other devices."""
    offsets, ids, weights = map_rows((83, 61))
    columns = torch.arange(83).repeat_interleave(offsets.diff())
    values = torch.rand(5, 83)
    for entries in (Entries.of(columns, ids, weights, 61), Entries.of(ids, columns, weights, 83)):
        part = values[:, : len(entries.lengths)] if len(entries.lengths) == 83 else values
        torch.testing.assert_close(entries.by_adding(part), entries.by_segments(part))


def test_wrong_input_is_refused() -> None:
    problem = AlignedProblem.random()
    student, teacher = problem.logits
    offsets, ids, weights = map_rows((83, 61))
    rows, ids_of = (offsets, ids, weights), problem.ids
    with pytest.raises(ValueError, match="published projection is defined for forward_kl and"):
        divergence(
            student,
            teacher,
            problem.at,
            ProjectionLoss(*rows, "js_divergence", published=True),
        )
    with pytest.raises(ValueError, match="adaptive_kl is not defined with alignment 'gold'"):
        divergence(student, teacher, problem.at, GoldLoss(*ids_of, divergence="adaptive_kl"))
    with pytest.raises(ValueError, match="uncommon_top_k is 0; it must be at least 1"):
        divergence(student, teacher, problem.at, UldLoss(uncommon_top_k=0))
    with pytest.raises(ValueError, match="offsets of map_rows have 83 entries; .* of 83 needs 84"):
        divergence(student, teacher, problem.at, ProjectionLoss(offsets[:-1], ids, weights))
    with pytest.raises(ValueError, match="teacher ids from .* the teacher's vocabulary has 61"):
        divergence(student, teacher, problem.at, ProjectionLoss(offsets, ids + 30, weights))
    with pytest.raises(ValueError, match="offsets end at .*; the three must be equal"):
        divergence(student, teacher, problem.at, ProjectionLoss(offsets, ids, weights[1:]))
    with pytest.raises(ValueError, match="no common token; use a loss that compares texts"):
        divergence(student, teacher, problem.at, GoldLoss(problem.ids[0][:0], problem.ids[1][:0]))

"""The loss between attention maps, against its definition in float64, one query at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import AttentionInputs, AttentionLoss, ScoreRule, features
from megatron_distill.runtime.segments import KeyRanges, Segments

LENGTH, BATCH = 11, 2
STUDENT = ScoreRule(scale=0.6, softcap=None, heads=4)
TEACHER = ScoreRule(scale=0.4, softcap=2.0, heads=6)


def some_inputs(heads: int, groups: int, size: int, seed: int, spread: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        spread * torch.randn(LENGTH, BATCH, count, size, generator=generator)
        for count in (heads, groups)
    ]


def some_weights() -> Tensor:
    weights = torch.rand(LENGTH, BATCH, generator=torch.Generator().manual_seed(3))
    weights[::4] = 0
    return weights


def some_documents() -> KeyRanges:
    """Two documents in each sequence, cut at different places."""
    return Segments(((0, 4, LENGTH), (0, 7, LENGTH))).key_ranges(None)


def one_document(window: int | None = None) -> KeyRanges:
    return Segments.whole(BATCH, LENGTH).key_ranges(window)


def defined_map(
    query: Tensor, key: Tensor, rule: ScoreRule, at: tuple[int, int], seen: list[int]
) -> Tensor:
    """The heads' mean attention of one query."""
    place, row = at
    heads, groups = query.shape[2], key.shape[2]
    chances = []
    for head in range(heads):
        scores = key[seen, row, head // (heads // groups)] @ query[place, row, head] * rule.scale
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        chances.append(scores.softmax(0))
    return torch.stack(chances).mean(0)


def defined(
    student: tuple[Tensor, Tensor], teacher: list[Tensor], weights: Tensor, visible: KeyRanges
) -> Tensor:
    terms = []
    for place in range(LENGTH):
        for row in range(BATCH):
            if not weights[place, row]:
                continue
            seen = list(range(int(visible.first_bs[row, place]), place + 1))
            p = defined_map(teacher[0].double(), teacher[1].double(), TEACHER, (place, row), seen)
            q = defined_map(*student, STUDENT, (place, row), seen)
            terms.append(weights[place, row].double() * (p * (p / q).log()).sum())
    return torch.stack(terms).sum()


def made(teacher: list[Tensor], weights: Tensor, visible: KeyRanges) -> AttentionLoss:
    inputs = AttentionInputs(*teacher, TEACHER)
    return AttentionLoss(inputs, weights, visible, STUDENT, group=None)


SMALL = 4 * 6 * BATCH * LENGTH * 3


@pytest.mark.parametrize(
    ("visible", "block"),
    [
        (one_document(), 2**26), (some_documents(), 2**26), (some_documents(), SMALL),
        (one_document(window=3), SMALL),
    ],
    ids=["causal", "documents", "documents, blocks", "window, blocks"],
)  # fmt: skip
def test_value_and_gradients_are_those_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, visible: KeyRanges, block: int
) -> None:
    monkeypatch.setattr(features, "_BLOCK_BYTES", block)  # the second: three queries
    query, key = some_inputs(4, 2, 8, 1)
    teacher, weights = some_inputs(6, 3, 5, 2), some_weights()
    loss = made(teacher, weights, visible)
    own = (query.double().requires_grad_(), key.double().requires_grad_())
    expected = defined(own, teacher, weights, visible)
    (1.7 * expected).backward()
    assert float(loss.value(query, key)) == pytest.approx(expected.item(), rel=2e-6)
    for found, leaf in zip(loss.gradients(query, key, coefficient=1.7), own, strict=True):
        assert leaf.grad.abs().max() > 0.01
        torch.testing.assert_close(found.double(), leaf.grad, atol=2e-6, rtol=1e-5)


def test_queries_that_do_not_count_may_hold_anything() -> None:
    query, key = some_inputs(4, 2, 8, 1)
    teacher, weights = some_inputs(6, 3, 5, 2), some_weights()
    found = []
    for rubbish in (0.5, torch.nan):
        query[weights == 0], teacher[0][weights == 0] = rubbish, rubbish
        loss = made(teacher, weights, some_documents())
        of_query, of_key = loss.gradients(query, key, coefficient=1.0)
        assert not of_query[weights == 0].any()
        found.append((loss.value(query, key), of_query, of_key))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_equal_maps_have_no_loss_and_no_gradient() -> None:
    query, key = some_inputs(4, 2, 8, 1)
    inputs = AttentionInputs(query.clone(), key.clone(), STUDENT)
    loss = AttentionLoss(inputs, some_weights(), one_document(), STUDENT, group=None)
    assert float(loss.value(query, key)) == pytest.approx(0.0, abs=1e-5)
    for gradient in loss.gradients(query, key, coefficient=1.0):
        assert gradient.abs().max() < 1e-5


def test_chances_that_vanish_leave_the_loss_finite() -> None:
    query, key = some_inputs(4, 2, 8, 1, spread=40.0)
    loss = made(some_inputs(6, 3, 5, 2), some_weights(), one_document())
    assert loss.value(query, key).isfinite()
    assert all(g.isfinite().all() for g in loss.gradients(query, key, coefficient=1.0))


def test_half_precision_is_computed_with_in_fp32() -> None:
    query, key = (x.bfloat16() for x in some_inputs(4, 2, 8, 1))
    teacher = [x.bfloat16() for x in some_inputs(6, 3, 5, 2)]
    loss = made(teacher, some_weights(), one_document())
    expected = defined((query.double(), key.double()), teacher, some_weights(), one_document())
    assert float(loss.value(query, key)) == pytest.approx(expected.item(), rel=2e-6)
    assert {g.dtype for g in loss.gradients(query, key, coefficient=1.0)} == {torch.bfloat16}

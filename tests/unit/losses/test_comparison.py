"""Comparisons of two models against float64 NumPy, on whole vocabularies.

Shards are in `tests/distributed/losses/test_several_teachers_tensor_parallel.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_distill.losses.comparison import (
    TokenComparison,
    compare_student,
    compare_with_ids,
    compare_with_logits,
)
from megatron_distill.ops import VocabShard, vocab_parallel_topk
from megatron_distill.signals import DenseLogits, HiddenState

_TOKENS, _SIZE = 7, 23


def _logits(seed: int) -> torch.Tensor:
    return torch.randn(_TOKENS, _SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def _softmax(logits: torch.Tensor) -> np.ndarray:
    values = logits.double().numpy()
    exponentials = np.exp(values - values.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def _reference(q: np.ndarray, p: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    with np.errstate(divide="ignore", invalid="ignore"):
        log_p, log_q = np.log(p), np.log(q)
        at_label = q[np.arange(len(q)), labels]
        onehot = np.eye(q.shape[1])[labels]
        return {
            "label_nll": -np.log(at_label),
            "brier": ((q - onehot) ** 2).sum(1),
            "student_entropy": -np.nansum(q * log_q, 1),
            "student_top": q.argmax(1),
            "confidence": q.max(1),
            "is_label": q.argmax(1) == labels,
            "teacher_top": p.argmax(1),
            "overlap": np.minimum(p, q).sum(1),
            "overlap_most": np.minimum(p, q).sum(1),
            "forward_kl": np.nansum(p * (log_p - log_q), 1),
            "reverse_kl": np.nansum(q * (log_q - log_p), 1),
            "teacher_entropy": -np.nansum(p * log_p, 1),
        }


def _assert_equal(found: TokenComparison, wanted: dict[str, np.ndarray]) -> None:
    for name, value in wanted.items():
        given = getattr(found, name)
        assert given is not None, name
        np.testing.assert_allclose(given.numpy(), value, atol=1e-12, rtol=1e-9, err_msg=name)


@pytest.mark.parametrize("chunk_tokens", [None, 2])
def test_figures_are_those_of_the_softmaxes(chunk_tokens: int | None) -> None:
    """Selected rows, in chunks of any size; padding columns and a soft-cap are left out of both."""
    student, teacher = _logits(1), _logits(2)
    teacher[3] = teacher[3].argmax() == torch.arange(_SIZE)  # equal values: the lowest id is first
    labels, rows = torch.arange(_TOKENS) * 3, torch.tensor([0, 1, 3, 6])
    padded = torch.nn.functional.pad(student, (0, 2), value=50.0)
    found = compare_with_logits(
        HiddenState(padded, torch.eye(_SIZE + 2), logit_softcap=20.0),
        DenseLogits(teacher),
        labels,
        rows,
        shard=VocabShard(_SIZE, 0, _SIZE + 2),
        chunk_tokens=chunk_tokens,
    )
    q, p = _softmax(20.0 * torch.tanh(student.double() / 20.0)), _softmax(teacher)
    _assert_equal(found, _reference(q[rows], p[rows], labels[rows].numpy()))


def test_excluded_tokens_have_no_probability() -> None:
    """Logits of -inf add nothing where both have them, and no NaN where one has them."""
    student, teacher = _logits(1), _logits(2)
    student[:, 4], teacher[:, 4], teacher[:, 5] = -torch.inf, -torch.inf, -torch.inf
    found = compare_with_logits(
        DenseLogits(student), DenseLogits(teacher), torch.full((_TOKENS,), 7), torch.arange(_TOKENS)
    )
    wanted = _reference(_softmax(student), _softmax(teacher), np.full(_TOKENS, 7))
    del wanted["reverse_kl"]
    _assert_equal(found, wanted)
    assert found.reverse_kl.isposinf().all()  # the student draws tokens that the teacher never does


def test_a_model_beside_itself() -> None:
    """No divergence, all drafts accepted, and `compare_student` has the same figures."""
    logits, labels = DenseLogits(_logits(3)), torch.arange(_TOKENS)
    rows = torch.arange(_TOKENS)
    found = compare_with_logits(logits, logits, labels, rows)
    assert not found.forward_kl.any()
    assert not found.reverse_kl.any()
    torch.testing.assert_close(found.overlap, torch.ones(_TOKENS).double(), atol=1e-14, rtol=0)
    assert found.teacher_top.equal(found.student_top)
    alone = compare_student(logits, labels, rows)
    assert alone.brier.equal(found.brier)
    assert alone.student_top.equal(found.student_top)
    assert alone.teacher_top is None
    assert alone.overlap is None


@pytest.mark.parametrize("k", [1, 5, _SIZE])
def test_a_topk_bounds_the_overlap(k: int) -> None:
    """The interval has the full value, tightens with k, and is a point at the whole vocabulary."""
    student, teacher, labels = _logits(4), _logits(5), torch.arange(_TOKENS)
    rows = torch.arange(_TOKENS)
    whole = compare_with_logits(DenseLogits(student), DenseLogits(teacher), labels, rows)
    found = compare_with_ids(
        DenseLogits(student), vocab_parallel_topk(teacher, k), labels, rows, chunk_tokens=3
    )
    assert (found.overlap <= whole.overlap + 1e-6).all()
    assert (found.overlap_most >= whole.overlap - 1e-6).all()
    q, p = _softmax(student), _softmax(teacher)
    kept = np.argsort(-p, 1)[:, :k]
    p_k, q_k = np.take_along_axis(p, kept, 1), np.take_along_axis(q, kept, 1)
    least = np.minimum(p_k, q_k).sum(1)
    most = least + np.minimum(1 - p_k.sum(1), 1 - q_k.sum(1)).clip(0)
    np.testing.assert_allclose(found.overlap.numpy(), least, atol=1e-6)
    np.testing.assert_allclose(found.overlap_most.numpy(), most, atol=1e-6)
    assert found.teacher_top.equal(whole.teacher_top)
    assert found.forward_kl is None

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
from megatron_distill.signals import DenseLogits, HiddenState, TopK

_TOKENS, _SIZE = 7, 23


def _logits(seed: int) -> torch.Tensor:
    return torch.randn(_TOKENS, _SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def _softmax(logits: torch.Tensor) -> np.ndarray:
    values = logits.double().numpy()
    exponentials = np.exp(values - values.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def _shared_ids(q: np.ndarray, p: np.ndarray, k: int) -> np.ndarray:
    """Of each token |top-k(p) and top-k(q)| / k, ties by the lowest id."""
    k = min(k, q.shape[1])
    tops = [np.argsort(-one, 1, kind="stable")[:, :k].tolist() for one in (q, p)]
    return np.array([len(set(a) & set(b)) / k for a, b in zip(*tops, strict=True)])


def _reference(q: np.ndarray, p: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    with np.errstate(divide="ignore", invalid="ignore"):
        log_p, log_q, log_m = np.log(p), np.log(q), np.log((p + q) / 2)
        divergence = (np.nansum(p * (log_p - log_m), 1) + np.nansum(q * (log_q - log_m), 1)) / 2
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
            "js_divergence": divergence,
            "js_divergence_most": divergence,
            "teacher_entropy": -np.nansum(p * log_p, 1),
            "top5_overlap": _shared_ids(q, p, 5),
            "top20_overlap": _shared_ids(q, p, 20),
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
    assert not found.js_divergence.any()
    assert (found.top5_overlap == 1).all()
    assert (found.top20_overlap == 1).all()
    torch.testing.assert_close(found.overlap, torch.ones(_TOKENS).double(), atol=1e-14, rtol=0)
    assert found.teacher_top.equal(found.student_top)
    alone = compare_student(logits, labels, rows)
    assert alone.brier.equal(found.brier)
    assert alone.student_top.equal(found.student_top)
    assert alone.teacher_top is None
    assert alone.overlap is None
    assert alone.js_divergence is None
    assert alone.top5_overlap is None


def test_the_jensen_shannon_divergence_is_symmetric_and_bounded() -> None:
    """Also of models so far apart that the KLs are infinite or hundreds of nats."""
    first, second = _logits(1), _logits(2)
    first[0], second[0] = 0.0, 0.0
    first[0, 3], second[0, 4] = 900.0, 900.0
    first[1, :12], second[1, 12:] = -torch.inf, -torch.inf
    second[2] = first[2]
    labels, rows = torch.arange(_TOKENS), torch.arange(_TOKENS)
    one, other = (
        compare_with_logits(DenseLogits(a), DenseLogits(b), labels, rows).js_divergence
        for a, b in ((first, second), (second, first))
    )
    torch.testing.assert_close(one, other, rtol=0, atol=1e-15)
    np.testing.assert_allclose(one[:2], np.log(2), rtol=0, atol=1e-12)
    assert float(one[2]) == 0.0
    assert (one >= 0).all()
    assert (one <= np.log(2) + 1e-15).all()


def test_shared_ids_of_a_small_vocabulary_and_of_equal_values() -> None:
    """Of fewer ids than 20 all are shared; of equal values the lowest ids are the first."""
    equal, labels = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    high = torch.arange(8.0).expand(2, 8)  # the first five of it are 7 to 3, of the other 0 to 4
    found = compare_with_logits(DenseLogits(equal), DenseLogits(high), labels, torch.arange(2))
    assert found.top5_overlap.tolist() == [0.4, 0.4]
    assert found.top20_overlap.tolist() == [1.0, 1.0]
    assert found.student_top.tolist() == [0, 0]
    none = compare_with_logits(
        DenseLogits(equal), DenseLogits(high), labels, torch.arange(0), chunk_tokens=4
    )
    assert none.top5_overlap.shape == none.js_divergence.shape == (0,)


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
    assert (found.js_divergence <= whole.js_divergence + 1e-6).all()
    assert (found.js_divergence_most >= whole.js_divergence - 1e-6).all()
    if k == _SIZE:
        np.testing.assert_allclose(found.js_divergence, whole.js_divergence, atol=1e-6)
        np.testing.assert_allclose(found.js_divergence_most, whole.js_divergence, atol=1e-6)
    for size, name in ((5, "top5_overlap"), (20, "top20_overlap")):
        own = getattr(found, name)
        if k >= size:
            assert own.equal(getattr(whole, name)), name
        else:
            assert own.isnan().all(), name


def test_ends_of_the_divergence_from_a_topk() -> None:
    """All further ids as one, and no further id of both models."""
    student, teacher, labels = _logits(4), _logits(5), torch.arange(_TOKENS)
    found = compare_with_ids(
        DenseLogits(student), vocab_parallel_topk(teacher, 6), labels, torch.arange(_TOKENS)
    )
    q, p = _softmax(student), _softmax(teacher)
    kept = np.argsort(-p, 1)[:, :6]
    parts = [np.take_along_axis(one, kept, 1) for one in (q, p)]
    rests = [1 - one.sum(1, keepdims=True) for one in parts]
    none = np.zeros_like(rests[0])
    joined = [np.hstack([one, rest]) for one, rest in zip(parts, rests, strict=True)]
    apart = [np.hstack([parts[0], rests[0], none]), np.hstack([parts[1], none, rests[1]])]
    zeros = np.zeros(_TOKENS, dtype=np.int64)
    for ends, name in ((joined, "js_divergence"), (apart, "js_divergence_most")):
        wanted = _reference(ends[0], ends[1], zeros)["js_divergence"]
        np.testing.assert_allclose(getattr(found, name), wanted, atol=1e-6, err_msg=name)


def test_shared_ids_of_a_topk_of_unequal_lengths() -> None:
    """A token with fewer ids than k has no figure; equal stored values stay in their order."""
    student, labels = _logits(4), torch.arange(_TOKENS)
    stored = vocab_parallel_topk(_logits(5), 8)
    log_probs = stored.log_probs.clone()
    log_probs[0, 4:], log_probs[1, 5:] = -torch.inf, -torch.inf
    log_probs[2, 3:7] = log_probs[2, 3]
    ragged = TopK(stored.ids, log_probs, stored.log_tail)
    rows = torch.arange(_TOKENS)
    found = compare_with_ids(DenseLogits(student), ragged, labels, rows)
    wanted = _shared_ids(_softmax(student), _softmax(_logits(5)), 5)
    assert found.top5_overlap[0].isnan()
    np.testing.assert_allclose(found.top5_overlap[1:], wanted[1:])

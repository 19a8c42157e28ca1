"""One step of whole models with two tokenizers: in every layout, and with every size of its
micro-batches, all gradients are those of one rank that has all samples in one micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megatron_distill.align.vocabulary_map import Evidence, VocabularyMap, VocabularySide
from megatron_distill.data.aligned.documents import AlignedDocument
from megatron_distill.data.tokenizers.open import Vocabulary
from megatron_distill.losses import ChunkTerm
from tests.distributed.aligned_steps import packed, random_side, step_of
from tests.distributed.balanced_steps import _gradients
from tests.distributed.megatron_world import (
    megatron_groups,
    objective_of,
    small_architecture,
    student_of,
    teacher_of,
)
from tests.distributed.models.test_model_layouts import Parts, _whole
from tests.distributed.pool import Pool

LENGTH, TEACHER_LENGTH, SAMPLES = 16, 24, 4
# Ids of both tokenizers.
STUDENT, TEACHER = 41, 59
TERMS = (
    ChunkTerm("likelihood", "js_divergence", weight=5.0, temperature=4.0),
    ChunkTerm("common", temperature=2.0),
    ChunkTerm("common", "adaptive_kl", weight=0.5, top_k=6),
    ChunkTerm("common", "adaptive_kl", weight=0.4, parameters={"adaptive_alpha": 0.7}),
    ChunkTerm("projection", "reverse_kl", weight=0.5, top_k=9),
    ChunkTerm("gold", weight=0.3, uncommon_top_k=12),
    ChunkTerm("uld", weight=0.7, temperature=2.0, uncommon_top_k=20),
    # All ids: a smaller top_k would choose them by micro-batch.
    ChunkTerm("projection", weight=0.1, published=True),
)


def documents() -> Iterator[AlignedDocument]:
    """Documents of random tokens in chunks of one to three tokens."""
    rng = np.random.default_rng(8)
    while True:
        sizes = (STUDENT, TEACHER)
        yield AlignedDocument(*(random_side(rng, rng.choice([1, 1, 1, 2, 3], 7), n) for n in sizes))


def taken(
    rank: int, world: int, layout: dict[str, Any], size: int, tokens_map: VocabularyMap
) -> tuple[dict[str, float], Parts]:
    """The report and the gradients of a step without the optimizer."""
    with megatron_groups(**layout) as groups:
        from megatron_distill.train.assemble.alignment import TeacherTokenizer
        from megatron_distill.train.step import run_student

        shape = small_architecture(init_std=0.2, vocab_size=STUDENT, num_kv_heads=4)
        other = small_architecture(init_std=0.3, vocab_size=TEACHER, num_kv_heads=4, num_layers=2)
        student = student_of(shape, groups, length=LENGTH, positions=SAMPLES * LENGTH, overlap=True)
        teacher, aligned = TeacherTokenizer(
            Vocabulary(TEACHER, "teacher"), TEACHER_LENGTH, None, tokens_map, "teacher"
        ).connect(
            teacher_of(other, groups, length=TEACHER_LENGTH),
            shape, Vocabulary(STUDENT, "student"), groups, torch.device("cpu"), chunk_tokens=7,
        )  # fmt: skip
        objective = objective_of(
            shape, groups, ce_weight=0.5, terms=TERMS, metrics=(), chunk_tokens=7, aligned=aligned
        )
        batch = packed(documents(), (LENGTH, TEACHER_LENGTH), SAMPLES)
        step = step_of(batch, groups, aligned.planner, size)
        assert step.chunks > step.pairs > 10
        means = run_student(
            student,
            teacher.signals(step.micro_batches),
            [objective] * len(step.micro_batches),
            step,
        )
        report = {name: float(value) for name, value in means.items()}
        return report, _gradients(student.chunks, groups)


@pytest.fixture(scope="module")
def tokens_map() -> VocabularyMap:
    """Thirty common tokens, eight of two pieces, and three that the teacher cannot spell."""
    order = np.random.default_rng(3).permutation(TEACHER)
    common, split = 30, 8
    rows = [[one] for one in order[:common]] + [list(order[at : at + 2]) for at in range(25, 33)]
    lengths = [*map(len, rows), *[0] * (STUDENT - common - split)]
    evidence = [Evidence.EXACT] * common + [Evidence.ENCODED] * split
    evidence += [Evidence.HOLE] * (STUDENT - len(evidence))
    return VocabularyMap(
        VocabularySide("student", "s", STUDENT),
        VocabularySide("teacher", "t", TEACHER),
        np.arange(common, dtype=np.int64),
        order[:common].astype(np.int64),
        np.cumsum([0, *lengths]).astype(np.int64),
        np.concatenate(rows).astype(np.int64),
        np.array([1.0] * common + [10 / 11, 1 / 11] * split, np.float32),
        np.array(evidence, np.uint8),
        np.array(lengths, np.int32),
    )


@pytest.fixture(scope="module")
def alone(pool: Pool, tokens_map: VocabularyMap) -> tuple[dict[str, float], Parts]:
    """The step of one rank."""
    (found,) = pool.run(1, taken, {}, SAMPLES, tokens_map)
    return found


LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "one rank, micro-batch 1": (1, {}, 1),
    "PP2xCP2, micro-batch 1": (4, {"pipeline": 2, "context": 2}, 1),
    "TP2xPP2, micro-batch 1": (4, {"tensor": 2, "pipeline": 2}, 1),
    "TP4+sequence, micro-batch 4": (4, {"tensor": 4, "sequence": True}, 4),
    "DP2xCP2, micro-batch 2": (4, {"context": 2}, 2),
}
QUICK = ("one rank, micro-batch 1", "TP2xPP2, micro-batch 1", "DP2xCP2, micro-batch 2")


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in LAYOUTS]
)
def test_every_gradient_is_that_of_one_rank(
    pool: Pool,
    tokens_map: VocabularyMap,
    alone: tuple[dict[str, float], Parts],
    case: str,
) -> None:
    world, layout, size = LAYOUTS[case]
    found = pool.run(world, taken, layout, size, tokens_map)
    report, expected = alone[0], _whole([alone[1]])
    assert min(report[term.name] for term in TERMS) > 1e-3
    for own, _ in found:
        assert own == pytest.approx(report, rel=2e-5)
    gradients = _whole([parts for _, parts in found])
    assert gradients.keys() == expected.keys()
    for key, gradient in expected.items():
        if gradient.shape != gradients[key].shape:  # a vocabulary with more padding
            assert not gradients[key][STUDENT:].any(), key
            assert not gradient[STUDENT:].any(), key
            gradients[key], gradient = gradients[key][:STUDENT], gradient[:STUDENT]
        largest = float(gradient.abs().max())
        assert largest > 0, key
        torch.testing.assert_close(
            gradients[key], gradient, atol=1e-4 * largest, rtol=0,
            msg=lambda text, name=key: f"{name}: {text}",
        )  # fmt: skip

"""A teacher on ranks of its own, with a tokenizer of its own, gives the course of shared ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.e2e.runs import Inputs, KnownRuns
from tests.e2e.teachers.test_teacher_ranks import (
    EXACT,
    QUANTITIES,
    SHORT,
    assert_same,
    runs_of_roles,
)


@pytest.fixture(scope="module")
def shared_ranks(pool: Pool, inputs: Inputs) -> KnownRuns:
    """Every record of runs whose models are on the same ranks."""
    return KnownRuns(pool, inputs, "shared-tokenizers", *SHORT, validations=True)


EVERY_ALIGNMENT = (
    "objective.terms=[{alignment: projection, temperature: 2.0}, {alignment: gold}, "
    "{alignment: uld}, {alignment: likelihood}, {alignment: common, top_k: 8}]"
)
CHUNK_FEATURES = (
    "objective.features=[{student: 1, teacher: 2, loss: cosine}, {student: 4, teacher: 1}]"
)
# The teacher's sequences have 24 tokens, the student's 32. Settings of this run, and of both.
OWN_TOKENS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "1 and 1": ((), ()),
    "CP2 and TP2+sequence": ((), ()),
    "PP2 and CP2": ((), (CHUNK_FEATURES,)),
    "TP2 and DP2, every alignment": ((), (EVERY_ALIGNMENT,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OWN_TOKENS)
def test_a_teacher_with_its_own_tokenizer_gives_the_losses_of_shared_ranks(
    pool: Pool, inputs: Inputs, shared_ranks: KnownRuns, tmp_path: Path, case: str
) -> None:
    own, both = OWN_TOKENS[case]
    found, expected = runs_of_roles(
        pool, inputs, shared_ranks, tmp_path, case, *both, own=own, name="aligned"
    )
    exact = EXACT if case.startswith("1 and 1") else {}
    kinds = ("likelihood", "common", "gold", "feature")
    names = [name for name in expected[0] if name.startswith(kinds)]
    assert_same(found, expected, **exact, names=(*QUANTITIES, *names))
    assert len(names) >= (6 if CHUNK_FEATURES in both else 3), expected[0]

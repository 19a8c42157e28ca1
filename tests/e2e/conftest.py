"""Fixtures of every end-to-end run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.e2e.runs import (
    ALIGNED_TERMS,
    GPT_LIKE,
    MIXTURE,
    MOE,
    SECOND_TEACHER,
    STUDENT,
    TEACHER,
    Inputs,
    train_tokenizer,
    write_corpus,
)


@pytest.fixture(scope="session")
def inputs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """One corpus, its tokenizers and the configurations that all end-to-end tests vary."""
    found = Inputs(tmp_path_factory.mktemp("e2e"))
    write_corpus(found.corpus)
    assert pool.run(1, train_tokenizer, found) == [301]
    students = {"dense": STUDENT, "gpt": GPT_LIKE, "moe": MOE, "mixture": MIXTURE}
    for name, student in students.items():
        found.write(name, student, TEACHER)
    teacher = SECOND_TEACHER.format(tokenizer=found.second_tokenizer(421))
    found.write("aligned", STUDENT, teacher, terms=ALIGNED_TERMS)
    return found


@pytest.fixture(scope="session")
def dense(inputs: Inputs) -> Path:
    """The configuration of a small dense student and its teacher."""
    return inputs.folder / "dense.yaml"

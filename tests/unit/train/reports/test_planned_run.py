"""The vocabulary of a plan where no file has its size, and the places of its teacher."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.config import load_config
from megatron_distill.train.reports.planned_run import (
    open_shapes,
    planned_run,
    teacher_places,
    vocabulary_note,
)
from tests.unit.commands.test_plan import RUN

BOTH = "student.architecture.vocab_size and teacher.architecture.vocab_size"
UNREAD = ("data.tokenizer.path=tokenizers/llama3", "data.tokenizer.train_vocab_size=null")


@pytest.mark.parametrize(
    ("changes", "sizes", "note"),
    [
        ([], (32_768, 32_768), None),
        (["student.architecture.vocab_size=null"], (300, 32_768), None),  # it is trained
        (
            [*UNREAD, "student.architecture.vocab_size=null",
             "teacher.architecture.vocab_size=null"],
            (32_768, 32_768),
            f"a vocabulary of 32,768 rows, since the tokenizer is not read for a plan; set {BOTH}",
        ),
        (
            [*UNREAD, "student.architecture.vocab_size=null",
             "teacher.architecture.vocab_size=5000"],
            (5000, 5000),
            "a vocabulary of 5,000 rows, since the tokenizer is not read for a plan; set "
            "student.architecture.vocab_size",
        ),
        (
            [*UNREAD, "teacher.architecture.vocab_size=null",
             "student.architecture.vocab_size=5000", "teacher.tokenizer.path=tokenizers/qwen3",
             "teacher.sequence_length=2048",
             "objective.terms=[{alignment: likelihood, divergence: forward_kl}]"],
            (5000, 32_768),
            "a vocabulary of 32,768 rows, since the tokenizer is not read for a plan; set "
            "teacher.architecture.vocab_size",
        ),
    ],
)  # fmt: skip
def test_an_assumed_vocabulary_is_named_with_the_keys_to_set(
    tmp_path: Path, changes: list[str], sizes: tuple[int, int], note: str | None
) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    config = load_config(tmp_path / "run.yaml", changes)
    shapes = open_shapes(config)
    assert (shapes["student"].vocab_size, shapes["teacher"].vocab_size) == sizes
    found = vocabulary_note(config.models, config.data.tokenizer, shapes)
    assert found == (None if note is None else f"Assumed: {note}")


MAPS = "objective.features=[{student: 1, teacher: 2, loss: attention}]"
STATES = "objective.features=[{student: 1, teacher: 2}]"


@pytest.mark.parametrize(
    ("changes", "places", "sends_heads"),
    [
        ([], ("shared", "own ranks"), False),
        ([STATES], ("shared", "own ranks"), False),
        ([MAPS], ("shared", "own ranks"), True),
        ([MAPS, "objective.terms=[]"], ("shared", "own ranks"), True),
        (["objective.terms=[]"], ("shared",), False),
        (["teacher=null", "objective.terms=[]"], ("none",), False),
    ],
)
def test_a_teacher_has_own_ranks_for_every_loss_that_asks_it(
    tmp_path: Path, changes: list[str], places: tuple[str, ...], sends_heads: bool
) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    config = load_config(tmp_path / "run.yaml", changes)
    assert teacher_places(config) == places
    assert planned_run(config, open_shapes(config)).sends_heads == sends_heads

"""The warning of prompts that lost tokens gives a remedy that can work."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_distill.evaluation.tasks.record import Task
from megatron_distill.train.assemble.tasks import _longer

CHOICE = {"kind": "multiple_choice", "choices": ("no", "yes")}
TEXT = {"kind": "generation", "graders": ("exact",)}
MORE = "take a model with more positions"


@pytest.mark.parametrize(
    ("task", "positions", "remedy"),
    [
        (CHOICE, 128, MORE),
        ({**CHOICE, "shots": 3}, 128, MORE),  # its examples are gone before a token is
        ({**CHOICE, "shots": 3, "truncation": "tokens"}, 128, f"lower its shots, or {MORE}"),
        (CHOICE, 64, "raise evaluation.max_length, to 128 at most"),
        (TEXT, 128, f"lower its max_new_tokens, or {MORE}"),
        (TEXT, 64, "lower its max_new_tokens, or raise evaluation.max_length, to 128 at most"),
    ],
)
def test_the_remedy_fits_the_task_and_the_model(
    task: dict[str, Any], positions: int, remedy: str
) -> None:
    record = Task(name="quiz", question="{{ q }}", answer="right", **task)
    assert _longer(record, positions, 128) == remedy

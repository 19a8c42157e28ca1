"""A run's copy of its tokenizer and settings: texts of its exports end where the run's own end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_distill.data.tokenizers.open import add_ends, end_ids, load_tokenizer, train_bpe
from megatron_distill.train.run_folder import keep_assets


@pytest.mark.parametrize(
    ("of_tokenizer", "of_student", "kept"),
    [
        ([1, 2, 3], {"eos_token_id": 1, "top_k": 5}, {"eos_token_id": [0, 1, 2, 3], "top_k": 5}),
        ([1, 2, 3], {"top_k": 5}, {"eos_token_id": [0, 1, 2, 3], "top_k": 5}),
        (
            [1, 2],
            None,
            {"bos_token_id": None, "eos_token_id": [0, 1, 2], "pad_token_id": None},
        ),
        (None, {"eos_token_id": [0, 5]}, {"eos_token_id": [0, 5]}),
        (None, {"eos_token_id": 0}, {"eos_token_id": 0}),
        (None, None, None),
    ],
)
def test_a_copy_has_the_ends_of_the_tokenizer_and_of_the_student(
    tmp_path: Path, of_tokenizer: Any, of_student: Any, kept: Any
) -> None:
    tokenizers, student = tmp_path / "tokenizer", tmp_path / "student"
    train_bpe(["some words of a text"], vocab_size=270).save(tokenizers)
    student.mkdir()
    settings = "generation_config.json"
    if of_tokenizer is not None:
        (tokenizers / settings).write_text(json.dumps({"eos_token_id": of_tokenizer}))
    if of_student is not None:
        (student / settings).write_text(json.dumps(of_student))
    tokenizer = load_tokenizer(tokenizers)
    assert tokenizer.eos_id == 0
    add_ends(tokenizer, end_ids(student))
    keep_assets(str(tmp_path / "run"), student, tokenizer)
    copy = tmp_path / "run" / "hugging_face"
    found = json.loads((copy / settings).read_text()) if (copy / settings).is_file() else None
    assert found == kept
    assert load_tokenizer(copy).end_ids == tokenizer.end_ids

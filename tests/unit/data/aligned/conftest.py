"""Tokenizers of samples that are joined with a store."""

import pytest

from megatron_distill.data.tokenizers.open import Tokenizer, train_bpe
from tests.support.tokenizer_kinds import byte_level, training_texts


@pytest.fixture(scope="module")
def student() -> Tokenizer:
    return train_bpe([text[::-1] for text in training_texts()], vocab_size=340)


@pytest.fixture(scope="module")
def teacher() -> Tokenizer:
    return byte_level()

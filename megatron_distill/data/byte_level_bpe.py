"""A byte-level BPE trained on the corpus itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import tokenizers

from megatron_distill.data.hugging_face_tokenizer import HuggingFaceTokenizer
from megatron_distill.data.tokenizer_protocol import END_OF_TEXT
from megatron_distill.errors import DataError

SMALLEST_BPE: Final = 257  # every byte and the end-of-document token


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> HuggingFaceTokenizer:
    """A byte-level BPE of at most `vocab_size` tokens; the same texts give the same tokenizer.

    It ends documents with <|endoftext|> (id 0). Fewer tokens come out where the texts hold no more
    repeated pairs. Raises DataError for fewer than 257 tokens or no text.
    """
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < SMALLEST_BPE:
        raise DataError(
            f"data.tokenizer.train_vocab_size is {vocab_size}: a byte-level vocabulary needs at "
            f"least {SMALLEST_BPE} tokens"
        )
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    counted = _CountedTexts(texts)
    model.train_from_iterator(counted, trainer=trainer)
    if counted.characters == 0:
        raise DataError("data.tokenizer.train_vocab_size: data.sources hold no text to train on")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    return HuggingFaceTokenizer(wrapped, name=f"byte-level BPE of {model.get_vocab_size()} tokens")


class _CountedTexts:
    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = iter(texts)
        self.characters = 0

    def __iter__(self) -> _CountedTexts:
        return self

    def __next__(self) -> str:
        text = next(self._texts)
        self.characters += len(text)
        return text

"""Input of the data benchmark: conversations, documents and a tokenizer, made on this machine."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from megatron_distill.data.text.files import stdlib_files
from megatron_distill.data.tokenizers.open import train_bpe

SEQUENCE_LENGTH = 2048
VOCABULARY = 16_384
_TRAINING_CHARACTERS = 6_000_000
_TURN, _END = "<|im_start|>", "<|im_end|>"
# Generation blocks, because TRL finds the responses by them.
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE on Python's sources and give it a ChatML template."""
    texts, characters = [], 0
    for text in _texts():
        texts.append(text)
        characters += len(text)
        if characters > _TRAINING_CHARACTERS:
            break
    tokenizer = train_bpe(texts, vocab_size=VOCABULARY - 2)
    own = tokenizer.hugging_face
    own.add_special_tokens({"additional_special_tokens": [_TURN, _END]})
    own.pad_token = own.eos_token
    own.chat_template = _TEMPLATE
    own.save_pretrained(folder)


def write_conversations(path: Path, size: int) -> None:
    """Write `size` bytes of conversations of one to four exchanges, as JSON lines."""
    pieces = _pieces()
    draw = random.Random(1)
    with path.open("w", encoding="ascii") as stream:
        while size > 0:
            messages = []
            for _ in range(draw.randint(1, 4)):
                messages.append({"role": "user", "content": draw.choice(pieces)[:800]})
                messages.append({"role": "assistant", "content": draw.choice(pieces)[:1600]})
            size -= stream.write(json.dumps({"messages": messages}) + "\n")


def write_documents(path: Path, size: int) -> None:
    """Write `size` bytes of documents, the sources' functions in changing order, as JSON lines."""
    pieces = _pieces()
    draw = random.Random(2)
    with path.open("w", encoding="ascii") as stream:
        while size > 0:
            text = "\n\n".join(draw.choices(pieces, k=draw.randint(1, 12)))
            size -= stream.write(json.dumps({"text": text}) + "\n")


def _texts() -> Iterator[str]:
    for path in stdlib_files():
        yield path.read_text(encoding="utf-8")


def _pieces() -> list[str]:
    return [piece for text in _texts() for piece in text.split("\n\n") if len(piece.strip()) > 20]

"""Texts, two trained tokenizers and two random models, written as Hugging Face folders."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch

__all__ = ["BATCH", "LENGTH", "MODELS", "Texts", "prepare"]

LENGTH: Final = 512  # tokens of a text, at most, in either tokenizer
BATCH: Final = 2  # texts of one step
_TRAINED_CHARACTERS: Final = 4_000_000
_TEXTS: Final = "texts.json"
_FIRST_LINE: Final = 200  # characters of the prompt, at most
# Larger than in training: distributions far from uniform.
_INIT_STD: Final = 0.05
_POSITIONS: Final = 1024


@dataclass(frozen=True)
class _Shape:
    vocabulary: int
    hidden: int
    intermediate: int
    heads: int
    layers: int
    seed: int


MODELS: Final = {
    "student": _Shape(16_384, 256, 688, 4, 4, 11),
    "teacher": _Shape(32_768, 384, 1024, 6, 4, 12),
}


@dataclass(frozen=True)
class Texts:
    """Prompts and completions of one step; only their sum is a text."""

    prompts: list[str]
    completions: list[str]

    @property
    def whole(self) -> list[str]:
        """Prompts with their completions."""
        return [a + b for a, b in zip(self.prompts, self.completions, strict=True)]

    @classmethod
    def read(cls, folder: Path) -> Texts:
        """The texts that `prepare` wrote."""
        return cls(**json.loads((folder / _TEXTS).read_text(encoding="utf-8")))


def prepare(folder: Path) -> None:
    """Write both models with their tokenizers, and the texts; folders that exist are used again."""
    import transformers

    from megatron_distill.data.tokenizers.hugging_face import train_bpe

    if (folder / _TEXTS).exists():
        return
    documents = _documents()
    for number, (name, shape) in enumerate(MODELS.items()):
        # Of different texts: else the merges of one are the first ones of the other.
        some = _some(documents[number :: len(MODELS)])
        tokenizer = train_bpe(some, vocab_size=shape.vocabulary)
        backend = tokenizer.hugging_face
        backend.pad_token = backend.eos_token
        backend.save_pretrained(folder / name)
        config = transformers.LlamaConfig(
            vocab_size=len(backend),
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            max_position_embeddings=_POSITIONS,
            initializer_range=_INIT_STD,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
        torch.manual_seed(shape.seed)
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name)
    sides = [transformers.AutoTokenizer.from_pretrained(folder / name) for name in MODELS]
    found = list(islice(_cut_texts(documents, sides), BATCH))
    prompts = [text[: text.index("\n") + 1] for text in found]
    completions = [text[len(first) :] for text, first in zip(found, prompts, strict=True)]
    content = json.dumps(asdict(Texts(prompts, completions)))
    (folder / _TEXTS).write_text(content, encoding="utf-8")


def _documents() -> list[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)
    return [path.read_text(encoding="utf-8", errors="ignore") for path in paths]


def _some(documents: Sequence[str]) -> list[str]:
    found: list[str] = []
    size = 0
    for document in documents:
        if size < _TRAINED_CHARACTERS:
            found.append(document)
            size += len(document)
    return found


def _cut_texts(documents: Sequence[str], tokenizers: Sequence[Any]) -> Iterator[str]:
    """Beginnings of long documents with as many tokens as fit, an end-of-text token included."""
    for document in documents:
        text = document[: 16 * LENGTH]
        if not 0 < text.find("\n") < _FIRST_LINE or not text.isascii():
            continue
        for tokenizer in tokenizers:
            while True:
                found = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
                offsets = found["offset_mapping"]
                if len(offsets) < LENGTH:
                    break
                text = text[: offsets[LENGTH - 2][1]]
        if len(text) < len(document) and len(text) < 16 * LENGTH:
            yield text

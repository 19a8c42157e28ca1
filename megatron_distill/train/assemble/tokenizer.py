"""From a configuration to a tokenizer, on the rank that reads."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_distill.config import DataConfig, ModelConfig
from megatron_distill.data.sources import DataOptions, sample_texts
from megatron_distill.data.tokenizers.open import (
    Tokenizer,
    holds_tokenizer,
    load_tokenizer,
    open_named_encoding,
    train_bpe,
)
from megatron_distill.errors import ConfigError
from megatron_distill.log import get_logger
from megatron_distill.runtime.collectives import together
from megatron_distill.store import find_stores, tokenizer_folder
from megatron_distill.train.assemble.sources import source_specs

_LOGGER = get_logger(__name__)
_ANY_SIZE = 1 << 15


@dataclass(frozen=True)
class Vocabulary:
    """Tokenizer facts for every rank; only the first rank holds the tokenizer.

    `is_known` False: the tokenizer is still to be trained or loaded. Its size is then a
    placeholder and is compared with nothing.
    """

    size: int
    identity: str
    is_known: bool = True

    @classmethod
    def unknown(cls) -> Vocabulary:
        """Return the placeholder used before the tokenizer exists."""
        return cls(_ANY_SIZE, "", is_known=False)


def open_tokenizer(
    data: DataConfig, models: Mapping[str, ModelConfig], folder: str, options: DataOptions
) -> tuple[Tokenizer | None, Vocabulary]:
    """Load or train the tokenizer on the first rank and broadcast its facts.

    models: by role; their tokenizers must agree. folder: the job's; a trained tokenizer is saved in
    `<folder>/tokenizer`, where a resumed run finds it. Raises DataError or ConfigError on all
    ranks.

    Collective: world, one broadcast of a short object.
    """
    tokenizer: Tokenizer | None = None
    with together():
        if dist.get_rank() == 0:
            tokenizer = read_tokenizer(data, models, folder, options)
            _check_models(models, tokenizer)
    said = [Vocabulary(tokenizer.vocab_size, tokenizer.identity) if tokenizer else None]
    dist.broadcast_object_list(said, src=0)
    assert said[0] is not None
    return tokenizer, said[0]


def read_tokenizer(
    data: DataConfig, models: Mapping[str, ModelConfig], folder: str, options: DataOptions
) -> Tokenizer:
    """Return the result of `open_tokenizer`, in a process without a world."""
    wanted = data.tokenizer
    if wanted.path is not None:
        return load_tokenizer(wanted.path)
    if wanted.encoding is not None:
        return open_named_encoding(wanted.encoding)
    if wanted.train_vocab_size is None:
        return load_tokenizer(next(_tokenizer_folders(models))[1])
    kept = Path(folder) / "tokenizer"
    if (kept / "tokenizer.json").is_file():
        _LOGGER.info("using the tokenizer of an earlier start: %s", kept)
        return load_tokenizer(kept)
    texts = sample_texts(source_specs(data.sources), options=options, characters=wanted.train_bytes)
    tokenizer = train_bpe(texts, vocab_size=wanted.train_vocab_size)
    try:
        for leftover in kept.parent.glob(f"{kept.name}.partial-*"):
            shutil.rmtree(leftover)
        tokenizer.save(kept)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot keep the tokenizer there ({error.strerror}); free disk space "
            "or name another folder"
        ) from error
    _LOGGER.info("trained a tokenizer of %d tokens: %s", tokenizer.vocab_size, kept)
    return tokenizer


def _tokenizer_folders(models: Mapping[str, ModelConfig]) -> Iterator[tuple[str, str]]:
    """Yield key and folder of each tokenizer that belongs to a model or a store."""
    for role, model in models.items():
        if model.hf is not None:
            yield f"{role}.hf", model.hf
    for role, model in models.items():
        for source in model.store or ():
            for store in find_stores([source.path]):
                yield f"{role}.store", str(tokenizer_folder(store))


def _check_models(models: Mapping[str, ModelConfig], tokenizer: Tokenizer) -> None:
    """Raise ConfigError where a model's own tokenizer has a different id for a token."""
    ours = tokenizer.vocabulary()
    for key, folder in _tokenizer_folders(models):
        if not holds_tokenizer(Path(folder).expanduser()):
            continue
        theirs = load_tokenizer(folder).vocabulary()
        for token, number in ours.items():
            if theirs.get(token) != number:
                other = f"id {theirs[token]}" if token in theirs else "no id"
                raise ConfigError(
                    f"{key} = {folder!r}: its tokenizer encodes {token!r} as {other}, "
                    f"data.tokenizer as {number}; use one tokenizer for data and models"
                )

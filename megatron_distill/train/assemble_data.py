"""From a configuration to tokens: tokenizer, training stream, held-out batches."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_distill.config import DataConfig, RunConfig, SourceConfig
from megatron_distill.data.corpora import SourceSpec
from megatron_distill.data.loader import StepLoader
from megatron_distill.data.samples import SampleSource
from megatron_distill.data.sources import DataOptions, open_training, read_held_out, sample_texts
from megatron_distill.data.tokenizer import (
    Tokenizer,
    holds_tokenizer,
    load_tokenizer,
    train_bpe,
)
from megatron_distill.errors import ConfigError
from megatron_distill.log import get_logger
from megatron_distill.runtime.batch import StepBatches
from megatron_distill.runtime.collectives import together
from megatron_distill.runtime.groups import Groups

_LOGGER = get_logger(__name__)


@dataclass(frozen=True)
class Vocabulary:
    """What every rank must know of the tokenizer, which only the first rank holds."""

    size: int
    identity: str


def open_tokenizer(config: RunConfig) -> tuple[Tokenizer | None, Vocabulary]:
    """Load or train the tokenizer on the first rank and tell all ranks about it.

    A trained tokenizer is kept under `<output>/tokenizer` and found there by a resumed run. Raises
    DataError on all ranks.

    Collective: world, one broadcast of a short object.
    """
    tokenizer: Tokenizer | None = None
    with together():
        if dist.get_rank() == 0:
            tokenizer = _tokenizer(config)
            _check_models(config, tokenizer)
    said = [Vocabulary(tokenizer.vocab_size, tokenizer.identity) if tokenizer else None]
    dist.broadcast_object_list(said, src=0)
    assert said[0] is not None
    return tokenizer, said[0]


def _tokenizer(config: RunConfig) -> Tokenizer:
    wanted = config.data.tokenizer
    if wanted.path is not None:
        return load_tokenizer(wanted.path)
    if wanted.train_vocab_size is None:
        return load_tokenizer(next(_model_folders(config))[1])
    folder = Path(config.output) / "tokenizer"
    if (folder / "tokenizer.json").is_file():
        _LOGGER.info("using the tokenizer that an earlier start trained: %s", folder)
        return load_tokenizer(folder)
    texts = sample_texts(
        source_specs(config.data.sources),
        options=data_options(config.data),
        characters=wanted.train_bytes,
    )
    tokenizer = train_bpe(texts, vocab_size=wanted.train_vocab_size)
    try:
        for leftover in folder.parent.glob(".tokenizer.partial-*"):
            shutil.rmtree(leftover)
        tokenizer.save(folder)
    except OSError as error:
        raise ConfigError(
            f"output={config.output}: cannot keep the tokenizer there ({error.strerror}); free "
            "disk space or change `output`"
        ) from error
    _LOGGER.info("trained a tokenizer of %d tokens: %s", tokenizer.vocab_size, folder)
    return tokenizer


def _model_folders(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield key and Hugging Face folder of each model that comes from one."""
    for role, model in (("student", config.student), ("teacher", config.teacher)):
        if model is not None and model.hf is not None:
            yield f"{role}.hf", model.hf


def _check_models(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigError where a model's own tokenizer gives a token another id."""
    ours = tokenizer.hugging_face.get_vocab()
    for key, folder in _model_folders(config):
        if not holds_tokenizer(Path(folder).expanduser()):
            continue
        theirs = load_tokenizer(folder).hugging_face.get_vocab()
        for token, number in ours.items():
            if theirs.get(token) != number:
                other = f"the id {theirs[token]}" if token in theirs else "no id"
                raise ConfigError(
                    f"{key} = {folder!r}: its tokenizer gives {token!r} {other}, that of "
                    f"data.tokenizer gives it {number}; use one tokenizer for data and models"
                )


def source_specs(sources: Sequence[SourceConfig]) -> list[SourceSpec]:
    """Translate the configured sources into plain values."""
    return [
        SourceSpec(
            format=source.format,
            paths=source.paths,
            weight=source.weight,
            text_key=source.text_key,
            documents=source.documents,
        )
        for source in sources
    ]


def data_options(data: DataConfig) -> DataOptions:
    """Translate how sources are read into plain values; own held-out files hold nothing back."""
    return DataOptions(
        sequence_length=data.sequence_length,
        validation_fraction=0.0 if data.validation_sources else data.validation_fraction,
        shuffle_buffer=data.shuffle_buffer,
        shuffle_samples=data.shuffle_samples,
        on_error=data.on_error,
        index_cache=Path(data.cache) if data.cache else None,
    )


def open_training_loader(
    config: RunConfig, tokenizer: Tokenizer | None, *, groups: Groups, device: torch.device
) -> StepLoader:
    """Open the training stream on the first rank and a loader on every rank.

    Raises DataError on all ranks.
    """
    source: SampleSource | None = None
    with together():
        if tokenizer is not None:
            source = open_training(
                source_specs(config.data.sources),
                tokenizer=tokenizer,
                options=data_options(config.data),
                seed=config.seed,
            )
    return _loader(source, config, groups=groups, device=device, prefetch=2)


def read_validation(
    config: RunConfig, tokenizer: Tokenizer | None, *, groups: Groups, device: torch.device
) -> list[StepBatches]:
    """Read the held-out samples once; they stay in memory as batches of the training's size.

    Raises DataError on all ranks.
    """
    if config.validation.samples == 0:
        return []
    source: SampleSource | None = None
    own = config.data.validation_sources
    options = data_options(config.data)
    with together():
        if tokenizer is not None:
            source = read_held_out(
                source_specs(own or config.data.sources),
                tokenizer=tokenizer,
                options=_whole(options) if own else options,
                samples=config.validation.samples,
            )
    steps = -(-config.validation.samples // config.train.global_batch_size)
    loader = _loader(source, config, groups=groups, device=device, prefetch=0)
    try:
        return [loader.take(step) for step in range(1, steps + 1)]
    finally:
        loader.close()


def _whole(options: DataOptions) -> DataOptions:
    return replace(options, validation_fraction=1.0)


def _loader(
    source: SampleSource | None,
    config: RunConfig,
    *,
    groups: Groups,
    device: torch.device,
    prefetch: int,
) -> StepLoader:
    return StepLoader(
        source,
        sequence_length=config.data.sequence_length,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        data_parallel_rank=groups.data.rank(),
        data_parallel_size=groups.data.size(),
        context_parallel_rank=groups.context.rank(),
        context_parallel_size=groups.context.size(),
        isolate_documents=config.data.isolate_documents,
        device=device,
        group=groups.world,
        prefetch=prefetch,
    )

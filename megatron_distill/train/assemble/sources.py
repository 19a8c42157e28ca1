"""From a configuration to its corpora: their sources, their tokenizer and their identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_distill.config import (
    ConversationConfig,
    DataConfig,
    JobConfig,
    ModelConfig,
    SourceConfig,
    aligned_role,
    is_aligned,
)
from megatron_distill.data.chat.conversations import (
    PLAIN_TEMPLATE,
    TOKENIZER_TEMPLATE,
    ConversationSpec,
)
from megatron_distill.data.chat.source import ConversationOptions
from megatron_distill.data.formats import SourceSpec, source_files
from megatron_distill.data.sources import DataOptions, sample_texts
from megatron_distill.data.text.files import fingerprint
from megatron_distill.data.tokenizers.open import (
    Tokenizer,
    Vocabulary,
    add_ends,
    load_tokenizer,
    open_named_encoding,
    require_same_ids,
    trained_in,
)
from megatron_distill.errors import DataError
from megatron_distill.runtime.bridge import Bridge
from megatron_distill.runtime.collectives import together
from megatron_distill.store import find_stores, tokenizer_folder
from megatron_distill.train.run_folder import ends_of_model

__all__ = ["publish_files", "require_same_files"]


def source_specs(sources: Sequence[SourceConfig]) -> list[SourceSpec]:
    """Translate the configured sources into plain values."""
    return [
        SourceSpec(
            **source.model_dump(exclude={"name", "conversation"}) | {"given_name": source.name},
            conversation=None if (own := source.conversation) is None else _conversation_spec(own),
        )
        for source in sources
    ]


def source_names(
    data: DataConfig, stored_names: tuple[str, ...] = (), *, held_out: bool
) -> tuple[str, ...]:
    """Return the names in the log of the sources of training samples, or of held-out samples.

    Without a corpus these are `stored_names`, those of the stores.
    """
    corpora = (data.validation_sources if held_out else ()) or data.sources
    return tuple(source.log_name for source in corpora) or stored_names


def _conversation_spec(conversation: ConversationConfig) -> ConversationSpec:
    return ConversationSpec(
        prompt_keys=conversation.prompt_key, **conversation.model_dump(exclude={"prompt_key"})
    )


def data_options(
    data: DataConfig, folder: Path, *, shows_progress: bool = True, keeps_weights: bool = True
) -> DataOptions:
    """Translate the reading of sources to plain values.

    folder: has the cache of prepared conversations, unless `data.cache` names one. keeps_weights:
    the weights of conversations are of use, as in training.
    """
    read = data.values_for(DataOptions) | {"validation_fraction": reserved_fraction(data)}
    prepared = data.values_for(ConversationOptions)
    prepared["cache"] = Path(data.cache or folder / "cache")
    return DataOptions(
        **read,
        index_cache=Path(data.cache) if data.cache else None,
        conversations=ConversationOptions(
            **prepared, shows_progress=shows_progress, keeps_weights=keeps_weights
        ),
    )


def reserved_fraction(data: DataConfig) -> float:
    """Return the fraction of documents held out; with held-out files of their own it is 0."""
    return 0.0 if data.validation_sources else data.validation_fraction


def open_tokenizer(config: JobConfig, options: DataOptions) -> tuple[Tokenizer | None, Vocabulary]:
    """Load or train the tokenizer on the first rank and broadcast its facts.

    The tokenizers of the job's models must agree with it. The generation settings of the student's
    model add to the tokens that end a text. Raises DataError or ConfigError on all ranks.

    Collective: world, one broadcast of a short object.
    """
    tokenizer: Tokenizer | None = None
    with together():
        if dist.get_rank() == 0:
            tokenizer = read_tokenizer(config, options)
            add_ends(tokenizer, ends_of_model(config.models.get("student")))
            for key, folder in _tokenizer_folders(_readers(config)):
                require_same_ids(tokenizer, folder, named=key)
    facts = [None if tokenizer is None else Vocabulary.of(tokenizer)]
    dist.broadcast_object_list(facts, src=0)
    assert facts[0] is not None
    return tokenizer, facts[0]


def read_tokenizer(config: JobConfig, options: DataOptions) -> Tokenizer:
    """Return the result of `open_tokenizer`, in a process without a world.

    A trained tokenizer is saved in the job's folder, where a resumed run finds it.
    """
    wanted = config.data.tokenizer
    if wanted.path is not None:
        return load_tokenizer(wanted.path)
    if wanted.encoding is not None:
        return open_named_encoding(wanted.encoding)
    if wanted.train_vocab_size is None:
        return load_tokenizer(next(_tokenizer_folders(_readers(config)))[1])
    specs = source_specs(config.data.sources)
    return trained_in(
        Path(config.folder) / "tokenizer",
        lambda: sample_texts(specs, options=options, characters=wanted.train_bytes),
        vocab_size=wanted.train_vocab_size,
        output=config.folder,
    )


def _readers(config: JobConfig) -> Mapping[str, ModelConfig]:
    """Return the models that read the tokens of `data.tokenizer`, by role."""
    if is_aligned(config):
        other = aligned_role(config)
        return {role: model for role, model in config.models.items() if role != other}
    return config.models


def _tokenizer_folders(models: Mapping[str, ModelConfig]) -> Iterator[tuple[str, str]]:
    """Yield key and folder of each tokenizer that belongs to a model or a store."""
    for role, model in models.items():
        if model.hf is not None:
            yield f"{role}.hf", model.hf
    for role, model in models.items():
        for source in model.store or ():
            for store in find_stores([source.path]):
                yield f"{role}.store", str(tokenizer_folder(store))


def dataset_settings(data: DataConfig, seed: int) -> dict[str, Any]:
    """Return all settings except the tokenizer that decide a job's training stream and its masks.

    JSON values. Files are identified by number, names and sizes, so that they may be moved. Call
    on the rank that reads. Raises DataError: a file is missing.
    """
    specs = source_specs(data.sources)
    total = sum(spec.weight for spec in specs)
    found = {
        "sources": {str(index): _source(spec, total) for index, spec in enumerate(specs)},
        "sequence_length": data.sequence_length,
        "isolate_documents": data.isolate_documents,
        "validation_fraction": reserved_fraction(data),
        "shuffle_buffer": data.shuffle_buffer,
        "shuffle_samples": data.shuffle_samples,
        "on_error": data.on_error,
        "seed": seed,
    }
    if data.add_bos is not None:
        found["add_bos"] = data.add_bos  # null is absent, as in stores older than this key
    if any(spec.conversation is not None for spec in specs):
        found |= {
            "distill_on_prompt": data.distill_on_prompt,
            "train_on": data.train_on,
            "truncation": data.truncation,
            "packing_buffer": data.packing_buffer,
        }
    return found


def require_files(data: DataConfig) -> None:
    """Raise DataError unless every file of the sources exists; none is read."""
    for spec in source_specs((*data.sources, *data.validation_sources)):
        if spec.kind.has_paths:
            source_files(spec)
        if spec.conversation is not None:
            _conversation(spec.conversation)


def dataset_digest(settings: dict[str, Any], *tokenizer_identities: str) -> str:
    """Return the digest of a stream's settings and of its tokenizers."""
    text = json.dumps([settings, *tokenizer_identities], sort_keys=True, allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _source(spec: SourceSpec, total: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        "format": spec.format,
        "share": round(spec.weight / total, 12),
        "files": fingerprint(source_files(spec)),
    }
    if spec.conversation is not None:
        return {**found, "conversation": _conversation(spec.conversation)}
    return {**found, **{name: getattr(spec, name) for name in spec.kind.identity}}


def _conversation(spec: ConversationSpec) -> dict[str, Any]:
    """Settings of the text of conversations: a template file by content, the tokenizer's by name.

    The tokenizer's template needs no digest: every record's tokens are compared with its result.
    """
    found = asdict(spec)
    if spec.leading_assistant == ConversationSpec.leading_assistant:
        del found["leading_assistant"]  # absent from stores older than this key
    if spec.chat_template not in (PLAIN_TEMPLATE, TOKENIZER_TEMPLATE):
        path = Path(spec.chat_template).expanduser()
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        found["chat_template"] = hashlib.sha256(content).hexdigest()[:16]
    found["prompt_keys"] = list(spec.prompt_keys)
    return found


_FILES = "data/files"


def publish_files(data: DataConfig, bridge: Bridge) -> None:
    """Tell the teacher's ranks number, names and sizes of the student's files.

    Call it on the student's first rank. Raises DataError: a file is missing.
    """
    bridge.publish(_FILES, _files(data))


def require_same_files(data: DataConfig, bridge: Bridge) -> None:
    """Raise DataError unless this machine has files of the same number, names and sizes.

    Content is compared later, by the hash of tokens in each answer. Call it on the teacher's first
    rank, after a meeting.
    """
    own, first = _files(data), bridge.published(_FILES)
    for name, found in own.items():
        if found != first[name]:
            of_rank = bridge.roles.name
            raise DataError(
                f"data source {name}: {of_rank(bridge.rank)} on {bridge.host(bridge.rank)} has "
                f"other files than {of_rank(0)} on {bridge.host(0)} (names and sizes are {found}, "
                f"and {first[name]}). Give both machines the same files"
            )


def _files(data: DataConfig) -> dict[str, str]:
    specs = source_specs((*data.sources, *data.validation_sources))
    return {spec.name: fingerprint(source_files(spec)) for spec in specs}

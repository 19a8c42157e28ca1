"""The settings that decide a training stream's samples, as plain values and as a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_distill.config import DataConfig
from megatron_distill.data.chat.conversations import (
    PLAIN_TEMPLATE,
    TOKENIZER_TEMPLATE,
    ConversationSpec,
)
from megatron_distill.data.formats import SourceSpec, source_files
from megatron_distill.data.text.files import fingerprint
from megatron_distill.errors import DataError
from megatron_distill.models.architecture import Architecture, model_fields
from megatron_distill.models.weights import WindowReader, placed
from megatron_distill.runtime.collectives import together
from megatron_distill.train.assemble.models import Origin
from megatron_distill.train.assemble.sources import reserved_fraction, source_specs
from megatron_distill.train.convert.stream import Block, shares


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


def dataset_digest(settings: dict[str, Any], tokenizer_identity: str) -> str:
    """Return the digest of a stream's settings and of its tokenizer."""
    text = json.dumps([settings, tokenizer_identity], sort_keys=True, allow_nan=False)
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


_BLOCK_NUMBERS = 2**24  # a part of the digest, so it must not change


def teacher_digest(origin: Origin, *, seed: int, group: dist.ProcessGroup) -> str:
    """Return the digest of a model's weights as named fp32 values, and of its architecture.

    The same for every layout, and for a Hugging Face folder and a checkpoint made from it. Random
    weights are digested as `seed` and their architecture. Reads all weights
    once, each rank of `group` its share. Raises CheckpointError on all ranks.

    Collective: `group`, two all-gathers of short objects (32 bytes per 2^24 numbers).
    """
    architecture = origin.architecture
    fields = model_fields(architecture)
    # A rotary model is the same for any length; learned positions are weights and have a shape.
    fields.pop("max_position_embeddings")
    if origin.open_weights is None:
        drawn = {"seed": seed, "init_std": architecture.init_std}
        if architecture.positions == "learned":
            drawn["positions"] = architecture.max_position_embeddings
        return _digest({"architecture": fields, "random": drawn})
    mine: dict[str, str] = {}
    with together(group=group):
        share = shares(list(_blocks(architecture)), group.size())[group.rank()]
        mine = _digests(origin, share)
    parts: list[dict[str, str]] = [{} for _ in range(group.size())]
    dist.all_gather_object(parts, mine, group=group)
    weights = {name: digest for part in parts for name, digest in part.items()}
    return _digest({"architecture": fields, "weights": weights})


def _digest(content: dict[str, object]) -> str:
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _blocks(architecture: Architecture) -> Iterator[Block]:
    """Cut all tensors into blocks of rows, by their shapes alone."""
    for parameter, place in placed(architecture):
        most = max(1, _BLOCK_NUMBERS // torch.Size(parameter.shape[1:]).numel())
        for start in range(0, parameter.shape[0], most):
            rows = min(most, parameter.shape[0] - start)
            yield Block(parameter, place, torch.float32, start, rows)


def _digests(origin: Origin, blocks: list[Block]) -> dict[str, str]:
    assert origin.open_weights is not None
    windows = WindowReader(origin.open_weights())
    found = {}
    for block in blocks:
        key, place = block.parameter.key, block.place
        source_place = place
        if place and origin.keep_layers is not None:
            source_place = (origin.keep_layers[place[0]], *place[1:])
        start = (block.start, *(0 for _ in block.shape[1:]))
        window = windows.read(key, source_place, start, block.shape, block.dtype)
        content = window.contiguous().view(-1).view(torch.uint8).numpy()
        name = f"{key} {list(place)} {block.start} {list(block.shape)}"
        found[name] = hashlib.sha256(content.data).hexdigest()
    return found

"""Which samples a training stream has: what decides them, in plain values and as a digest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_distill.config import JobConfig
from megatron_distill.data.conversations import (
    PLAIN_TEMPLATE,
    TOKENIZER_TEMPLATE,
    ConversationSpec,
)
from megatron_distill.data.corpora import SourceSpec, fingerprint, source_files
from megatron_distill.data.tables import TABLE_FORMATS
from megatron_distill.errors import DataError
from megatron_distill.train.assemble_sources import data_options, source_specs


def dataset_settings(config: JobConfig) -> dict[str, Any]:
    """Return everything but the tokenizer that decides a job's training stream and its masks.

    JSON values. Files are named by number, names and sizes, so that they may be moved. To be
    called on the rank that reads. Raises DataError: a file is missing.
    """
    options, data = data_options(config), config.data
    specs = source_specs(config.data.sources)
    total = sum(spec.weight for spec in specs)
    found = {
        "sources": {str(index): _source(spec, total) for index, spec in enumerate(specs)},
        "sequence_length": options.sequence_length,
        "isolate_documents": data.isolate_documents,
        "validation_fraction": options.validation_fraction,
        "shuffle_buffer": options.shuffle_buffer,
        "shuffle_samples": options.shuffle_samples,
        "on_error": options.on_error,
        "seed": config.seed,
    }
    if any(spec.conversation is not None for spec in specs):
        found |= {
            "distill_on_prompt": data.distill_on_prompt,
            "train_on": data.train_on,
            "truncation": data.truncation,
            "packing_buffer": data.packing_buffer,
        }
    return found


def require_files(config: JobConfig) -> None:
    """Raise DataError unless every file that the sources name is there; none is read."""
    for spec in source_specs((*config.data.sources, *config.data.validation_sources)):
        if spec.format != "python_stdlib":
            _files(spec)
        if spec.conversation is not None:
            _conversation(spec.conversation)


def dataset_digest(settings: dict[str, Any], tokenizer_identity: str) -> str:
    """Return the digest of a stream's settings and of the tokenizer that makes tokens of it."""
    text = json.dumps([settings, tokenizer_identity], sort_keys=True, allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _source(spec: SourceSpec, total: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        "format": spec.format,
        "share": round(spec.weight / total, 12),
        "files": fingerprint(_files(spec)),
    }
    if spec.conversation is not None:
        found["conversation"] = _conversation(spec.conversation)
    elif spec.format in ("jsonl", *TABLE_FORMATS):
        found["text_key"] = spec.text_key
    if spec.format == "text":
        found["documents"] = spec.documents
    return found


def _conversation(spec: ConversationSpec) -> dict[str, Any]:
    """How conversations become text; a template file by its content, the tokenizer's by name.

    What the tokenizer's template writes, every record's tokens are compared with.
    """
    found = asdict(spec)
    if spec.leading_assistant == ConversationSpec.leading_assistant:
        del found["leading_assistant"]  # stores that are older than this key name none
    if spec.chat_template not in (PLAIN_TEMPLATE, TOKENIZER_TEMPLATE):
        path = Path(spec.chat_template).expanduser()
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        found["chat_template"] = hashlib.sha256(content).hexdigest()[:16]
    found["prompt_keys"] = list(spec.prompt_keys)
    return found


def _files(spec: SourceSpec) -> list[Path]:
    if spec.format != "megatron":
        return source_files(spec)
    paths = [Path(f"{prefix}{end}") for prefix in spec.paths for end in (".bin", ".idx")]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path}: no such file; correct data.sources.paths")
    return paths

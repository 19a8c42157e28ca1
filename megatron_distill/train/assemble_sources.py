"""From a configuration to plain values about its corpora."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_distill.config import DataConfig, RunConfig, SourceConfig
from megatron_distill.data.corpora import SourceSpec
from megatron_distill.data.sources import DataOptions


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


def source_names(config: RunConfig, *, held_out: bool) -> tuple[str, ...]:
    """Return what the log calls the sources of the training samples, or of those held out."""
    own = config.data.validation_sources if held_out else ()
    corpora = own or config.data.sources
    if corpora:
        return tuple(source.log_name for source in corpora)
    assert config.teacher is not None
    assert config.teacher.store is not None
    return tuple(entry.log_name for entry in config.teacher.store)


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

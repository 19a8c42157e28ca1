"""From a configuration to plain values about its corpora."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_distill.config import ConversationConfig, DataConfig, SourceConfig
from megatron_distill.data.chat.conversations import ConversationSpec
from megatron_distill.data.chat.source import ConversationOptions
from megatron_distill.data.formats import SourceSpec
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
            conversation=_conversation_spec(source.conversation),
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


def _conversation_spec(conversation: ConversationConfig | None) -> ConversationSpec | None:
    if conversation is None:
        return None
    return ConversationSpec(
        messages_key=conversation.messages_key,
        role_key=conversation.role_key,
        content_key=conversation.content_key,
        roles=conversation.roles,
        prompt_keys=conversation.prompt_key,
        response_key=conversation.response_key,
        system_key=conversation.system_key,
        tools_key=conversation.tools_key,
        weight_key=conversation.weight_key,
        leading_assistant=conversation.leading_assistant,
        chat_template=conversation.chat_template,
        separator=conversation.separator,
        template_options=conversation.template_options,
    )


def data_options(
    data: DataConfig, folder: Path, *, shows_progress: bool = True, keeps_weights: bool = True
) -> DataOptions:
    """Translate the reading of sources to plain values.

    folder: has the cache of prepared conversations, unless `data.cache` names one. keeps_weights:
    the weights of conversations are of use, as in training.
    """
    return DataOptions(
        sequence_length=data.sequence_length,
        validation_fraction=reserved_fraction(data),
        shuffle_buffer=data.shuffle_buffer,
        shuffle_samples=data.shuffle_samples,
        on_error=data.on_error,
        index_cache=Path(data.cache) if data.cache else None,
        conversations=ConversationOptions(
            cache=Path(data.cache or folder / "cache"),
            distill_on_prompt=data.distill_on_prompt,
            train_on=data.train_on,
            truncation=data.truncation,
            packing_buffer=data.packing_buffer,
            workers=data.workers,
            shows_progress=shows_progress,
            keeps_weights=keeps_weights,
        ),
    )


def reserved_fraction(data: DataConfig) -> float:
    """Return the fraction of documents held out; with held-out files of their own it is 0."""
    return 0.0 if data.validation_sources else data.validation_fraction

"""A source of conversations prepared once: rendered, tokenised, masked, and kept in a cache."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from megatron_distill.data.chat_template import ChatTemplate, chat_template
from megatron_distill.data.conversation_cache import (
    PreparedConversations,
    cache_key,
    open_cache,
    write_cache,
)
from megatron_distill.data.conversation_source import ConversationOptions
from megatron_distill.data.conversation_tokens import ConversationEncoder, MaskRule, PreparedBlock
from megatron_distill.data.conversations import (
    BadConversationError,
    ConversationSpec,
    contents,
    conversation_of,
)
from megatron_distill.data.corpora import SourceSpec, source_files
from megatron_distill.data.documents import is_held_out
from megatron_distill.data.preparation_progress import PreparationProgress
from megatron_distill.data.rows import RowBlock, read_blocks, rows_of
from megatron_distill.data.samples import FULLY_TRAINED
from megatron_distill.data.tokenizer import Tokenizer
from megatron_distill.data.worker_processes import worker_map
from megatron_distill.errors import DataError
from megatron_distill.log import get_logger

_LOG = get_logger(__name__)
# A worker takes seconds to start; it pays where there is work for many more.
_BYTES_PER_WORKER: Final = 16 << 20
_MOST_WORKERS: Final = 16


def prepared_conversations(
    spec: SourceSpec, tokenizer: Tokenizer, *, options: ConversationOptions, skip_bad: bool
) -> PreparedConversations:
    """The conversations of a source, found in the cache or prepared now.

    The cache is keyed by the files' content, the tokenizer, the template and what decides the
    masks. Raises DataError: a file or row is bad (unless `skip_bad`, which counts and reports
    them), the template does not fit, or the cache cannot be written.
    """
    assert spec.conversation is not None
    files = source_files(spec)
    template = chat_template(spec.conversation, tokenizer)
    rule = MaskRule(
        only_last=options.train_on == "last_response",
        distill_on_prompt=options.distill_on_prompt,
    )
    settings = [spec.format, _settings(spec.conversation, template), tokenizer.identity, vars(rule)]
    folder = options.cache / f"conversations-{cache_key(files, settings)}"
    found = open_cache(folder, files)
    if found is None:
        encoder = ConversationEncoder(spec.conversation, template, tokenizer, rule)
        found = _prepare(spec, encoder, folder, files, options, skip_bad=skip_bad)
    else:
        _LOG.info("%s: prepared before, cache hit: %s", spec.name, folder)
        for message in found.manifest.problems:
            _refuse(message, skip_bad=skip_bad)
    _report(spec, found)
    if not options.keeps_weights and _has_weights(found):
        raise DataError(
            f"data source {spec.name}: its messages have weights other than 0 and 1, which a "
            "teacher store does not keep; train with the live teacher, or set "
            "conversation.weight_key to a name that no message has"
        )
    return found


def conversation_texts(
    spec: SourceSpec, *, skip_bad: bool, held_out_fraction: float
) -> Iterator[str]:
    """What the messages of a source say, without any template; held-out conversations left out.

    Raises DataError: a file or row is bad, unless `skip_bad`.
    """
    assert spec.conversation is not None
    required, optional = spec.conversation.columns
    files = source_files(spec)
    refused = _Refusals(skip_bad=skip_bad)
    for block in read_blocks(files, format=spec.format, required=required, optional=optional):
        for row, content in rows_of(block):
            try:
                if isinstance(content, str):
                    raise BadConversationError(content)
                conversation = conversation_of(content, spec.conversation)
                digest = conversation.digest()
            except BadConversationError as error:
                refused(f"{block.path}:{row}: {error}")
                continue
            if not is_held_out(digest, held_out_fraction):
                yield from contents(conversation)


def _settings(spec: ConversationSpec, template: ChatTemplate) -> dict[str, Any]:
    """What decides a conversation's text and the spans in it."""
    found = {key: value for key, value in vars(spec).items() if key != "chat_template"}
    return {**found, "template": vars(template)}


def _prepare(
    spec: SourceSpec,
    encoder: ConversationEncoder,
    folder: Path,
    files: Sequence[Path],
    options: ConversationOptions,
    *,
    skip_bad: bool,
) -> PreparedConversations:
    assert spec.conversation is not None
    required, optional = spec.conversation.columns
    blocks = read_blocks(files, format=spec.format, required=required, optional=optional)
    total = sum(path.stat().st_size for path in files)
    workers = _workers(total) if options.workers is None else options.workers
    sizes: list[int] = []

    def measured() -> Iterator[RowBlock]:
        for block in blocks:
            sizes.append(len(block.data))
            yield block

    with (
        PreparationProgress(
            spec.name, total_bytes=total, is_shown=options.shows_progress
        ) as progress,
        worker_map(encoder, measured(), workers=workers) as results,
    ):

        def named() -> Iterator[tuple[str, PreparedBlock]]:
            for number, block in enumerate(results):
                progress.advance(
                    bytes_read=sizes[number],
                    conversations=len(block.index),
                    tokens=len(block.tokens_n),
                )
                yield str(files[block.file]), block

        refused = _Refusals(skip_bad=skip_bad)
        found = write_cache(folder, files, named(), refuse=refused)
    _LOG.info(
        "%s: prepared in %.1f s by %s: %s",
        spec.name,
        progress.seconds,
        f"{workers} workers" if workers else "this process",
        folder,
    )
    return found


def _workers(total_bytes: int) -> int:
    """Processes that pay for this much data on this machine; 0: this process does it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    wanted = min(cores or 1, _MOST_WORKERS, total_bytes // _BYTES_PER_WORKER)
    return wanted if wanted > 1 else 0


class _Refusals:
    """Raises at the first bad row, or counts them and reports the first ones."""

    def __init__(self, *, skip_bad: bool) -> None:
        self._skip_bad = skip_bad
        self._count = 0

    def __call__(self, message: str) -> None:
        self._count += 1
        if not self._skip_bad or self._count <= 10 or self._count.bit_count() == 1:
            _refuse(message, skip_bad=self._skip_bad)


def _refuse(message: str, *, skip_bad: bool) -> None:
    if not skip_bad:
        raise DataError(f"{message} (data.on_error=skip passes over such rows)")
    _LOG.warning("skipped: %s", message)


def _report(spec: SourceSpec, found: PreparedConversations) -> None:
    said = found.manifest
    untrained = int((found.index["trained"] == 0).sum())
    _LOG.info(
        "%s: %s rows, %s conversations, %s tokens; cross-entropy trains %.1f%% of them, "
        "distillation %.1f%%%s%s%s",
        spec.name,
        f"{said.rows:,}",
        f"{said.conversations:,}",
        f"{said.tokens:,}",
        100 * said.ce_labels / max(1, said.tokens),
        100 * said.kd_labels / max(1, said.tokens),
        f"; {said.bad_rows:,} bad rows skipped" if said.bad_rows else "",
        f"; {untrained:,} conversations without a trained token left out" if untrained else "",
        f"; {said.dropped:,} responses before the first prompt dropped" if said.dropped else "",
    )
    if said.unclosed:
        _warn_of_unclosed(spec.name, found.folder, said.unclosed, said.conversations)


@lru_cache(maxsize=1 << 10)
def _warn_of_unclosed(name: str, folder: Path, unclosed: int, conversations: int) -> None:  # noqa: ARG001
    """Once per source, although training and held-out samples of one start both ask for it."""
    _LOG.warning(
        "%s: the chat template writes no token that ends the turn after the last response of %s of "
        "%s conversations, so that the student does not learn to stop there; give a Jinja file "
        "that writes the model's stop token (data.sources.conversation.chat_template)",
        name,
        f"{unclosed:,}",
        f"{conversations:,}",
    )


def _has_weights(found: PreparedConversations) -> bool:
    step = 1 << 24  # at a time, so that memory stays flat
    return any(
        bool((found.flags_n[start : start + step] > FULLY_TRAINED).any())
        for start in range(0, len(found.flags_n), step)
    )

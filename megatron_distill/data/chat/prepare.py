"""A source of conversations prepared once: rendered, tokenised, masked, and cached on disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from megatron_distill.data.aligned.conversations import ConversationAligner, teacher_template
from megatron_distill.data.aligned.documents import UnknownTokens, is_unknown
from megatron_distill.data.aligned.stream import check_unaligned
from megatron_distill.data.chat.cache import (
    PreparedConversations,
    cache_key,
    open_cache,
    write_cache,
)
from megatron_distill.data.chat.conversations import (
    BadConversationError,
    ConversationSpec,
    RowBlock,
    contents,
    conversation_of,
    read_blocks,
    rows_of,
)
from megatron_distill.data.chat.encode import ConversationEncoder, MaskRule, PreparedBlock
from megatron_distill.data.chat.source import ConversationOptions
from megatron_distill.data.chat.template import ChatTemplate, chat_template
from megatron_distill.data.formats import SourceSpec, source_files
from megatron_distill.data.samples import FULLY_TRAINED
from megatron_distill.data.text.documents import is_held_out
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.data.worker_processes import worker_map
from megatron_distill.errors import DataError, counted
from megatron_distill.log import get_logger
from megatron_distill.runtime.progress import ProgressFigure, ProgressReporter, short_count

_LOG = get_logger(__name__)
# A worker takes seconds to start, so each one needs work for much longer.
_BYTES_PER_WORKER: Final = 16 << 20
_MOST_WORKERS: Final = 16
# Which template leaves something out, and how to change it.
_OWN_TEMPLATE: Final = (
    "chat template",
    "set data.sources.conversation.chat_template to a Jinja file that writes them",
)
_TEACHER_TEMPLATE: Final = (
    "teacher's chat template",
    "put a chat_template.jinja that writes them into the folder of the teacher's tokenizer",
)
_LOOKED_AT: Final = 10_000_000  # first tokens of a cache in which unknown ones are counted


def prepared_conversations(
    spec: SourceSpec,
    tokenizer: Tokenizer,
    *,
    options: ConversationOptions,
    skip_bad: bool,
    teacher: Tokenizer | None = None,
    max_unaligned: float = 0.0,
) -> PreparedConversations:
    """The conversations of a source, found in the cache or prepared now.

    The cache is keyed by the files' content, the tokenizer, the template and the settings of the
    masks. teacher: the tokenizer of a teacher that has its own. Conversations without a chunk that
    both share are left out, at most a share of `max_unaligned`. Raises DataError: a file or row is
    bad, the template does not fit, too many conversations have no chunk, or the cache cannot be
    written. With `skip_bad` bad rows are counted and reported instead.
    """
    assert spec.conversation is not None
    files = source_files(spec)
    template = chat_template(spec.conversation, tokenizer)
    rule = MaskRule(
        only_last=options.train_on == "last_response",
        distill_on_prompt=options.distill_on_prompt,
    )
    settings = [spec.format, _settings(spec.conversation, template), tokenizer.identity, vars(rule)]
    if spec.rows is not None:
        settings.append([spec.rows.field, spec.rows.value])
    aligner = None
    if teacher is not None:
        other = teacher_template(spec.conversation, teacher)
        aligner = ConversationAligner(tokenizer, teacher, other)
        # The rule of the chunks, renamed when it changes, so that older caches are not found.
        settings += [vars(other), teacher.identity, "chunks of whole characters"]
    folder = options.cache / f"conversations-{cache_key(files, settings)}"
    found = open_cache(folder, files)
    if found is None:
        encoder = ConversationEncoder(
            spec.conversation, template, tokenizer, rule, aligner, spec.rows
        )
        found = _prepare(spec, encoder, folder, files, options, skip_bad=skip_bad)
    else:
        _LOG.info("%s: already prepared, cache hit: %s", spec.name, folder)
        for message in found.manifest.problems:
            _refuse(message, skip_bad=skip_bad)
    _report(spec, found)
    if teacher is not None:
        _check_aligned(spec, found, max_unaligned)
        _warn_of_unknown(spec, found, tokenizer, teacher)
    if not options.keeps_weights and _has_weights(found):
        raise DataError(
            f"data source {spec.name}: its messages have weights other than 0 and 1, which a store "
            "cannot hold. Train with a live teacher, or set conversation.weight_key to a name that "
            "no message has"
        )
    return found


def _check_aligned(spec: SourceSpec, found: PreparedConversations, share: float) -> None:
    """Raise DataError unless enough conversations have chunks."""
    manifest = found.manifest
    if manifest.unaligned:
        _LOG.warning(
            "%s: %s without a chunk that both tokenizers share left out; the last: %s",
            spec.name,
            counted(manifest.unaligned, "conversation"),
            manifest.last_unaligned,
        )
    check_unaligned(
        *(manifest.unaligned, manifest.conversations, share),
        name=spec.name,
        unit="conversation",
        last=str(manifest.last_unaligned),
    )


def _warn_of_unknown(
    spec: SourceSpec, found: PreparedConversations, student: Tokenizer, teacher: Tokenizer
) -> None:
    """Warn of tokens that stand for text without a token, if there are any at the beginning."""
    assert found.teacher is not None, "it was prepared for two tokenizers"
    unknown = UnknownTokens.of(
        is_unknown(student, found.tokens_n[:_LOOKED_AT]),
        is_unknown(teacher, found.teacher.tokens_m[:_LOOKED_AT]),
    )
    if unknown:
        _LOG.warning("%s: %s", spec.name, unknown)


def conversation_texts(
    spec: SourceSpec, *, skip_bad: bool, held_out_fraction: float
) -> Iterator[str]:
    """Yield the messages' contents of a source, held-out conversations left out; no template.

    Raises DataError: a file or row is bad, unless `skip_bad`.
    """
    assert spec.conversation is not None
    files = source_files(spec)
    refused = _Refusals(skip_bad=skip_bad)
    for block in _blocks(spec, spec.conversation, files):
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


def _blocks(
    spec: SourceSpec, conversation: ConversationSpec, files: Sequence[Path]
) -> Iterator[RowBlock]:
    required, optional = conversation.columns
    if spec.rows is not None:
        optional = (*optional, spec.rows.field)
    assert spec.kind.rows is not None, "the rules refuse conversations of other formats"
    return read_blocks(files, read=spec.kind.rows, required=required, optional=optional)


def _settings(spec: ConversationSpec, template: ChatTemplate) -> dict[str, Any]:
    """The settings that determine a conversation's text and its response spans."""
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
    blocks = _blocks(spec, spec.conversation, files)
    total = sum(path.stat().st_size for path in files)
    workers = _workers(total) if options.workers is None else options.workers
    sizes: list[int] = []

    def measured() -> Iterator[RowBlock]:
        for block in blocks:
            sizes.append(len(block.data))
            yield block

    progress = ProgressReporter(
        sys.stderr,
        label=f"preparing {spec.name}",
        total=total,
        as_percent=True,
        write_line=lambda line: _LOG.info("%s", line),
        shows_bar=options.shows_progress,
    )
    with (
        closing(progress),
        worker_map(encoder, measured(), workers=workers) as results,
    ):

        def named() -> Iterator[tuple[str, PreparedBlock]]:
            read = conversations = tokens = 0

            def fields() -> list[ProgressFigure]:
                rate = tokens / max(progress.elapsed, 1e-9)
                counts = f"{short_count(conversations)} conversations"
                return [ProgressFigure(counts), ProgressFigure(f"{short_count(rate)} tok/s")]

            for number, block in enumerate(results):
                read += sizes[number]
                conversations += len(block.index)
                tokens += len(block.tokens_n)
                progress.update(read, fields)
                yield str(files[block.file]), block

        refused = _Refusals(skip_bad=skip_bad)
        found = write_cache(folder, files, named(), refuse=refused, has_teacher=encoder.has_teacher)
    _LOG.info(
        "%s: prepared in %.1f s by %s: %s",
        spec.name,
        progress.elapsed,
        f"{workers} workers" if workers else "this process",
        folder,
    )
    return found


def _workers(total_bytes: int) -> int:
    """Number of worker processes for this much data on this machine; 0: none, this process."""
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
    manifest = found.manifest
    untrained = int((found.index["trained"] == 0).sum())
    share = 100 / max(1, manifest.tokens)
    parts = [
        f"{spec.name}: {counted(manifest.rows, 'row')}, "
        f"{counted(manifest.conversations, 'conversation')}, {counted(manifest.tokens, 'token')}",
        f"cross-entropy trains {share * manifest.ce_labels:.1f}% of them, distillation "
        f"{share * manifest.kd_labels:.1f}%",
    ]
    if manifest.bad_rows:
        parts.append(f"{counted(manifest.bad_rows, 'bad row')} skipped")
    if untrained:
        parts.append(f"{counted(untrained, 'conversation')} without a trained token left out")
    if manifest.dropped:
        parts.append(f"{counted(manifest.dropped, 'response')} before the first prompt dropped")
    _inform("; ".join(parts), found.folder)
    if manifest.unclosed:
        _warn_of_unclosed(spec.name, found.folder, manifest.unclosed, manifest.conversations)
    for count, template, remedy in (
        (manifest.unseen, *_OWN_TEMPLATE),
        (manifest.teacher_unseen, *_TEACHER_TEMPLATE),
    ):
        if count:
            _warn_of_unseen(spec.name, found.folder, count, template, remedy)


@lru_cache(maxsize=1 << 10)
def _inform(text: str, folder: Path) -> None:  # noqa: ARG001
    """Log once per source, as below."""
    _LOG.info("%s", text)


@lru_cache(maxsize=1 << 10)
def _warn_of_unclosed(name: str, folder: Path, unclosed: int, conversations: int) -> None:  # noqa: ARG001
    """Warn once per source; training and held-out samples of one start both call this."""
    _LOG.warning(
        "%s: in %s of %s conversations the chat template writes no end-of-turn token after the "
        "last response. The student does not learn to stop; set "
        "data.sources.conversation.chat_template to a Jinja file that writes the stop token",
        name,
        f"{unclosed:,}",
        f"{conversations:,}",
    )


@lru_cache(maxsize=1 << 10)
def _warn_of_unseen(name: str, folder: Path, count: int, template: str, remedy: str) -> None:  # noqa: ARG001
    """Warn once per source and side, as above."""
    _LOG.warning(
        "%s: in %s the %s leaves out a system message, a question or tools, so the model lacks "
        "them. Either %s, or remove them from the rows",
        *(name, counted(count, "conversation"), template, remedy),
    )


def _has_weights(found: PreparedConversations) -> bool:
    step = 1 << 24  # at a time, so that memory stays flat
    return any(
        bool((found.flags_n[start : start + step] > FULLY_TRAINED).any())
        for start in range(0, len(found.flags_n), step)
    )

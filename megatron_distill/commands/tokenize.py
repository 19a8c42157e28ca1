"""Tokenise a corpus once, into the .bin/.idx pair that `format: megatron` reads."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path

from megatron_distill import log
from megatron_distill.commands.command import Command
from megatron_distill.errors import counted


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    from megatron_distill.data.formats import FORMATS

    parser.add_argument("paths", nargs="*", metavar="FILE", help="files or quoted glob patterns")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--tokenizer", help="Hugging Face folder, SentencePiece .model or .tiktoken file"
    )
    which.add_argument("--encoding", help="a tiktoken encoding whose ranks are in its cache")
    parser.add_argument("--output", required=True, type=Path, help="prefix of the two files")
    formats = [name for name, row in FORMATS.items() if row.is_text]
    parser.add_argument("--format", choices=formats, default="jsonl")
    parser.add_argument("--text-key", default="text", help="field of a record, column of a table")
    parser.add_argument(
        "--documents", choices=("file", "line"), default="file", help="unit of a text document"
    )
    parser.add_argument(
        "--add-bos",
        action=argparse.BooleanOptionalAction,
        help="begin documents with the begin-of-text token (default: if the tokenizer adds it)",
    )
    parser.add_argument(
        "--on-error", choices=("raise", "skip"), default="raise", help="at a bad record"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing pair")


def _run(arguments: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    from megatron_distill.data.formats import SourceSpec
    from megatron_distill.data.text.stream import tokenized_documents
    from megatron_distill.data.tokenizers.open import load_tokenizer, open_named_encoding
    from megatron_distill.runtime.mcore_patches import prepare_megatron_core
    from megatron_distill.runtime.progress import ProgressFigure, ProgressReporter, short_count

    spec = SourceSpec(
        format=arguments.format,
        paths=tuple(arguments.paths),
        text_key=arguments.text_key,
        documents=arguments.documents,
    )
    tokenizer = (
        open_named_encoding(arguments.encoding)
        if arguments.encoding is not None
        else load_tokenizer(arguments.tokenizer, named="--tokenizer")
    )
    prepare_megatron_core(on_cuda=torch.cuda.is_available())
    # Imported here: it loads Megatron-Core, which must be patched first.
    from megatron_distill.runtime.indexed_dataset import open_indexed

    progress = ProgressReporter(sys.stderr, label="document", total=None)
    log.configure(0, stream=progress.stream)
    with (
        closing(progress),
        open_indexed(
            arguments.output, vocab_size=tokenizer.vocab_size, overwrite=arguments.overwrite
        ) as writer,
    ):
        tokens = 0

        def figures() -> list[ProgressFigure]:
            rate = tokens / max(progress.elapsed, 1e-9)
            count = f"{short_count(tokens)} tokens"
            return [ProgressFigure(count), ProgressFigure(f"{short_count(rate)} tok/s")]

        for rows in tokenized_documents(
            spec,
            tokenizer,
            skip_bad=arguments.on_error == "skip",
            add_bos=arguments.add_bos,
        ):
            writer.add(rows)
            tokens = writer.tokens
            progress.update(writer.documents, figures)
        totals = f"{counted(writer.documents, 'document')}, {counted(tokens, 'token')}"
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{arguments.output}.bin and .idx: {totals}", markup=False)
    return 0


COMMAND = Command(
    description="""Tokenise a corpus once, into the .bin/.idx pair that `format: megatron` reads.

    megatron-distill data tokenize --tokenizer DIR --output corpora/code 'data/*.jsonl.zst'
    megatron-distill data tokenize --tokenizer DIR --output corpora/books --format text books/*

Then, in a run: data.sources: [{format: megatron, paths: [corpora/code]}]""",
    add_arguments=_add_arguments,
    run=_run,
    stopped="stopped; nothing was written",
)

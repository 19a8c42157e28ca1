"""Preview the data of a run: samples coloured by mask, lengths and totals."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from megatron_distill.commands.command import Command
from megatron_distill.commands.job import config_file
from megatron_distill.errors import ConfigError, counted
from megatron_distill.launching.option_numbers import whole_number

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_distill.config import RunConfig
    from megatron_distill.data.samples import Sample
    from megatron_distill.data.tokenizers.open import Tokenizer

_AROUND_ROWS: Final = 4  # lines of a terminal for the title and the head of a table


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the YAML file of a run, here or shipped")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for the run")
    parser.add_argument("--samples", type=whole_number("4"), default=4, help="samples to print (4)")
    parser.add_argument(
        "--counted", type=whole_number("256"), default=256, help="samples to count over (256)"
    )
    parser.add_argument(
        "--chunks", type=whole_number("2"), default=None, help="rows per sample (the terminal's)"
    )
    parser.add_argument(
        "--width", type=whole_number("100"), default=None, help="columns (the terminal's)"
    )


def _run(arguments: argparse.Namespace) -> int:
    from megatron_distill.config import load_config

    config = load_config(config_file(arguments.config), arguments.overrides)
    with suppress(BrokenPipeError):  # the pager was closed
        _preview(
            config,
            samples=arguments.samples,
            count=max(arguments.samples, arguments.counted),
            chunks=arguments.chunks,
            width=arguments.width,
        )
    return 0


def _preview(
    config: RunConfig, *, samples: int, count: int, chunks: int | None, width: int | None
) -> None:
    # Imported here, because they are slow; a wrong configuration is reported at once.
    import torch
    from rich.console import Console

    from megatron_distill.config import is_aligned
    from megatron_distill.runtime.mcore_patches import prepare_megatron_core

    if not config.data.sources:
        raise ConfigError("data.sources = []: there is no corpus to show; name one")
    prepare_megatron_core(on_cuda=torch.cuda.is_available())
    # Imported here: they load Megatron-Core, which must be patched first.
    from megatron_distill.data.sources import open_training
    from megatron_distill.data.tokenizers.open import Vocabulary
    from megatron_distill.train.assemble.alignment import read_teacher
    from megatron_distill.train.assemble.models import build_terms
    from megatron_distill.train.assemble.routing import sample_routing
    from megatron_distill.train.assemble.sources import (
        data_options,
        read_tokenizer,
        source_specs,
    )
    from megatron_distill.train.assemble.start import check_models, check_start
    from megatron_distill.train.run_folder import without_empty_folders

    check_start(config)
    data, folder = config.data, Path(config.output)
    options = data_options(data, folder, shows_progress=config.logging.progress)
    tokenizer = read_tokenizer(config, options)
    vocabulary = Vocabulary.of(tokenizer)
    teacher = None
    if is_aligned(config):
        teacher = read_teacher(config, vocabulary)
    of_teacher = None if teacher is None else Vocabulary.of(teacher.tokenizer)
    check_models(config, vocabulary, of_teacher=of_teacher)
    build_terms(config.objective.terms, tokenizer.vocab_size)
    with without_empty_folders(folder / "cache"):
        source = open_training(
            source_specs(data.sources),
            tokenizer=tokenizer,
            options=replace(options, teacher=teacher, routing=sample_routing(config)),
            seed=config.seed,
        )
    console = Console(width=width, highlight=False, soft_wrap=True)
    _show(
        (source.next_sample() for _ in range(count)),
        tokenizer,
        None if teacher is None else teacher.tokenizer,
        console,
        shown=samples,
        names=[spec.log_name for spec in data.sources],
        title=f"the first {counted(count, 'sample')} of {data.sequence_length} positions",
        isolate_documents=data.isolate_documents,
        chunks=console.height - _AROUND_ROWS if chunks is None else chunks,
    )


def _show(
    found: Iterable[Sample],
    tokenizer: Tokenizer,
    teacher: Tokenizer | None,
    console: Console,
    *,
    shown: int,
    names: Sequence[str],
    title: str,
    isolate_documents: bool,
    chunks: int,
) -> None:
    """Print the first samples, and figures of all of them."""
    from megatron_distill.align import Coverage
    from megatron_distill.data.aligned.coverage import TokenBytes, sample_coverage
    from megatron_distill.data.aligned.preview import PrintableTokens, chunk_table, coverage_lines
    from megatron_distill.data.preview import (
        PreviewTotals,
        histogram,
        legend,
        sample_text,
        token_kinds,
    )

    has_colour = console.color_system is not None
    totals, coverage = PreviewTotals(), Coverage()
    of_source = {name: PreviewTotals() for name in names}
    sides = None if teacher is None else (PrintableTokens(tokenizer), PrintableTokens(teacher))
    sizes = None if teacher is None else (TokenBytes(tokenizer), TokenBytes(teacher))
    console.print(legend(has_colour=has_colour))
    for number, sample in enumerate(found):
        kinds = token_kinds(sample, isolate_documents=isolate_documents)
        totals.add(sample, kinds)
        of_source[names[sample.source]].add(sample, kinds)
        if sizes is not None:
            coverage = coverage.merge(sample_coverage(sample, *sizes))
        if number >= shown:
            continue
        console.rule(f"sample {number}")
        if sides is None:
            text = sample_text(
                sample, tokenizer, isolate_documents=isolate_documents, has_colour=has_colour
            )
            console.print(text)
        else:
            table = chunk_table(
                sample, *sides, kinds, rows=chunks, width=console.width, has_colour=has_colour
            )
            console.print(table, soft_wrap=False)
    console.rule(title)
    for line in (*totals.lines(), *histogram(totals.lengths, width=console.width)):
        console.print(line, markup=False)
    for name, own in of_source.items() if len(names) > 1 else ():
        for line in own.lines():
            console.print(f"{name}: {line}", markup=False)
    for line in coverage_lines(coverage) if sides is not None else ():
        console.print(line, markup=False)


COMMAND = Command(
    description="""Show the samples of a run coloured by mask, their lengths and totals.

    megatron-distill data preview tiny.yaml
    megatron-distill data preview chat.yaml data.sequence_length=2048 --samples 8 --width 120

Green is trained by cross-entropy and distillation, cyan by distillation only, dim is the context;
without colours [[...]] and ((...)) stand for them. Conversations are prepared and cached for the
run. With a teacher of another tokenizer each row is a chunk with the tokens of both sides. Nothing
is trained. An error that would stop the run before its first step comes first; for a teacher that
is not on this machine add teacher=null objective.terms=[].""",
    add_arguments=_add_arguments,
    run=_run,
)

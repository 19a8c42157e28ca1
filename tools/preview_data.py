"""Show what a run would train on: samples coloured by mask, lengths and totals.

    python tools/preview_data.py configs/chat.yaml
    python tools/preview_data.py configs/chat.yaml data.sequence_length=2048 --samples 8 --width 120

Green is trained by cross-entropy and distillation, cyan by distillation only, dim is read; without
colours [[...]] and ((...)) stand for them. Conversations are prepared and kept in the cache of the
run, which finds them there. Nothing is trained. What would stop the run before its first step is
said first; a teacher that is not on this machine: teacher=null objective.terms=[].
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from megatron_distill import log
from megatron_distill.config import RunConfig, load_config
from megatron_distill.data.preview import Totals, histogram, legend, sample_text, token_kinds
from megatron_distill.errors import ConfigError, MegatronDistillError

INTERRUPTED_STATUS = 130


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the YAML file of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for the run")
    parser.add_argument("--samples", type=int, default=4, help="samples to print (4)")
    parser.add_argument("--counted", type=int, default=256, help="samples to count over (256)")
    parser.add_argument("--width", type=int, default=None, help="columns (the terminal's)")
    arguments = parser.parse_intermixed_args()
    log.configure(0)
    try:
        _preview(
            load_config(arguments.config, arguments.overrides),
            samples=arguments.samples,
            counted=max(arguments.samples, arguments.counted),
            console=Console(width=arguments.width, highlight=False, soft_wrap=True),
        )
    except MegatronDistillError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return INTERRUPTED_STATUS
    except BrokenPipeError:  # of a pager that was left
        return 0
    return 0


def _preview(config: RunConfig, *, samples: int, counted: int, console: Console) -> None:
    # Only now, because of what they import; a wrong configuration is said at once.
    import torch

    from megatron_distill.runtime.mcore_patches import prepare_megatron_core

    if not config.data.sources:
        raise ConfigError("data.sources = []: there is no corpus to show; name one")
    prepare_megatron_core(on_cuda=torch.cuda.is_available())
    # Only now: these import Megatron-Core, which had to be prepared first.
    from megatron_distill.data.sources import open_training
    from megatron_distill.train.assemble.checks import check_models, check_start
    from megatron_distill.train.assemble.failed_start import without_empty_folders
    from megatron_distill.train.assemble.sources import data_options, source_specs
    from megatron_distill.train.assemble.tokenizer import Vocabulary, read_tokenizer

    check_start(config)
    tokenizer = read_tokenizer(config)
    check_models(config, Vocabulary(tokenizer.vocab_size, tokenizer.identity))
    with without_empty_folders(Path(config.folder) / "cache"):
        source = open_training(
            source_specs(config.data.sources),
            tokenizer=tokenizer,
            options=data_options(config),
            seed=config.seed,
        )
    has_colour = console.color_system is not None
    isolate_documents = config.data.isolate_documents
    totals = Totals()
    console.print(legend(has_colour=has_colour))
    for number in range(counted):
        sample = source.next_sample()
        totals.add(sample, token_kinds(sample, isolate_documents=isolate_documents))
        if number < samples:
            console.rule(f"sample {number}")
            console.print(
                sample_text(
                    sample, tokenizer, isolate_documents=isolate_documents, has_colour=has_colour
                )
            )
    console.rule(f"the first {counted} samples of {config.data.sequence_length} positions")
    for line in (*totals.lines(), *histogram(totals.lengths, width=console.width)):
        console.print(line, markup=False)


if __name__ == "__main__":
    sys.exit(main())

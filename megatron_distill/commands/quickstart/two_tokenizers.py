"""Students with a tokenizer of their own, one run per loss: launch/quickstart_tokenizers.py."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console

from megatron_distill.commands.command import ScriptMain
from megatron_distill.commands.quickstart.losses_compared import (
    ALONE,
    ALONE_NOTE,
    LOSSES,
    TOKENIZERS,
    LossRuns,
    carry_out,
    chosen_losses,
    exported_folder,
    margins_over_seeds,
    remove,
    show_margins,
)
from megatron_distill.commands.quickstart.options import (
    Checkout,
    add_arguments,
    child_run,
    place_of,
    script_main,
    seeds_of,
    write_outcomes,
)
from megatron_distill.config import RunConfig, load_config
from megatron_distill.data.samples import Sample
from megatron_distill.data.sources import (
    DataOptions,
    TeacherReading,
    all_held_out,
    sample_texts,
)
from megatron_distill.data.tokenizers.open import Tokenizer, trained_in
from megatron_distill.errors import ConfigError
from megatron_distill.evaluation.bits_per_byte import (
    HeldOutText,
    measure_text,
    require_comparable,
)
from megatron_distill.evaluation.child_runs import ChildRun, ask
from megatron_distill.evaluation.independent_loss import IndependentLoss, independent_loss
from megatron_distill.train.assemble.sources import data_options, source_specs

__all__ = ["Tokens", "independent_of", "parse", "plan", "prepare", "script"]


TEACHER: Final = "quickstart_teacher"
STUDENT: Final = "quickstart_tokenizers_student"


@dataclass(frozen=True)
class Tokens:
    """One model's tokenizer in the folder of results, and the held-out documents in its tokens.

    samples: reads them again.
    """

    folder: Path
    text: HeldOutText
    samples: Callable[[], Iterator[Sample]]

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings of a run with this tokenizer that validates on all held-out documents."""
        return (
            f"data.tokenizer.path={self.folder}",
            "data.tokenizer.train_vocab_size=null",
            f"validation.samples={self.text.samples}",
        )


def script(description: str | None, *, root: Path) -> ScriptMain:
    """Return the main function of the script with this description, in the checkout `root`."""
    return script_main(description, root, parse=parse, all_seeds=all_seeds)


def all_seeds(arguments: argparse.Namespace, checkout: Checkout, console: Console) -> None:
    """Carry out the runs of every seed, and show or write their result."""
    losses = chosen_losses(arguments.losses)
    if arguments.fresh:
        shutil.rmtree(arguments.output / TOKENIZERS, ignore_errors=True)
    teacher, student = prepare(arguments, checkout, console)
    every = [
        plan(arguments, seed, losses, teacher, student, checkout) for seed in seeds_of(arguments)
    ]
    if arguments.fresh:
        for runs in every:
            remove(runs)
    outcomes = []
    for runs in every:
        independent = independent_of(runs, teacher, student, checkout)
        outcomes.append(carry_out(runs, independent, console))
    margins = margins_over_seeds(every, outcomes)
    if len(every) > 1:
        show_margins(margins, console)
    if arguments.result is not None:
        write_outcomes(arguments.result, outcomes, {"margin_bits_per_byte": margins})


def independent_of(
    runs: LossRuns, teacher: Tokens, student: Tokens, checkout: Checkout
) -> Callable[[ChildRun], IndependentLoss]:
    """The held-out loss of a baseline's exported model by `transformers` alone."""

    def measured(child: ChildRun) -> IndependentLoss:
        folder, tokens = exported_folder(child), teacher if child is runs.teacher else student
        words = ("export", "--checkpoint", str(child.folder), "--hf", str(folder))
        ask(checkout.convert, words, answer=folder / "config.json")
        return independent_loss(folder, tokens.samples())

    return measured


def parse(words: Sequence[str] | None, description: str | None = None) -> argparse.Namespace:
    """Read the arguments of the script."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    example = "data.validation_fraction=0.01"
    add_arguments(parser, output=Path("runs/quickstart_tokenizers"), example=example)
    parser.add_argument(
        "--losses",
        default=",".join(LOSSES),
        help="the losses to compare, separated by commas (default: %(default)s)",
    )
    return parser.parse_args(words)


def prepare(
    arguments: argparse.Namespace, checkout: Checkout, console: Console
) -> tuple[Tokens, Tokens]:
    """Train both tokenizers, unless an earlier call has, and read the held-out documents.

    The teacher's come first. Raises ConfigError or DataError, before anything is written if a
    configuration is invalid.
    """
    for override in arguments.overrides:
        if override.startswith(("validation.samples", "data.tokenizer")):
            raise ConfigError(
                f"{override}: bits per byte are of all held-out documents, in tokenizers trained "
                "here; set data.validation_fraction for less text"
            )
    configs = [
        load_config(checkout.config(name), arguments.overrides) for name in (TEACHER, STUDENT)
    ]
    folders = [arguments.output / TOKENIZERS / name for name in ("teacher", "student")]
    console.print(f"[bold]tokenizers[/bold] {arguments.output / TOKENIZERS}")
    teacher, student = (
        _tokenizer(config, folder) for config, folder in zip(configs, folders, strict=True)
    )
    console.print(
        f"  {teacher.vocab_size:,} tokens for the teacher, {student.vocab_size:,} for the students"
    )
    reading = TeacherReading(teacher, _teacher_length(configs[1]), 1.0, workers=0)
    options = [_options(config) for config in configs]
    options[1] = replace(options[1], teacher=reading)
    found = [
        _tokens(*one) for one in zip(folders, configs, (teacher, student), options, strict=True)
    ]
    require_comparable(student=found[1].text, teacher=found[0].text)
    return found[0], found[1]


def _tokenizer(config: RunConfig, folder: Path) -> Tokenizer:
    wanted = config.data.tokenizer
    assert wanted.train_vocab_size is not None, "both files train a tokenizer"
    specs = source_specs(config.data.sources)
    return trained_in(
        folder,
        lambda: sample_texts(specs, options=_options(config), characters=wanted.train_bytes),
        vocab_size=wanted.train_vocab_size,
        output=str(folder),
    )


def _options(config: RunConfig) -> DataOptions:
    return data_options(config.data, Path(config.output), shows_progress=False)


def _teacher_length(config: RunConfig) -> int:
    assert config.teacher is not None, "the student's file names a teacher"
    return config.teacher.sequence_length or config.data.sequence_length


def _tokens(folder: Path, config: RunConfig, tokenizer: Tokenizer, options: DataOptions) -> Tokens:
    def samples() -> Iterator[Sample]:
        specs = source_specs(config.data.sources)
        return all_held_out(specs, tokenizer=tokenizer, options=options)

    isolate = config.data.isolate_documents
    text = measure_text(samples(), tokenizer.token_bytes(), isolate_documents=isolate)
    return Tokens(folder, text, samples)


def plan(
    arguments: argparse.Namespace,
    seed: int | None,
    losses: Sequence[str],
    teacher: Tokens,
    student: Tokens,
    checkout: Checkout,
) -> LossRuns:
    """Return the runs of one seed; raises ConfigError if a configuration is invalid."""
    place = place_of(arguments, seed)
    shared = [*([] if seed is None else [f"seed={seed}"]), *arguments.overrides]

    def run(name: str, label: str, config: str, *own: str) -> ChildRun:
        file, overrides = checkout.config(config), [f"output={place / name}", *own, *shared]
        return child_run(
            name,
            label,
            file,
            overrides,
            place=place,
            script=checkout.train,
            steps=arguments.steps,
        )

    def student_run(name: str, label: str, terms: str) -> ChildRun:
        checkpoint = f"teacher.checkpoint={place / 'teacher'}"
        own = (*student.overrides, checkpoint, f"objective.terms={terms}")
        return run(f"student_{name}", label, STUDENT, *own)

    alone = student_run("alone", "student alone", ALONE)
    return LossRuns(
        place=place,
        seed=load_config(checkout.config(STUDENT), shared).seed,
        teacher=run("teacher", "teacher", TEACHER, *teacher.overrides),
        alone=replace(alone, note=ALONE_NOTE),
        distilled=[student_run(name, name, LOSSES[name]) for name in losses],
        teacher_text=teacher.text,
        student_text=student.text,
    )

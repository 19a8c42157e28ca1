"""Evaluate a trained student and its teacher on held-out data."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_distill.commands.command import Command, note, spelled, with_launch
from megatron_distill.train.assemble.trained_config import (
    NO_RUN,
    add_run_arguments,
    load_trained_run,
    run_and_overrides,
)

if TYPE_CHECKING:
    from megatron_distill.runtime.launch import Launch


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, example="e.g. teacher.checkpoint=runs/teacher")
    parser.add_argument("--json", type=Path, help="write the figures to this file, not out")


def _objection(arguments: argparse.Namespace) -> str | None:
    return NO_RUN if run_and_overrides(arguments)[0] is None else None


def _run(arguments: argparse.Namespace) -> int:
    return with_launch(lambda launch: _evaluate(arguments, launch))


def _evaluate(arguments: argparse.Namespace, launch: Launch) -> None:
    from megatron_distill.runtime.launch import joined_world

    began = time.perf_counter()
    run, overrides = run_and_overrides(arguments)
    assert run is not None, "the check asks for one"
    with launch.together("configuration"):
        config = load_trained_run(run, overrides, world_size=launch.size)
    with joined_world(
        **config.runtime.model_dump(),
        splits_layers=config.parallel.splits_layers,
        launch=launch,
    ) as device:
        from megatron_distill.train.assemble.trained_run import evaluate

        figures = evaluate(config, device)
    if launch.rank == 0:
        text = json.dumps(figures, indent=1) + "\n"
        if arguments.json is None:
            sys.stdout.write(text)
        else:
            arguments.json.write_text(text, encoding="utf-8")
    place = "" if arguments.json is None else f"; the figures are in {arguments.json}"
    note(
        launch,
        f"{run}: evaluated on {config.validation.samples:,} held-out sequences of "
        f"{config.data.sequence_length:,} tokens in {time.perf_counter() - began:.1f} s{place}",
        f"text from it: {spelled(arguments, 'generate')} {run}",
        f"a Hugging Face folder of it: {spelled(arguments, 'convert')} export --checkpoint {run} "
        "--hf DIR",
    )


COMMAND = Command(
    description="""Held-out losses of a trained student and its teacher, as JSON.

    megatron-distill evaluate runs/first
    megatron-distill evaluate runs/first parallel.tensor=2 --processes 2""",
    add_arguments=_add_arguments,
    run=_run,
    check=_objection,
    in_ranks=True,
)

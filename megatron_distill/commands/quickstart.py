"""The common part of launch/quickstart.py and launch/quickstart_tokenizers.py."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from megatron_distill.config import RunConfig, load_config, to_yaml
from megatron_distill.errors import MegatronDistillError
from megatron_distill.evaluation.quickstart import (
    ChildRun,
    RunStoppedError,
    over_seeds,
    processes_here,
    write_json,
)

__all__ = [
    "STOPPED_STATUS",
    "add_arguments",
    "child_run",
    "exit_status",
    "place_of",
    "seeds_of",
    "write_result",
]

STOPPED_STATUS: Final = 130


def add_arguments(parser: argparse.ArgumentParser, *, output: Path, example: str) -> None:
    """Add the options of both scripts; `output` is the default folder."""
    parser.add_argument(
        "--output", type=Path, default=output, help="folder of all runs (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, help="in place of the files' seed")
    parser.add_argument("--seeds", type=_numbers, help="everything once per seed, e.g. 1,2,3")
    parser.add_argument("--steps", type=int, help="in place of train.steps, in all runs")
    parser.add_argument("--fresh", action="store_true", help="delete earlier runs first")
    parser.add_argument("--result", type=Path, help="write the outcome of every seed as JSON")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help=f"changes to all runs, e.g. {example}"
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def seeds_of(arguments: argparse.Namespace) -> Sequence[int | None]:
    """The seeds to run; None for the files' seed."""
    return arguments.seeds or [arguments.seed]


def place_of(arguments: argparse.Namespace, seed: int | None) -> Path:
    """The folder of one seed's runs."""
    output: Path = arguments.output
    return output / f"seed_{seed}" if arguments.seeds else output


def child_run(
    name: str,
    label: str,
    file: str,
    overrides: Sequence[str],
    *,
    place: Path,
    script: Path,
    steps: int | None,
) -> ChildRun:
    """Return a training run; with `steps` the warm-up is at most a fifth of them.

    Raises ConfigError if its configuration is invalid.
    """
    overrides = list(overrides)
    if steps is not None:
        warmup = load_config(file, overrides).schedule.warmup_steps
        overrides.append(f"train.steps={steps}")
        overrides.append(f"schedule.warmup_steps={min(warmup, steps // 5)}")
    config = load_config(file, overrides)
    return ChildRun(
        name=name,
        label=label,
        place=place,
        script=script,
        arguments=("--config", file, *overrides),
        settings=to_yaml(config),
        steps=config.train.steps,
        processes=_processes(config),
    )


def _processes(config: RunConfig) -> int:
    parallel, train = config.parallel, config.train
    return processes_here(
        model_ranks=parallel.tensor * parallel.pipeline * parallel.context,
        micro_batches=train.global_batch_size // train.micro_batch_size,
    )


def write_result(
    path: Path, outcomes: Sequence[Mapping[str, Any]], spreads: Mapping[str, object]
) -> None:
    """Write the outcomes of all seeds, with the command line that gave them."""
    command = shlex.join([Path(sys.executable).name, *sys.argv])
    write_json(path, over_seeds(outcomes, command, spreads))


def exit_status(carry_out: Callable[[Console], None]) -> int:
    """Carry out and return the exit status; errors and signals end in one line."""
    console = Console(highlight=False, soft_wrap=True)
    try:
        carry_out(console)
    except MegatronDistillError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"\nerror: {error}", markup=False
        )
        return 1
    except (RunStoppedError, KeyboardInterrupt) as stop:
        reason = str(stop) or "stopped"
        console.print(f"\n{reason}. The same command goes on from here.", markup=False)
        return STOPPED_STATUS
    return 0

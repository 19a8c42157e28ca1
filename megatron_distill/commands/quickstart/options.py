"""The common part of launch/quickstart.py and launch/quickstart_tokenizers.py: options, result."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from megatron_distill.commands.command import ScriptMain
from megatron_distill.config import RunConfig, load_config, to_yaml
from megatron_distill.errors import MegatronDistillError
from megatron_distill.evaluation.child_runs import (
    ChildRun,
    RunStoppedError,
    processes_here,
    write_json,
)
from megatron_distill.launching.option_numbers import whole_number, whole_numbers
from megatron_distill.runtime.torchrun import available_cores, processor_name

__all__ = [
    "STOPPED_STATUS",
    "Checkout",
    "add_arguments",
    "child_run",
    "exit_status",
    "place_of",
    "script_main",
    "seeds_of",
    "spread",
    "write_outcomes",
]

STOPPED_STATUS: Final = 130


@dataclass(frozen=True)
class Checkout:
    """A checkout of the repository: its scripts, and its configurations by name."""

    root: Path

    @property
    def train(self) -> Path:
        """The script of a run."""
        return self.root / "launch" / "pretrain_distill.py"

    @property
    def capture(self) -> Path:
        """The script that writes a store."""
        return self.root / "launch" / "cache_teacher.py"

    @property
    def evaluate(self) -> Path:
        """The script of held-out losses and tasks."""
        return self.root / "launch" / "evaluate.py"

    @property
    def generate(self) -> Path:
        """The script that writes texts."""
        return self.root / "launch" / "generate.py"

    @property
    def convert(self) -> Path:
        """The script of exports."""
        return self.root / "tools" / "convert_checkpoint.py"

    def config(self, name: str) -> str:
        """A shipped configuration, relative to the working directory."""
        return os.path.relpath(self.root / "configs" / f"{name}.yaml")


def add_arguments(parser: argparse.ArgumentParser, *, output: Path, example: str) -> None:
    """Add the options of both scripts; `output` is the default folder."""
    parser.add_argument(
        "--output", type=Path, default=output, help="folder of all runs (default: %(default)s)"
    )
    parser.add_argument("--seed", type=whole_number("1"), help="in place of the files' seed")
    parser.add_argument(
        "--seeds", type=whole_numbers("1,2,3"), help="everything once per seed, e.g. 1,2,3"
    )
    parser.add_argument(
        "--steps", type=whole_number("200"), help="in place of train.steps, in all runs"
    )
    parser.add_argument("--fresh", action="store_true", help="delete earlier runs first")
    parser.add_argument("--result", type=Path, help="write the outcome of every seed as JSON")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help=f"changes to all runs, e.g. {example}"
    )


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


def write_outcomes(
    path: Path, outcomes: Sequence[Mapping[str, Any]], spreads: Mapping[str, object]
) -> None:
    """Write the outcomes of all seeds, with the command line that gave them."""
    command = shlex.join([Path(sys.executable).name, *sys.argv])
    write_json(path, _over_seeds(outcomes, command, spreads))


def script_main(
    description: str | None,
    root: Path,
    *,
    parse: Callable[[Sequence[str] | None, str | None], argparse.Namespace],
    all_seeds: Callable[[argparse.Namespace, Checkout, Console], None],
) -> ScriptMain:
    """Return the main function of a script with this description, in the checkout `root`."""

    def main(arguments: Sequence[str] | None = None) -> int:
        """Run the command and return its exit status."""
        given = parse(arguments, description)
        return exit_status(lambda console: all_seeds(given, Checkout(root), console))

    return main


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


def _over_seeds(
    outcomes: Sequence[Mapping[str, object]], command: str, spreads: Mapping[str, object]
) -> Mapping[str, object]:
    """Return the outcomes with the spreads of their margins, the command, date and hardware."""
    return {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": _hardware(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **spreads,
        "seeds": list(outcomes),
    }


def spread(values: Sequence[float]) -> Mapping[str, float]:
    """Return mean, least and most of one figure over the seeds."""
    return {"mean": statistics.fmean(values), "least": min(values), "most": max(values)}


def _hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{processor_name()}, {available_cores()} cores"

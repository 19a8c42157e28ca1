"""Settings, layout and memory of a command, before any rank: megatron_distill.commands.preflight.

It runs on the first node of a job. For `train` and `capture` it writes the same as their
--print-config, and compares the memory that they need with that of the node; this imports torch and
Megatron-Core, and without GPUs and limits of memory they are not needed. Commands that read a model
show nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from megatron_distill.commands import capture, evaluate, generate, rollout, train
from megatron_distill.commands.command import PROGRAM, Command
from megatron_distill.commands.job import file_and_overrides
from megatron_distill.errors import MegatronDistillError, TrainingError
from megatron_distill.launching.node import gpus_listed, ranks_here
from megatron_distill.launching.node_memory import host_memory

if TYPE_CHECKING:
    from megatron_distill.config.schema import JobConfig

__all__ = ["main"]

_JOBS: Final = {"train": train.COMMAND, "capture": capture.COMMAND}
_READERS: Final[dict[str, tuple[Command, Callable[[argparse.Namespace, int], object]]]] = {
    "evaluate": (evaluate.COMMAND, evaluate.configuration),
    "generate": (generate.COMMAND, generate.configuration),
    "rollout": (rollout.COMMAND, generate.configuration),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare settings with ranks and memory; return 0, or 1 after an error of one message."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks-per-node", type=int, help="default: one per GPU, else 1")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="-- COMMAND, words")
    given = parser.parse_args(arguments)
    name, *words = given.program[1:] if given.program[:1] == ["--"] else given.program
    ranks = given.ranks_per_node
    if ranks is None:
        # An nvidia-smi that hangs is found by the check of the nodes, which has others.
        with suppress(TrainingError):
            ranks = ranks_here(announce=False)
    try:
        if name in _JOBS:
            _show_job(name, words, nodes=given.nodes, ranks=ranks)
        elif ranks is not None:
            command, configuration = _READERS[name]
            configuration(command.parse(_parser(name), words), given.nodes * ranks)
    except MegatronDistillError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _parser(name: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"{PROGRAM} {name}", allow_abbrev=False)


def _show_job(name: str, words: Sequence[str], *, nodes: int, ranks: int | None) -> None:
    """Write the settings of a job whose layout and memory fit; raises ConfigError."""
    from megatron_distill.config import (
        check_layout,
        load_capture_config,
        load_config,
        teacher_ranks,
        to_yaml,
    )

    file, overrides = file_and_overrides(_JOBS[name].parse(_parser(name), words))
    load = load_capture_config if name == "capture" else load_config
    config: JobConfig = load(file, overrides)
    if ranks is not None:
        teachers = teacher_ranks(config, ranks_per_node=ranks)
        check_layout(config, nodes * ranks, teachers=teachers)
        if _limits_memory():
            from megatron_distill.train.reports.start_memory import refuse_beyond_memory

            refuse_beyond_memory(config, nodes=nodes, local=ranks)
    sys.stdout.write(to_yaml(config))


def _limits_memory() -> bool:
    """Return whether ranks here may end for want of memory: without, nothing is refused."""
    with suppress(TrainingError):
        return gpus_listed() > 0 or host_memory().is_limit
    return False


if __name__ == "__main__":
    sys.exit(main())

"""The options that submissions share, and the layout of a job against the number of its ranks."""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from megatron_distill.commands import capture, train
from megatron_distill.commands.command import PROGRAM
from megatron_distill.commands.job import file_and_overrides
from megatron_distill.errors import ConfigError
from megatron_distill.launching.program import Program, add_folder
from megatron_distill.log import get_logger

__all__ = [
    "add_command",
    "add_variables",
    "check_submission",
    "empty_health",
    "wrong_words",
    "own_name",
    "too_many_ranks",
    "variables_of",
    "wrong_variable",
]

_LOGGER = get_logger(__name__)
_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)  # a name that a shell can export


def add_command(parser: argparse.ArgumentParser) -> None:
    """Add the command of a submission, its words, and the folder of its records."""
    parser.add_argument(
        "--command", default="train",
        help="train, capture, rollout, evaluate, generate, convert, or a script such as prune.py "
        "(default: %(default)s)",
    )  # fmt: skip
    add_folder(parser)
    parser.add_argument(
        "--device", metavar="NAME",
        help="a device of `plan`, as h100-80gb: refuse a run or a capture that its memory does "
        "not hold",
    )  # fmt: skip
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG key=value",
        help="arguments of the command; its options follow --",
    )  # fmt: skip


def add_variables(parser: argparse.ArgumentParser) -> None:
    """Add the environment variables of the ranks."""
    parser.add_argument(
        "--variable", action="append", default=[], metavar="NAME=VALUE",
        help="environment variable of the ranks, as NCCL_SOCKET_IFNAME=eth1; may be repeated",
    )  # fmt: skip


def wrong_variable(given: argparse.Namespace) -> str | None:
    """Return the objection to an environment variable that no shell would set."""
    for one in given.variable:
        name, equals, _ = one.partition("=")
        if not equals or _VARIABLE.fullmatch(name) is None:
            return f"--variable {one}: write NAME=VALUE, as NCCL_SOCKET_IFNAME=eth1"
    return None


def variables_of(given: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables of the ranks; the last of one name counts."""
    return dict(one.split("=", 1) for one in given.variable)


def empty_health(given: argparse.Namespace) -> str | None:
    """Return the objection to a health command without a word, which every node would pass."""
    if given.health_command is None or given.health_command.strip():
        return None
    return (
        f"--health-command {given.health_command!r}: is empty; give a shell command, such as "
        "'nvidia-smi', or leave it out"
    )


def own_name(folder: Path) -> str:
    """Return a name that no job with other records has; folder: an absolute one, of its records."""
    return f"{PROGRAM}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


def too_many_ranks(ranks: int | None, gpus: int | None) -> str | None:
    """Return the objection to more ranks than GPUs of a node; None: a number that is not given."""
    if ranks is None or gpus is None or ranks <= gpus:
        return None
    return (
        f"--ranks-per-node {ranks}: is more than --gpus-per-node {gpus}, and each rank needs a GPU "
        f"of its own; give at most {gpus}, or leave --gpus-per-node out for ranks on CPUs"
    )


def wrong_words(given: argparse.Namespace) -> str | None:
    """Return the objection to a submission without words, or with options for one machine.

    A script may have none, and any.
    """
    if given.command.endswith(".py"):
        return None
    for word in given.words:
        name = word.partition("=")[0]
        if name == "--processes":
            return f"{word}: starts ranks on one machine; give --ranks-per-node to the submission"
        if name in ("--print-config", "--print-layout", "--plan", "--help", "-h"):
            return f"{word}: prints and stops; call `{PROGRAM} {given.command}` with it here"
    if given.words:
        return None
    if given.command in ("train", "capture"):
        return f"{given.command}: give a configuration, such as configs/tiny.yaml"
    return f"{given.command}: give its arguments, and its options after --"


def check_submission(
    program: Program,
    *,
    nodes: int,
    ranks: int | None,
    run: Sequence[str] | None,
    device: str | None,
) -> None:
    """Raise ConfigError, with key and value, unless the layout fits `ranks` of each node.

    ranks: None: known on the nodes alone, and not checked. run: starts Python where the models are,
    whose shapes are checked as well for `train`; None: they may not be seen from here. device:
    whose memory has to hold each rank; None: the ranks compare it with their own.
    """
    if program.command not in ("train", "capture"):
        if device is not None:
            _LOGGER.warning("--device %s: has no effect with %s", device, program.command)
        return
    if ranks is None:
        if device is not None:
            raise ConfigError(
                f"--device {device}: the ranks of a node are not known here; give --ranks-per-node"
            )
        return
    if program.command == "train" and run is not None:
        program.check_layout(run, nodes=nodes, ranks=ranks)
        if device is None:
            return
    from megatron_distill.config import (
        check_layout,
        load_capture_config,
        load_config,
        teacher_ranks,
    )

    is_capture = program.command == "capture"
    command = capture.COMMAND if is_capture else train.COMMAND
    file, overrides = file_and_overrides(command.parse(argparse.ArgumentParser(), program.words))
    load = load_capture_config if is_capture else load_config
    config = load(file, overrides)
    teachers = teacher_ranks(config, ranks_per_node=ranks)
    check_layout(config, nodes * ranks, teachers=teachers)
    if device is not None:
        from megatron_distill.train.reports.memory_check import refuse_beyond_device

        refuse_beyond_device(config, device, nodes=nodes, local=ranks)

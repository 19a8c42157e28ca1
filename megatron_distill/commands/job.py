"""A job as a command: configuration file, equal ranks, work, a stop after the current step.

No slow import before the signal handlers are set: torch alone takes seconds.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import megatron_distill
from megatron_distill import log
from megatron_distill.commands.command import Command, with_launch
from megatron_distill.errors import ConfigError
from megatron_distill.launching.checks.node_view import sources_digest
from megatron_distill.log import get_logger
from megatron_distill.runtime.folder_lock import refuse_holder
from megatron_distill.runtime.termination import TerminationRequest

if TYPE_CHECKING:
    from megatron_distill.config import TeacherRanks
    from megatron_distill.config.schema import JobConfig, ParallelConfig
    from megatron_distill.runtime.launch import Device, Launch

__all__ = ["Job", "config_file", "file_and_overrides", "require_same_start", "shipped_folder"]

J = TypeVar("J", bound="JobConfig")

_LOGGER = get_logger(__name__)
_STOPPING: Final = "stopping after this step"
# In a repository, and in a wheel within the package.
_SHIPPED: Final = "configs"
# Option, value and help of the reports that a job may have, by the field of `Job`.
REPORTS: Final = {
    "layout": (
        "--print-layout",
        "RANKS",
        "show the division of 16 or 2x8 ranks (on 2 machines), stop",
    ),
    "plan": ("--plan", "NxDEVICE", "show the layouts that fit, as for 64xh100-80gb, stop"),
}


@dataclass(frozen=True)
class Job(Generic[J]):
    """One kind of job: `load` reads its file, `run` runs it in an initialised world.

    `layout` describes its ranks, from their number and those of teachers alone; None: there is no
    `--print-layout`. `plan` describes the layouts that fit a number of devices of a name; None:
    there is no `--plan`. `lock` names the file that a start of the job locks, and its folder for
    messages.
    """

    load: Callable[[Path, Sequence[str]], J]
    run: Callable[[J, Device, TerminationRequest], bool]
    lock: Callable[[J], tuple[Path, str]]
    layout: Callable[[J, int, TeacherRanks], str] | None = None
    plan: Callable[[J, int, str], str] | None = None

    def command(self, *, description: str, example: str) -> Command:
        """Return the job as a command; `example` shows changes to its configuration."""

        def add_arguments(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--config", metavar="CONFIG", help="the same YAML file")
            parser.add_argument("--print-config", action="store_true", help="show all keys, stop")
            for field, (option, metavar, text) in REPORTS.items():
                if getattr(self, field) is not None:
                    parser.add_argument(option, metavar=metavar, help=text)
            text = f"YAML file, here or shipped, then changes to it, {example}"
            parser.add_argument("words", nargs="*", metavar="CONFIG key=value", help=text)

        return Command(
            description=description,
            add_arguments=add_arguments,
            run=self._work,
            check=_objection,
            in_ranks=True,
        )

    def _work(self, given: argparse.Namespace) -> int:
        if given.print_config:
            return self._print_config(given)
        if getattr(given, "print_layout", None) is not None:
            return self._print_layout(given)
        if getattr(given, "plan", None) is not None:
            return self._print_plan(given)
        # From here on a signal takes effect at the end of a step.
        with TerminationRequest(note=_STOPPING) as termination:
            termination.expect_from_torchrun()
            return with_launch(lambda launch: self._join(given, launch, termination))

    def _print_config(self, given: argparse.Namespace) -> int:
        from megatron_distill.config import to_yaml

        sys.stdout.write(to_yaml(self.load(*file_and_overrides(given))))
        return 0

    def _print_layout(self, given: argparse.Namespace) -> int:
        from megatron_distill.config import check_layout, teacher_ranks

        assert self.layout is not None
        nodes, per_node = _machines(given.print_layout)
        config = self.load(*file_and_overrides(given))
        teachers = teacher_ranks(config, ranks_per_node=per_node)
        check_layout(config, nodes * per_node, teachers=teachers)
        sys.stdout.write(self.layout(config, nodes * per_node, teachers))
        return 0

    def _print_plan(self, given: argparse.Namespace) -> int:
        assert self.plan is not None
        count, _, device = given.plan.partition("x")
        if not count.isdecimal() or not int(count) or not device:
            raise ConfigError(
                f"--plan {given.plan}: write a number of devices and a device, as 64xh100-80gb"
            )
        sys.stdout.write(self.plan(self.load(*file_and_overrides(given)), int(count), device))
        return 0

    def _join(
        self, given: argparse.Namespace, launch: Launch, termination: TerminationRequest
    ) -> None:
        from megatron_distill.config import check_layout, load_warnings, teacher_ranks
        from megatron_distill.runtime.launch import joined_world, local_size
        from megatron_distill.runtime.lone_failure import tell_unfinished

        with launch.together("configuration"):
            path, overrides = file_and_overrides(given)
            config = self.load(path, overrides)
            teachers = teacher_ranks(config, ranks_per_node=local_size())
            check_layout(config, launch.size, teachers=teachers)
            if launch.rank == 0:
                refuse_holder(*self.lock(config))
                for warning in load_warnings(path, overrides, type(config)):
                    _LOGGER.warning("%s", warning)
        parallel = config.parallel
        if teachers:
            launch, parallel = _divided(replace(launch, teacher_ranks=teachers), config)
        with joined_world(
            **config.runtime.of_world(), splits_layers=parallel.splits_layers, launch=launch
        ) as device:
            if not self.run(config, device, termination):
                tell_unfinished()


def _divided(launch: Launch, config: JobConfig) -> tuple[Launch, ParallelConfig]:
    """Compare the ranks of a launch with several roles; return it and the layout of this role."""
    from megatron_distill.config import teacher_parallel

    role = launch.role
    log.configure(launch.rank - role.first, name=launch.roles.name(launch.rank))
    with launch.together("identity"):
        require_same_start(launch, config)
    is_student = role == launch.roles.student
    return launch, config.parallel if is_student else teacher_parallel(config, role.name)


def file_and_overrides(given: argparse.Namespace) -> tuple[Path, list[str]]:
    """Return the configuration's file and the changes to it, from a job's arguments."""
    named, changes = given.config, given.words
    if named is None:
        named, *changes = given.words
    return config_file(named), changes


def _machines(text: str) -> tuple[int, int]:
    """Return machines and ranks of each, from `16` or `2x8`."""
    parts = text.split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(
            f"--print-layout {text}: write a number of ranks, as 16, or machines and ranks of "
            "each, as 2x8"
        )
    *nodes, per_node = map(int, parts)
    return (nodes[0] if nodes else 1), per_node


def _objection(given: argparse.Namespace) -> str | None:
    if given.config is not None:
        return None
    if not given.words:
        return "give a configuration, a YAML file such as configs/tiny.yaml"
    first = given.words[0]
    if "=" in first and not Path(first).exists():
        return f"the first word is {first}; give a YAML file before the changes to it"
    return None


def shipped_folder() -> Path:
    """Return the folder of the shipped configurations."""
    assert megatron_distill.__file__ is not None
    package = Path(megatron_distill.__file__).resolve().parent
    installed = package / _SHIPPED
    return installed if installed.is_dir() else package.parent / _SHIPPED


def config_file(name: str) -> Path:
    """Return the file of `name`: an existing path, or else the shipped file of that name.

    `tiny.yaml` and `configs/tiny.yaml` name the same shipped file. A name without a file is
    returned unchanged, so that reading it raises the error.
    """
    path = Path(name)
    if path.exists() or path.is_absolute() or ".." in path.parts:
        return path
    parts = path.parts[1:] if path.parts[:1] == (_SHIPPED,) else path.parts
    shipped = shipped_folder().joinpath(*parts)
    if not shipped.is_file():
        return path
    _LOGGER.info("configuration: %s, shipped with megatron-distill", shipped)
    return shipped


def require_same_start(launch: Launch, config: JobConfig) -> None:
    """Raise ConfigError unless this rank has the code and the configuration of rank 0.

    Student and teacher recompute the same units from both, so that a difference would go unnoticed
    until an answer is for other tokens. Call it inside `Launch.together`.
    """
    from megatron_distill.config import to_yaml

    own = {"sources": sources_digest(), "configuration": to_yaml(config)}
    name = launch.roles.name(launch.rank)

    def difference(first: str) -> str:
        of_first = json.loads(first)
        where = f"{name} on {socket.gethostname()}"
        if of_first["sources"] != own["sources"]:
            return (
                f"{where} runs another version of megatron-distill than {launch.roles.name(0)}; "
                "install the same one on all machines"
            )
        lines = own["configuration"].splitlines()
        first_lines = of_first["configuration"].splitlines()
        differing = sorted({*lines} ^ {*first_lines})
        return (
            f"{where} has another configuration than {launch.roles.name(0)}: "
            f"{'; '.join(line.strip() for line in differing)}; start all ranks with the same file "
            "and the same changes"
        )

    launch.require_equal("identity/value", json.dumps(own), difference=difference)

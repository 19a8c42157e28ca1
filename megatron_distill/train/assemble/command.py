"""The command line of a job under torchrun: arguments, configuration, world, work.

Nothing heavy is imported before signals are listened to: torch alone takes seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from megatron_distill import log
from megatron_distill.errors import MegatronDistillError
from megatron_distill.log import get_logger
from megatron_distill.runtime.termination import TerminationRequest

if TYPE_CHECKING:
    from megatron_distill.config.schema import JobConfig
    from megatron_distill.runtime.launch import Device, Launch

J = TypeVar("J", bound="JobConfig")

_LOGGER = get_logger(__name__)


class JobCommand(Generic[J]):
    """One kind of job as a command: `load` reads its file, `run` does it in a prepared world."""

    def __init__(
        self,
        *,
        description: str | None,
        example: str,
        load: Callable[[str, Sequence[str]], J],
        run: Callable[[J, Device, TerminationRequest], bool],
    ) -> None:
        self._description = description
        self._example = example
        self._load = load
        self._run = run

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        """Run the command and return its exit status."""
        given = self._parse(arguments)
        log.configure(int(os.environ.get("RANK", "0")))
        if given.print_config:
            return self._print_config(given)
        # From here on a signal waits for the end of a step.
        with TerminationRequest() as termination:
            from megatron_distill.runtime.launch import Launch

            termination.expect_from_torchrun()
            launch = Launch.from_environment()
            return launch.status_of(lambda: self._join(given, launch, termination))

    def _parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(description=self._description)
        parser.add_argument("--config", required=True, help="YAML file")
        parser.add_argument(
            "--print-config", action="store_true", help="show the resolved keys, stop"
        )
        parser.add_argument("overrides", nargs="*", metavar="key=value", help=self._example)
        return parser.parse_args(arguments)

    def _print_config(self, given: argparse.Namespace) -> int:
        from megatron_distill.config import to_yaml

        try:
            text = to_yaml(self._load(given.config, given.overrides))
        except MegatronDistillError as error:
            sys.stderr.write(f"error: {error}\n")
            return 1
        sys.stdout.write(text)
        return 0

    def _join(
        self, given: argparse.Namespace, launch: Launch, termination: TerminationRequest
    ) -> None:
        from megatron_distill.config import check_layout, load_warnings
        from megatron_distill.runtime.launch import joined_world

        with launch.together("configuration"):
            config = self._load(given.config, given.overrides)
            check_layout(config, launch.size)
            if launch.rank == 0:
                for warning in load_warnings(given.config, given.overrides, type(config)):
                    _LOGGER.warning("%s", warning)
        with joined_world(**config.runtime.model_dump(), launch=launch) as device:
            self._run(config, device, termination)

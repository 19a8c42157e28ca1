"""Keep what a teacher says in a store: torchrun launch/cache_teacher.py --config FILE.

An interrupted capture is started again with the same command, in any layout.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_distill import log
from megatron_distill.errors import MegatronDistillError
from megatron_distill.runtime.termination import TerminationRequest

if TYPE_CHECKING:
    from megatron_distill.runtime.launch import Launch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    given = _parse(arguments)
    log.configure(int(os.environ.get("RANK", "0")))
    if given.print_config:
        return _print_config(given)
    # From here on a signal waits for the end of a step; torch alone takes seconds to import.
    with TerminationRequest() as termination:
        from megatron_distill.runtime.launch import Launch

        termination.expect_from_torchrun()
        launch = Launch.from_environment()
        return launch.status_of(lambda: _capture(given, launch, termination))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file of the capture")
    parser.add_argument("--print-config", action="store_true", help="show the resolved keys, stop")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="e.g. parallel.tensor=2 store.k=128"
    )
    return parser.parse_args(arguments)


def _print_config(given: argparse.Namespace) -> int:
    from megatron_distill.config import load_capture_config, to_yaml

    try:
        text = to_yaml(load_capture_config(given.config, given.overrides))
    except MegatronDistillError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(text)
    return 0


def _capture(given: argparse.Namespace, launch: Launch, termination: TerminationRequest) -> None:
    from megatron_distill.config import check_layout, load_capture_config
    from megatron_distill.runtime.world import joined_world

    with launch.together("configuration"):
        config = load_capture_config(given.config, given.overrides)
        check_layout(config, launch.size)
    with joined_world(**config.runtime.model_dump(), launch=launch) as device:
        # Only now: this imports Megatron-Core, which had to be prepared first.
        from megatron_distill.train.assemble_capture import run_capture

        run_capture(config, device, termination)


if __name__ == "__main__":
    sys.exit(main())

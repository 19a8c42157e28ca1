"""Held-out losses of a trained student and its teacher.

    python launch/evaluate.py runs/first
    torchrun --nproc-per-node 2 launch/evaluate.py runs/first parallel.tensor=2

Runs in one process, or under torchrun in the layout that `parallel` names.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_distill import log
from megatron_distill.runtime.launch import Launch, joined_world
from megatron_distill.train.assemble.trained_config import (
    NO_RUN,
    add_run_arguments,
    load_trained_run,
    run_and_overrides,
)


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_arguments(parser, example="e.g. teacher.checkpoint=runs/teacher")
    parser.add_argument("--json", type=Path, help="write the figures to this file, not out")
    arguments = parser.parse_intermixed_args()
    run, overrides = run_and_overrides(arguments)
    if run is None:
        parser.error(NO_RUN)
    log.configure(int(os.environ.get("RANK", "0")))
    launch = Launch.from_environment()
    return launch.status_of(lambda: _evaluate(run, overrides, launch, json_file=arguments.json))


def _evaluate(
    run: str, overrides: Sequence[str], launch: Launch, *, json_file: Path | None
) -> None:
    with launch.together("configuration"):
        config = load_trained_run(run, overrides, world_size=launch.size)
    with joined_world(**config.runtime.model_dump(), launch=launch) as device:
        from megatron_distill.train.assemble.trained_run import evaluate

        figures = evaluate(config, device)
    if launch.rank == 0:
        text = json.dumps(figures, indent=1) + "\n"
        if json_file is None:
            sys.stdout.write(text)
        else:
            json_file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

"""Held-out losses of a trained student and its teacher: launch/evaluate.py --run FOLDER.

Runs in one process as it is, or under torchrun in the layout that `parallel` names.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from megatron_distill import log
from megatron_distill.runtime.launch import Launch
from megatron_distill.runtime.world import joined_world
from megatron_distill.train.trained_run import load_trained_run


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="output folder of the student's run")
    parser.add_argument("--json", type=Path, help="write the figures to this file, not out")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="changes to the run's configuration, e.g. teacher.checkpoint=runs/teacher",
    )
    arguments = parser.parse_args()
    log.configure(int(os.environ.get("RANK", "0")))
    launch = Launch.from_environment()
    return launch.status_of(lambda: _evaluate(arguments, launch))


def _evaluate(arguments: argparse.Namespace, launch: Launch) -> None:
    with launch.together("configuration"):
        config = load_trained_run(arguments.run, arguments.overrides, world_size=launch.size)
    with joined_world(**config.runtime.model_dump(), launch=launch) as device:
        from megatron_distill.train.assemble_evaluation import evaluate

        figures = evaluate(config, device)
    if launch.rank == 0:
        text = json.dumps(figures, indent=1) + "\n"
        if arguments.json is None:
            sys.stdout.write(text)
        else:
            arguments.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

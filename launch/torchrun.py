"""torchrun, ended by a signal as a run should end: launch/torchrun.py [torchrun options] SCRIPT ...

torchrun answers SIGTERM and SIGINT by passing them on, killing what is left after 30 seconds
(--shutdown-timeout), and leaving with status 1, whatever its ranks made of it. Here the ranks are
asked themselves: they finish their step, save and leave with 0, and so do torchrun and this. A
second signal, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds (default 300), kills them.

What follows SCRIPT is the script's alone; torchrun itself would read `--run` there as its own.
"""

from __future__ import annotations

import os
import sys

from megatron_distill.runtime.torchrun import protect_script_options, run_child, shutdown_seconds


def main() -> int:
    """Run torchrun with this command's arguments and return its exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", *protect_script_options(sys.argv[1:])]
    return run_child(command, environment=os.environ, grace_seconds=shutdown_seconds()).status


if __name__ == "__main__":
    sys.exit(main())

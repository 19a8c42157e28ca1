"""torchrun with a clean stop on a signal: launch/torchrun.py [torchrun options] SCRIPT ...

torchrun forwards SIGTERM and SIGINT to its ranks and kills them after 30 seconds
(--shutdown-timeout). It then exits with status 1, even if the ranks exit with 0. This wrapper sends
SIGTERM to the ranks itself: they finish their step, save and exit with 0, as do torchrun and the
wrapper. A second signal, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds (default 300), kills them.

All arguments after SCRIPT go to the script; torchrun alone would parse `--run` there as its own.
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

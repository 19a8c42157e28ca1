"""Compute held-out losses of a trained student and its teacher, or results of tasks.

    python launch/evaluate.py runs/first
    torchrun --nproc-per-node 2 launch/evaluate.py runs/first parallel.tensor=2

Every parallel size is 1, whatever the run's was, unless the command names it: `parallel.tensor=2`.
The teacher runs on the same ranks in the same layout, unless `teacher.parallel` is given here.
"""

from __future__ import annotations

import sys

from megatron_distill.commands.evaluate import COMMAND

main = COMMAND.script(__doc__)

if __name__ == "__main__":
    sys.exit(main())

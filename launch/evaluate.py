"""Compute held-out losses of a trained student and its teacher, or results of tasks.

    python launch/evaluate.py runs/first
    torchrun --nproc-per-node 2 launch/evaluate.py runs/first parallel.tensor=2

Runs in one process, or under torchrun in the layout of the section `parallel`.
"""

from __future__ import annotations

import sys

from megatron_distill.commands.evaluate import COMMAND

main = COMMAND.script(__doc__)

if __name__ == "__main__":
    sys.exit(main())

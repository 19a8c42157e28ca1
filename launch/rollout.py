"""Write texts of a model for the prompts of a file, as data to train on.

    python launch/rollout.py --hf models/teacher --prompts prompts.jsonl --output rollouts/teacher
    torchrun --nproc-per-node 2 launch/rollout.py runs/first parallel.tensor=2 \
        --prompts prompts.jsonl --output rollouts/first

The same words go on after an interruption, in any layout. See docs/generation.md.
"""

from __future__ import annotations

import sys

from megatron_distill.commands.rollout import COMMAND

main = COMMAND.script(__doc__)

if __name__ == "__main__":
    sys.exit(main())

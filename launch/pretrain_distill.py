"""Train a student, with a teacher or without: torchrun launch/pretrain_distill.py --config FILE."""

from __future__ import annotations

import sys

from megatron_distill.commands.train import COMMAND

main = COMMAND.script(__doc__)

if __name__ == "__main__":
    sys.exit(main())

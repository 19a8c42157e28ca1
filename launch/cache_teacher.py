"""Capture a teacher's outputs in a store: torchrun launch/cache_teacher.py --config FILE.

To resume an interrupted capture, run the same command, in any parallel layout.
"""

from __future__ import annotations

import sys

from megatron_distill.commands.capture import COMMAND

main = COMMAND.script(__doc__)

if __name__ == "__main__":
    sys.exit(main())

"""Show what a run would train on: samples coloured by mask, lengths and totals.

    python tools/preview_data.py configs/chat.yaml
    python tools/preview_data.py configs/chat.yaml data.sequence_length=2048 --samples 8 --width 120

Green is trained by cross-entropy and distillation, cyan by distillation only, dim is read; without
colours [[...]] and ((...)) stand for them. Conversations are prepared and kept in the cache of the
run, which finds them there. Nothing is trained. What would stop the run before its first step is
said first; a teacher that is not on this machine: teacher=null objective.terms=[].
"""

from __future__ import annotations

import sys

from megatron_distill.commands.preview import COMMAND

main = COMMAND.script(__doc__)

if __name__ == "__main__":
    sys.exit(main())

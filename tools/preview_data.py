"""Show the samples of a run coloured by mask, their lengths and totals.

    python tools/preview_data.py configs/chat.yaml
    python tools/preview_data.py configs/chat.yaml data.sequence_length=2048 --samples 8 --width 120

Green is trained by cross-entropy and distillation, cyan by distillation only, dim is the context;
without colours [[...]] and ((...)) stand for them. Conversations are prepared and cached for the
run. Nothing is trained. An error that would stop the run before its first step comes first; for a
teacher that is not on this machine add teacher=null objective.terms=[].
"""

from __future__ import annotations

import sys

from megatron_distill.commands.preview import COMMAND

main = COMMAND.script(__doc__)

if __name__ == "__main__":
    sys.exit(main())

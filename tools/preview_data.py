"""Show the samples of a run coloured by mask, their lengths and totals.

    python tools/preview_data.py configs/chat.yaml
    python tools/preview_data.py configs/chat.yaml data.sequence_length=2048 --samples 8 --width 120

Green tokens are trained by cross-entropy and distillation, cyan ones by distillation only; dim
tokens are context. Without colours green becomes [[...]] and cyan ((...)). Conversations are
prepared and cached for the run. With a teacher of another tokenizer each row is a chunk with the
tokens of both sides. Nothing is trained. Errors that would stop the run before its first step are
reported first. For a teacher that is not on this machine add teacher=null objective.terms=[].
"""

from __future__ import annotations

import sys

from megatron_distill.commands.preview import COMMAND

main = COMMAND.script(__doc__)

if __name__ == "__main__":
    sys.exit(main())

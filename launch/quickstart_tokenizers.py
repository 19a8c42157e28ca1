"""Distil a teacher into students with another tokenizer, and compare the losses for it.

Each run is one of launch/pretrain_distill.py under torchrun. The first trains the teacher of the
quickstart. The next trains a small student, whose tokenizer differs from the teacher's, without
distillation. Both are exported, and their held-out losses must be those that `transformers` alone
gives. Then one run per loss trains the same student with the teacher, from the same initial weights
and on the same texts. The result is in bits per byte of the held-out documents. The same command
resumes an interrupted run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_distill.commands.quickstart.two_tokenizers import script

main = script(__doc__, root=Path(__file__).resolve().parent.parent)

if __name__ == "__main__":
    sys.exit(main())

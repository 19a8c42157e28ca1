"""Distil a small model on this machine and show the gain over training without a teacher.

Three runs of launch/pretrain_distill.py under torchrun. The first trains a teacher on a corpus.
The second trains a small student on the corpus alone. The third trains the same student with the
teacher, from the same initial weights and on the same tokens. With --offline
launch/cache_teacher.py also captures the teacher's outputs in a store; a fourth run trains the
student from that store, without a teacher in memory. The same command resumes an interrupted run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_distill.commands.quickstart.one_tokenizer import script

main = script(__doc__, root=Path(__file__).resolve().parent.parent)

if __name__ == "__main__":
    sys.exit(main())

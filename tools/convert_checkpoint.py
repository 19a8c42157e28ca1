"""Convert Hugging Face weights to checkpoints of this library, and back.

    python tools/convert_checkpoint.py import --hf DIR --output CKPT
    python tools/convert_checkpoint.py export --checkpoint CKPT --hf OUT --dtype bfloat16
    python tools/convert_checkpoint.py verify --hf DIR --checkpoint CKPT
    python tools/convert_checkpoint.py verify --hf DIR --against OUT

A checkpoint is a run's output folder, one of its checkpoints/step_* folders, or a folder written
by `import`. Under torchrun the ranks share the work: torchrun --nproc-per-node 4 tools/convert_...
`verify` rounds the checkpoint to the dtypes of the files before it compares bits.
"""

from __future__ import annotations

import sys

from megatron_distill.commands.convert import COMMAND

main = COMMAND.script(__doc__)

if __name__ == "__main__":
    sys.exit(main())

"""Generate text with a trained student, a checkpoint or a Hugging Face folder.

    python launch/generate.py runs/first --prompt "def main("
    python launch/generate.py runs/first --chat --prompt "Is it sunny?"
    torchrun --nproc-per-node 2 launch/generate.py runs/first parallel.tensor=2 --prompt "def main("
    python launch/generate.py --hf models/first --prompt "def main("
    python launch/generate.py --hf models/first --transformers --prompt "def main("

Every parallel size is 1, whatever the run's was, unless the command names it: `parallel.tensor=2`.
With --transformers `transformers` generates the text with the model of an exported folder.
"""

from __future__ import annotations

import sys

from megatron_distill.commands.generate import COMMAND

main = COMMAND.script(__doc__)

if __name__ == "__main__":
    sys.exit(main())

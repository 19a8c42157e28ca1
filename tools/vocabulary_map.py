"""Build a map between the vocabularies of two tokenizers, inspect it or verify it.

    python tools/vocabulary_map.py build --student models/llama --teacher models/qwen \\
        --output maps/llama_qwen.safetensors --text 'data/*.txt'
    python tools/vocabulary_map.py inspect maps/llama_qwen.safetensors --ids 201 1042
    python tools/vocabulary_map.py inspect maps/llama_qwen.safetensors " the" \\
        --student models/llama --teacher models/qwen
    python tools/vocabulary_map.py verify maps/llama_qwen.safetensors --student models/llama \\
        --teacher models/qwen

A training run builds its map by itself. `verify` ends with status 1 where the file is not the map
of these tokenizers.
"""

from __future__ import annotations

import sys

from megatron_distill.commands.vocabulary_map import COMMAND

main = COMMAND.script(__doc__)

if __name__ == "__main__":
    sys.exit(main())

"""Tokenise a corpus once, into the .bin/.idx pair that `format: megatron` reads.

    python tools/tokenize_corpus.py --tokenizer DIR --output corpora/code 'data/*.jsonl.zst'
    python tools/tokenize_corpus.py --tokenizer DIR --output corpora/books --format text books/*

Then, in a run: data.sources: [{format: megatron, paths: [corpora/code]}]
"""

from __future__ import annotations

import sys

from megatron_distill.commands.tokenize import COMMAND

main = COMMAND.script(__doc__)

if __name__ == "__main__":
    sys.exit(main())

"""Inspect a teacher store, verify or repair it, or convert another program's files.

    python tools/teacher_store.py inspect stores/code
    python tools/teacher_store.py verify stores/code
    python tools/teacher_store.py stats stores/code
    python tools/teacher_store.py repair stores/code
    python tools/teacher_store.py convert --from maxtext part_*.array_record --to stores/code \\
        --vocab-size 128256

`verify` needs the store alone: it compares lists of documents with the records, not with the texts.
A wrong digest of a text makes its document a missing one, and never a wrong loss, since a run
compares the tokens. `repair` moves bad shards and bad lists of documents to quarantine/; running
the capture again rewrites them.
"""

from __future__ import annotations

import sys

from megatron_distill.commands.store import COMMAND

main = COMMAND.script(__doc__)

if __name__ == "__main__":
    sys.exit(main())

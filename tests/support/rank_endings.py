"""A rank that ends in the manner of its argument: python -m tests.support.rank_endings MANNER."""

from __future__ import annotations

import os
import sys
import time

from megatron_distill.commands.command import with_launch
from megatron_distill.errors import ConfigError
from megatron_distill.runtime.launch import Launch


def end(manner: str) -> int:
    """End in this manner on the second rank; the first one waits to be ended, save for `error`."""

    def refuse(_: Launch) -> None:
        raise ConfigError("train.steps = 0: must be 1 or more")

    if manner == "error":
        return with_launch(refuse)
    if os.environ["RANK"] == "0":
        time.sleep(600)
    return int(manner)


if __name__ == "__main__":
    sys.exit(end(sys.argv[1]))

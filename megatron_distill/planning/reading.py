"""The time in which a run's data is read, while steps run, at recorded rates of one core."""

from __future__ import annotations

from typing import Final

__all__ = ["reading_seconds"]

# Tokens per second: benchmarks/results/data.json. `load`: prepared conversations of the large file.
# Files of format megatron have no record, and hold their tokens as these do.
_LOADED: Final = 3.16e6
# `stream`: texts that are tokenised and packed while they are read. Tokenizers that use more cores
# are faster, so that this is the most that texts can take.
_TOKENISED: Final = 0.5e6
# Tokens of both sides, about two for each of the student, in a process that tokenises, finds their
# bytes and aligns: benchmarks/results/align.md, whole files.
_ALIGNED: Final = 0.69e6


def reading_seconds(*, texts: float, aligned_by: int | None) -> float:
    """Return the seconds in which the one rank that reads has a token of the student.

    texts: share of the tokens that are tokenised while they are read. aligned_by: processes that
    tokenise for two tokenizers, 0: the reading one; None: there is one tokenizer.
    """
    if aligned_by is not None:
        return 2 / (_ALIGNED * max(1, aligned_by))
    return texts / _TOKENISED + (1 - texts) / _LOADED

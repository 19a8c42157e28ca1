"""Rank-aware logging on the standard library: one line format, INFO from rank 0 only."""

import logging
import sys
from typing import TextIO

__all__ = ["LINE_FORMAT", "configure", "get_logger"]

ROOT = "megatron_distill"
LINE_FORMAT = "%(asctime)s %(levelname)-7s {name} %(name)s: %(message)s"
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


def configure(
    rank: int,
    *,
    name: str | None = None,
    level: int = logging.INFO,
    other_ranks_level: int = logging.WARNING,
    stream: TextIO | None = None,
) -> logging.Logger:
    """Send the package's log lines to one stream (stderr) and return the package's logger.

    Rank 0 shows records from `level` upwards, every other rank from `other_ranks_level` upwards.
    A second call replaces the first, so that the rank may be given again once it is known. `name`
    stands in place of the number, as `teacher.0` does.
    """
    logger = logging.getLogger(ROOT)
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(
        logging.Formatter(LINE_FORMAT.format(name=name or f"rank {rank}"), TIME_FORMAT)
    )
    for previous in list(logger.handlers):
        logger.removeHandler(previous)
    logger.addHandler(handler)
    logger.setLevel(level if rank == 0 else other_ranks_level)
    logger.propagate = False
    return logger


def get_logger(name: str) -> logging.Logger:
    """Return the logger of one module, `get_logger(__name__)`, below the package's logger."""
    return logging.getLogger(name if name.split(".")[0] == ROOT else f"{ROOT}.{name}")

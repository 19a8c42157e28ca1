"""The shipped configurations: configs/ in a repository, a folder of the package in a wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import megatron_distill
from megatron_distill import log

__all__ = ["config_file", "shipped_folder"]

FOLDER: Final = "configs"

logger = log.get_logger(__name__)


def shipped_folder() -> Path:
    """Return the folder of the shipped configurations."""
    assert megatron_distill.__file__ is not None
    package = Path(megatron_distill.__file__).resolve().parent
    installed = package / FOLDER
    return installed if installed.is_dir() else package.parent / FOLDER


def config_file(name: str) -> Path:
    """Return the file of `name`: an existing path, or else the shipped file of that name.

    `tiny.yaml` and `configs/tiny.yaml` name the same shipped file. A name without a file is
    returned unchanged, so that reading it raises the error.
    """
    path = Path(name)
    if path.exists() or path.is_absolute() or ".." in path.parts:
        return path
    parts = path.parts[1:] if path.parts[:1] == (FOLDER,) else path.parts
    shipped = shipped_folder().joinpath(*parts)
    if not shipped.is_file():
        return path
    logger.info("configuration: %s, shipped with megatron-distill", shipped)
    return shipped

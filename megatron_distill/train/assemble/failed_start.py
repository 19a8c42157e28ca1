"""The folder of a start that fails: as it was before, and gone where there was none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from megatron_distill.log import get_logger

__all__ = ["FolderAsFound", "without_empty_folders"]

_LOGGER = get_logger(__name__)


class FolderAsFound:
    """What stood in a folder before a start, which puts it back unless the start succeeds.

    To be made by every rank, before the folder is; only the first one looks and removes.

    Args:
        folder: of a run or a store.
        kept_file: name of a file in it that a start writes anew.
        prepared: path within it of prepared data, which took its time and is kept where complete.
        work: paths within it of results; where a start finds some of another one, all is left.
    """

    def __init__(
        self, folder: Path, *, kept_file: str | None, prepared: str, work: Sequence[str]
    ) -> None:
        self._folder = folder
        self._prepared = folder / prepared
        self._work = [folder / path for path in work]
        self._file = None if kept_file is None else folder / kept_file
        self._is_left_alone = True
        if dist.get_rank() == 0:
            with suppress(OSError):  # whoever writes there says what is wrong
                self._look()

    def _look(self) -> None:
        folder = self._folder
        self._missing = _missing(folder)
        self._names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        self._held = {path for path in self._work if _has_content(path)}
        self._content = _content(self._file)
        self._is_left_alone = False

    def has_started(self) -> None:
        """Say that the start succeeded: what is in the folder stays."""
        self._is_left_alone = True

    @contextmanager
    def put_back_on_failure(self) -> Iterator[None]:
        """Put the folder back when the block is left before `has_started`.

        To be entered once this start alone may write there.
        """
        try:
            yield
        finally:
            if not self._is_left_alone:
                with suppress(OSError):  # the start's own error is what is to be said
                    self._put_back()

    def _put_back(self) -> None:
        if any(_has_content(path) for path in self._work if path not in self._held):
            return  # of another start, which held the folder while this one waited
        if self._file is not None and self._content is not None:
            self._file.write_bytes(self._content)
        is_prepared = _has_content(self._prepared)
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path.name in self._names:
                continue
            if not (is_prepared and self._prepared.is_relative_to(path)):
                _remove(path)
            elif path != self._prepared:
                for inner in path.iterdir():
                    if inner != self._prepared:
                        _remove(inner)
        if is_prepared:
            _LOGGER.info("%s remains: prepared conversations, which the next start uses",
                         self._prepared)  # fmt: skip
        for path in self._missing:
            path.rmdir()  # fails, and ends this, where something is left


@contextmanager
def without_empty_folders(folder: Path) -> Iterator[None]:
    """Remove a folder at the end, and those above it, that the block made and left empty.

    Harmless beside a job that works in the same folder; needs no world.
    """
    missing = _missing(folder)
    try:
        yield
    finally:
        with suppress(OSError):
            for path in missing:
                path.rmdir()  # fails, and ends this, where something is left


def _missing(folder: Path) -> list[Path]:
    """Return the folder and those above it that are not there, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _content(path: Path | None) -> bytes | None:
    return path.read_bytes() if path is not None and path.is_file() else None


def _has_content(path: Path) -> bool:
    """Return whether a file is not empty, or a folder has such a file somewhere below."""
    if path.is_dir():
        return any(_has_content(inner) for inner in path.iterdir())
    return path.is_file() and path.stat().st_size > 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()

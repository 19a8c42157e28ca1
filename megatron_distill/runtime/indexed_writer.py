"""Writing Megatron-Core's `.bin/.idx` pairs, which appear under their names only when whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from numpy.typing import NDArray

from megatron_distill.errors import DataError


class IndexedWriter:
    """Appends documents to a pair that `open_indexed` finishes or removes."""

    def __init__(self, data: Path, *, vocab_size: int) -> None:
        self._data = data
        with _writing(data):
            data.parent.mkdir(parents=True, exist_ok=True)
            self._builder = IndexedDatasetBuilder(str(data), dtype=DType.optimal_dtype(vocab_size))
        self.documents = 0
        self.tokens = 0

    def add(self, parts: Sequence[NDArray[np.int32]]) -> None:
        """Append one document, given as consecutive rows of token ids. Raises DataError."""
        tokens = np.concatenate(parts)
        with _writing(self._data):
            self._builder.add_document(tokens, [len(tokens)])
        self.documents += 1
        self.tokens += len(tokens)

    def finish(self, index: Path) -> None:
        """Write the index of what was appended. Raises DataError."""
        with _writing(index):
            self._builder.finalize(str(index))

    def close(self) -> None:
        """Close the data file, whether it is whole or not."""
        # What is still to be written need not fit any more; the file goes anyway.
        with suppress(OSError):
            self._builder.data_file.close()


@contextmanager
def open_indexed(prefix: Path, *, vocab_size: int, overwrite: bool) -> Iterator[IndexedWriter]:
    """Write PREFIX.bin and PREFIX.idx, with two bytes per token if the vocabulary allows.

    Whatever goes wrong inside leaves neither file. Raises DataError if the pair is there already
    and not to be replaced, if it cannot be written, or if no document was added.
    """
    data, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    partial = {path: Path(f"{path}.partial") for path in (data, index)}
    for path in partial:
        if path.exists() and not overwrite:
            raise DataError(f"{path}: exists already; choose another --output or add --overwrite")
    try:
        writer = IndexedWriter(partial[data], vocab_size=vocab_size)
        try:
            yield writer
            if not writer.documents:
                raise DataError(f"{data}: there is no document to write; look at the sources")
            writer.finish(partial[index])
        finally:
            writer.close()
        # Without its data file a pair does not look whole, whatever stops us in between.
        with _writing(data):
            data.unlink(missing_ok=True)
            partial[index].replace(index)
            partial[data].replace(data)
    finally:
        for path in partial.values():
            with suppress(NotADirectoryError):
                path.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror}); free disk space or choose another "
            "--output"
        ) from error

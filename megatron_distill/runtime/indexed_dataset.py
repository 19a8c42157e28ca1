"""Megatron-Core's `.bin/.idx` datasets, opened by one rank alone.

Megatron-Core's own builder waits for every rank, and its order depends on the number of samples
that the run will draw. Here its `GPTDataset` is built one epoch at a time with the epoch's seed. It
needs no collective, its order is a function of (seed, epoch), and the stream is endless.
"""

from __future__ import annotations

import hashlib
import json
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
from numpy.typing import NDArray

from megatron_distill.errors import DataError
from megatron_distill.runtime.atomic_files import partial_paths, replace_files, whole_folder

_HEADER: Final = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents
_MAGIC: Final = b"MMIDIDX\x00\x00"
_SEQUENCE_BYTES: Final = 4 + 8  # length and pointer
_DOCUMENT_BYTES: Final = 8


@dataclass(frozen=True)
class _Vocabulary:
    """The tokenizer attributes that Megatron-Core's datasets read."""

    vocab_size: int
    eod: int
    pad: int = -1
    special_tokens_dict: dict[str, int] = field(default_factory=dict)

    @property
    def unique_identifiers(self) -> dict[str, int]:
        return {"vocab_size": self.vocab_size, "eod": self.eod}


def check_files(prefix: str) -> None:
    """Raise DataError unless PREFIX.bin and PREFIX.idx exist, are complete, and match."""
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            raise DataError(
                f"{path}: no such file; data.sources.paths of format megatron are prefixes of a "
                ".bin and an .idx file"
            )
    try:
        with index.open("rb") as stream:
            header = stream.read(_HEADER.size)
        with data.open("rb") as stream:
            stream.read(1)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise DataError(f"{index}: not a Megatron-Core index; preprocess the corpus again")
    _, version, code, sequences, documents = _HEADER.unpack(header)
    if version != 1 or code not in {kind.value for kind in DType}:
        raise DataError(f"{index}: unknown version {version} or data type {code}")
    if sequences == 0:
        raise DataError(f"{index}: contains no document")
    expected = _HEADER.size + sequences * _SEQUENCE_BYTES + documents * _DOCUMENT_BYTES
    if index.stat().st_size < expected:
        raise DataError(
            f"{index}: cut off at {index.stat().st_size} of {expected} bytes; copy it again"
        )
    lengths = np.memmap(index, np.int32, "r", offset=_HEADER.size, shape=(sequences,))
    expected = int(lengths.sum(dtype=np.int64)) * DType.size(code)
    if data.stat().st_size < expected:
        raise DataError(
            f"{data}: cut off at {data.stat().st_size} of {expected} bytes; copy it again"
        )


class IndexedSamples:
    """The training part, or the held-out part, of one `.bin/.idx` prefix.

    The last `held_out_fraction` of the documents is held out (Megatron-Core's `split`). Every
    epoch has the same `len(self)` windows of S + 1 tokens in another order. The remainder at the
    end of an epoch is dropped, as in Megatron-Core. cache: folder of the shuffled indices, reused
    between runs; None builds them anew.
    Raises DataError for missing, damaged, or too little data.
    """

    def __init__(
        self,
        prefix: str,
        *,
        sequence_length: int,
        vocab_size: int,
        eos_id: int,
        held_out_fraction: float,
        is_held_out: bool,
        cache: Path | None,
    ) -> None:
        check_files(prefix)
        self.prefix = prefix
        self._vocabulary = _Vocabulary(vocab_size, eos_id)
        self._sequence_length = sequence_length
        self._split = Split.valid if is_held_out else Split.train
        self._split_weights = f"{1.0 - held_out_fraction!r},{held_out_fraction!r},0.0"
        self._cache = cache
        self._documents = IndexedDataset(prefix)
        self._sequences = self._part()
        tokens = int(self._documents.sequence_lengths[self._sequences].sum(dtype=np.int64))
        self._length = max(0, (tokens - 1) // sequence_length)
        self._epoch: tuple[int, Any] | None = None

    def __len__(self) -> int:
        """Samples in one epoch."""
        return self._length

    def _config(self, seed: int, cache: Path | None) -> GPTDatasetConfig:
        return GPTDatasetConfig(
            random_seed=seed,
            sequence_length=self._sequence_length,
            blend=([self.prefix], None),
            split=self._split_weights,
            path_to_cache=None if cache is None else str(cache),
            tokenizer=self._vocabulary,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )

    def _part(self) -> NDArray[np.int32]:
        """The sequences of this part, split at document ends as by Megatron-Core's builder."""
        bounds = self._config(0, None).split_matrix[self._split.value]
        if bounds is None:
            return np.zeros(0, np.int32)
        ends = self._documents.document_indices  # the first sequence of each document, and the end
        first, last = (round(bound * (len(ends) - 1)) for bound in bounds)
        return np.arange(ends[first], ends[last], dtype=np.int32)

    def documents_end_with(self, token: int, *, limit: int = 1000) -> bool:
        """Whether any of the first `limit` sequences ends with `token`."""
        for sequence in self._sequences[:limit]:
            length = int(self._documents.sequence_lengths[sequence])
            if length and int(self._documents.get(int(sequence), length - 1, 1)[0]) == token:
                return True
        return False

    def tokens(self, index: int, *, epoch: int, seed: int) -> NDArray[np.int32]:
        """Tokens of sample `index` of an epoch whose order is drawn from `seed`: int32 [S + 1].

        Raises DataError if an id lies outside the vocabulary.
        """
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self._build(seed))
        item = self._epoch[1][index]
        tokens = np.append(item["tokens"].numpy(), item["labels"][-1].item())
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocabulary.vocab_size:
            raise DataError(
                f"{self.prefix}.bin: contains token id {low if low < 0 else high}, but the "
                f"tokenizer has {self._vocabulary.vocab_size} ids; set data.tokenizer.path to the "
                "tokenizer that the file was made with"
            )
        return tokens.astype(np.int32)

    def _build(self, seed: int) -> GPTDataset:
        """One epoch; its indices appear in the cache only when complete."""
        root = None if self._cache is None else self._cache / self._cache_name(seed)
        try:
            if root is not None and root.is_dir():
                return self._dataset(seed, root)
            if root is None:
                with tempfile.TemporaryDirectory(prefix="indices-") as scratch:
                    return self._dataset(seed, Path(scratch))
            with whole_folder(root) as partial:
                return self._dataset(seed, partial)
        except OSError as error:
            raise DataError(
                f"{error.filename}: cannot keep dataset indices there ({error.strerror}); set "
                "data.cache to a folder with space that can be written"
            ) from error

    def _dataset(self, seed: int, cache: Path) -> GPTDataset:
        return GPTDataset(
            self._documents, self.prefix, self._sequences, None, self._split,
            self._config(seed, cache),
        )  # fmt: skip

    def _cache_name(self, seed: int) -> str:
        """Digest of everything that the indices depend on, the file's size and mtime included."""
        status = Path(f"{self.prefix}.idx").stat()
        key = [
            str(Path(self.prefix).resolve()), status.st_size, status.st_mtime_ns, seed,
            self._sequence_length, self._split.name, self._split_weights,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]


class IndexedWriter:
    """Appends documents to a .bin/.idx pair that `open_indexed` completes or removes."""

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
        """Write the index of the appended documents. Raises DataError."""
        with _writing(index):
            self._builder.finalize(str(index))

    def close(self) -> None:
        """Close the data file, complete or not."""
        # A full disk may refuse the buffered rest; after a failure the file is removed anyway.
        with suppress(OSError):
            self._builder.data_file.close()


@contextmanager
def open_indexed(prefix: Path, *, vocab_size: int, overwrite: bool) -> Iterator[IndexedWriter]:
    """Write PREFIX.bin and PREFIX.idx, with two bytes per token if the vocabulary allows.

    A failure inside leaves neither file. Raises DataError if the pair exists and `overwrite` is
    false, if it cannot be written, or if no document was added.
    """
    data, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    for path in (data, index):
        if path.exists() and not overwrite:
            raise DataError(f"{path}: exists already; choose another --output or add --overwrite")
    # A pair without its data file is seen as incomplete, should the process end between renames.
    with partial_paths((index, data)) as partial:
        writer = IndexedWriter(partial[data], vocab_size=vocab_size)
        try:
            yield writer
            if not writer.documents:
                raise DataError(f"{data}: no document to write; check the sources")
            writer.finish(partial[index])
        finally:
            writer.close()
        with _writing(data):
            replace_files(partial)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror}); free disk space or choose another "
            "--output"
        ) from error

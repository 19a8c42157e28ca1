"""Conversion of teacher logits saved by MaxText: one `tf.train.Example` per sequence.

Such a file contains k raw logits per position: no log-sum-exp, tail, entropy or label
log-probability, and no identity of the teacher. The store records this.

An Example is read from its wire format: named lists of integers, floats or bytes. It is message 1
{map 1: name 1 -> Feature 2}; a Feature is one of bytes list 1, float list 2, int64 list 3. Each of
these repeats field 1, packed or one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_distill.errors import StoreError, counted
from megatron_distill.store.binary import RecordFile
from megatron_distill.store.manifest import Manifest
from megatron_distill.store.plan import CaptureSettings, Identity
from megatron_distill.store.records import Integers, SampleRecord
from megatron_distill.store.topk_entries import TopKEntries
from megatron_distill.store.writer import StoreWriter

__all__ = ["Features", "WireError", "convert_maxtext", "read_example"]


_REQUIRED: Final = ("inputs", "top_k_logits", "top_k_indices")
_TRAINED: Final = 3
_PICKLE: Final = b"\x80"


def convert_maxtext(
    files: Sequence[Path],
    folder: Path,
    *,
    vocab_size: int,
    identity: Identity,
    codec: str = "u8",
    samples_per_shard: int = 1024,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Write a store from MaxText's files, in their order; resumes an interrupted conversion.

    A sequence of L inputs becomes L - 1 positions: the file lacks the target of the last.

    Args:
        vocab_size: of the teacher; the files do not contain it.
        progress: called with the number of samples done and their total.

    Raises:
        StoreError: a file is missing, damaged, of another version or not of MaxText, or the store
            cannot be written.
    """
    sources = _Sources(files)
    first = sources.read(0)
    length, k = len(first["inputs"]), _k(sources.where(0), first)
    if length < 2:
        raise StoreError(
            f"{sources.where(0)}: a sequence of {counted(length, 'token')} has no label"
        )
    writer = StoreWriter(
        folder,
        settings=CaptureSettings(
            k=k,
            vocab_size=vocab_size,
            sequence_length=length - 1,
            codec=codec,
            normalised_over="kept",
        ),
        identity=identity,
        samples=sources.samples,
        samples_per_shard=samples_per_shard,
    )
    for shard in writer.holes():
        begin = writer.plan.first(shard)
        with writer.shard(shard) as open_shard:
            for sample_id in range(begin, begin + writer.plan.count(shard)):
                where, features = sources.where(sample_id), sources.read(sample_id)
                if len(features["inputs"]) != length or _k(where, features) != k:
                    raise StoreError(
                        f"{where}: {len(features['inputs'])} tokens with {_k(where, features)} "
                        f"logits each, the first sequence has {length} with {k}; convert files of "
                        "one shape"
                    )
                open_shard.add(_record(features, sample_id, k))
                if progress is not None:
                    progress(sample_id + 1, sources.samples)
    return writer.finish()


class _Sources:
    """The sequences of all files under one numbering."""

    def __init__(self, files: Sequence[Path]) -> None:
        if not files:
            raise StoreError("no MaxText file is named; give at least one")
        self._files = [RecordFile(path) for path in files]
        self._places = [
            (file, path, position)
            for file, path in zip(self._files, files, strict=True)
            for position in range(file.count)
        ]
        if not self._places:
            raise StoreError(f"{files[0]}: contains no sequence")

    @property
    def samples(self) -> int:
        return len(self._places)

    def where(self, sample_id: int) -> str:
        _, path, position = self._places[sample_id]
        return f"{path}: record {position}"

    def read(self, sample_id: int) -> Features:
        file, _, position = self._places[sample_id]
        (content,) = file.read([position])
        where = self.where(sample_id)
        if content.startswith(_PICKLE):
            raise StoreError(
                f"{where}: a Python pickle (MaxText until May 2026), which can run code when it "
                "is loaded; capture again with a later MaxText"
            )
        if _is_safetensors(content):
            raise StoreError(
                f"{where}: a batch as safetensors, as MaxText wrote them in May 2026; capture "
                "again with a later MaxText, which writes one tf.train.Example per sequence"
            )
        try:
            features = read_example(content)
        except WireError as error:
            raise StoreError(f"{where}: not a tf.train.Example ({error})") from error
        for name in _REQUIRED:
            if name not in features:
                raise StoreError(
                    f"{where}: has no feature {name}, only {', '.join(sorted(features))}; name "
                    "files that MaxText saved top-k logits to"
                )
        return features


def _is_safetensors(content: bytes) -> bool:
    """Whether the content begins with a JSON object after its length in 8 bytes."""
    return int.from_bytes(content[:8], "little") < len(content) and content[8:9] == b"{"


def _k(where: str, features: Features) -> int:
    length, values = len(features["inputs"]), len(features["top_k_logits"])
    if not length or values % length or not values or len(features["top_k_indices"]) != values:
        raise StoreError(
            f"{where}: {values} logits and {len(features['top_k_indices'])} ids do not divide "
            f"among {length} tokens"
        )
    return values // length


def _record(features: Features, sample_id: int, k: int) -> SampleRecord:
    tokens = _narrow(features["inputs"])
    positions = len(tokens) - 1
    logits = features["top_k_logits"].reshape(-1, k)[:positions].astype(np.float64)
    ids = features["top_k_indices"].reshape(-1, k)[:positions]
    order = np.lexsort((ids, -logits), axis=1)
    logits = np.take_along_axis(logits, order, axis=1)
    with np.errstate(invalid="ignore"):  # the writer refuses NaN
        log_probs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return SampleRecord(
        sample_id=sample_id,
        tokens_S1=tokens,
        document_ids_S1=_documents(features),
        flags_S1=_flags(features),
        entries=TopKEntries(
            _narrow(np.take_along_axis(ids, order, axis=1)),
            log_probs.astype(np.float32),
            None,
        ),
        scalars=None,
    )


def _narrow(ids: NDArray[np.int64]) -> Integers:
    """As int32; ids that do not fit are clipped to the limits, outside of every vocabulary."""
    return np.clip(ids, -1, np.iinfo(np.int32).max).astype(np.int32)


def _optional(features: Features, *names: str) -> Iterator[NDArray[Any]]:
    for name in names:
        values = features.get(name)
        if values is not None and len(values) == len(features["inputs"]):
            yield values


def _documents(features: Features) -> Integers:
    """Documents from 0, -1 on padding: by segment, else by restarts of positions, else one."""
    for segments in _optional(features, "inputs_segmentation"):
        begins = np.diff(segments, prepend=0) != 0
        real = segments != 0
        documents: Integers = np.where(real, (begins & real).cumsum() - 1, -1).astype(np.int32)
        return documents
    for places in _optional(features, "inputs_position"):
        begins = np.diff(places, prepend=-1) != 1
        begins[0] = True
        counted: Integers = (begins.cumsum() - 1).astype(np.int32)
        return counted
    return np.zeros(len(features["inputs"]), np.int32)


def _flags(features: Features) -> NDArray[np.uint8]:
    """Flags of the tokens trained as labels: the target of position i is token i + 1."""
    flags = np.full(len(features["inputs"]), _TRAINED, np.uint8)
    for targets in _optional(features, "targets_segmentation"):
        flags[1:] = np.where(targets[:-1] != 0, _TRAINED, 0)
        return flags
    for segments in _optional(features, "inputs_segmentation"):
        flags[segments == 0] = 0
    return flags


Features: TypeAlias = dict[str, NDArray[Any]]
"""int64 and fp32 arrays by name."""

_VARINT: Final = 0
_FIXED64: Final = 1
_LENGTH: Final = 2
_FIXED32: Final = 5
_FLOATS: Final = 2
_INTEGERS: Final = 3
_MAX_VARINT_BYTES: Final = 10


class WireError(Exception):
    """The bytes are not a valid message; the error text has the position."""


def read_example(content: bytes) -> Features:
    """The integer and float features of an Example. Raises WireError."""
    features: Features = {}
    view = memoryview(content)
    for number, message in _fields(view):
        if number != 1:
            continue
        for entry_number, entry in _fields(message):
            if entry_number == 1:
                name, values = _entry(entry)
                if values is not None:
                    features[name] = values
    if not features:
        raise WireError("it names no feature")
    return features


def _entry(entry: memoryview) -> tuple[str, NDArray[Any] | None]:
    name = ""
    values: NDArray[Any] | None = None
    for number, part in _fields(entry):
        if number == 1:
            try:
                name = bytes(part).decode("utf-8")
            except UnicodeDecodeError as error:
                raise WireError("a feature's name is not text") from error
        elif number == 2:
            for kind, found in _fields(part):
                if kind == _FLOATS:
                    values = _floats(found)
                elif kind == _INTEGERS:
                    values = _integers(found)
    return name, values


def _fields(view: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Number and bytes of each field; a varint as its encoded bytes."""
    offset = 0
    while offset < len(view):
        key, offset = _varint(view, offset)
        kind, start = key & 7, offset
        if kind == _LENGTH:
            length, start = _varint(view, offset)
            offset = start + length
        elif kind == _VARINT:
            _, offset = _varint(view, offset)
        elif kind in (_FIXED64, _FIXED32):
            offset = start + (8 if kind == _FIXED64 else 4)
        else:
            raise WireError(f"a field of unknown type {kind} at byte {start}")
        if offset > len(view):
            raise WireError(f"it ends inside a field that begins at byte {start}")
        yield key >> 3, view[start:offset]


def _varint(view: memoryview, offset: int) -> tuple[int, int]:
    value = 0
    for place, byte in enumerate(view[offset : offset + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, offset + place + 1
    raise WireError(f"a number at byte {offset} does not end")


def _floats(view: memoryview) -> NDArray[np.float32]:
    parts = []
    for number, part in _fields(view):
        if number != 1 or len(part) % 4:
            raise WireError("a float list that is not a list of floats")
        parts.append(np.frombuffer(part, "<f4"))
    return np.concatenate([np.empty(0, np.float32), *parts])


def _integers(view: memoryview) -> NDArray[np.int64]:
    parts = [_varints(part) for _, part in _fields(view)]
    return np.concatenate([np.empty(0, np.int64), *parts])


def _varints(view: memoryview) -> NDArray[np.int64]:
    """Consecutive varints, two's complement in 64 bits, all at once."""
    octets = np.frombuffer(view, np.uint8)
    ends = np.flatnonzero(octets < 0x80)
    if len(octets) == 0:
        return np.empty(0, np.int64)
    if len(ends) == 0 or ends[-1] != len(octets) - 1:
        raise WireError("a list of integers that ends inside of one")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > _MAX_VARINT_BYTES:
        raise WireError("an integer of more than 64 bits")
    places = np.arange(len(octets)) - np.repeat(starts, lengths)
    parts = (octets & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.add.reduceat(parts, starts).view(np.int64)

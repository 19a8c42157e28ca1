"""Takes over teacher logits that MaxText saved: one `tf.train.Example` per sequence.

Such a file holds k raw logits per position and not what they are part of: neither log-sum-exp nor
tail, entropy or label log-probability, nor who the teacher was. The store says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_distill.errors import StoreError
from megatron_distill.signals.store.container import RecordFile
from megatron_distill.signals.store.example_wire import Features, WireError, read_example
from megatron_distill.signals.store.manifest import Manifest
from megatron_distill.signals.store.plan import CaptureSettings, Identity
from megatron_distill.signals.store.records import Integers, SampleRecord, TopKEntries
from megatron_distill.signals.store.writer import StoreWriter

__all__ = ["convert_maxtext"]

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
    """Write a store from MaxText's files, in their order; go on with one that was interrupted.

    A sequence of L inputs becomes L - 1 positions: the file does not say what follows the last.

    Args:
        vocab_size: of the teacher, which the files do not name.
        progress: called with how many samples are done, of how many.

    Raises:
        StoreError: a file is missing, damaged, of another era or not of MaxText, or the store
            cannot be written.
    """
    sources = _Sources(files)
    first = sources.read(0)
    length, k = len(first["inputs"]), _k(sources.where(0), first)
    if length < 2:
        raise StoreError(f"{sources.where(0)}: a sequence of {length} tokens predicts nothing")
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
            raise StoreError(f"{files[0]}: holds no sequence")

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
                f"{where}: a Python pickle, as MaxText wrote them until May 2026; loading one runs "
                "whatever code it holds: capture again with a later MaxText"
            )
        if _is_safetensors(content):
            raise StoreError(
                f"{where}: a batch as safetensors, as MaxText wrote them in May 2026; capture "
                "again with a later MaxText, which writes one tf.train.Example per sequence"
            )
        try:
            features = read_example(content)
        except WireError as error:
            raise StoreError(f"{where}: no tf.train.Example ({error})") from error
        for name in _REQUIRED:
            if name not in features:
                raise StoreError(
                    f"{where}: has no feature {name}, only {', '.join(sorted(features))}; name "
                    "files that MaxText saved top-k logits to"
                )
        return features


def _is_safetensors(content: bytes) -> bool:
    """Whether it begins with the length of a JSON object, in 8 bytes, and with that object."""
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
    with np.errstate(invalid="ignore"):  # what is not a number is refused by the writer
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
    """As int32; what does not fit stays outside of every vocabulary."""
    return np.clip(ids, -1, np.iinfo(np.int32).max).astype(np.int32)


def _optional(features: Features, *names: str) -> Iterator[NDArray[Any]]:
    for name in names:
        values = features.get(name)
        if values is not None and len(values) == len(features["inputs"]):
            yield values


def _documents(features: Features) -> Integers:
    """Documents from 0, -1 on padding: by segment, else by positions that start anew, else one."""
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
    """Which tokens are trained as labels: the target of position i is token i + 1."""
    flags = np.full(len(features["inputs"]), _TRAINED, np.uint8)
    for targets in _optional(features, "targets_segmentation"):
        flags[1:] = np.where(targets[:-1] != 0, _TRAINED, 0)
        return flags
    for segments in _optional(features, "inputs_segmentation"):
        flags[segments == 0] = 0
    return flags

"""The peers' layouts, written from their formulas: MaxText's, Megatron-LM's, DistillKit's.

Every layout gets the same positions and returns the bytes that it would store for them.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

from benchmarks.harness.environment import installed
from benchmarks.stores.data import MadeUpSample, top_k_of
from megatron_distill.store.maxtext import read_example

__all__ = [
    "EXAMPLE_KEYS",
    "ExampleParser",
    "compressed",
    "example_features",
    "example_parsers",
    "megatron_member",
    "write_example",
    "write_examples",
    "write_tar",
]

EXAMPLE_KEYS: Final = ("inputs", "top_k_logits", "top_k_indices")
"""Arrays that MaxText's reader takes."""

_MEGATRON_LOW_BITS: Final = 16
_MEGATRON_VOCAB: Final = 1 << 17
_ZSTD_LEVEL: Final = 3
# MaxText's settings of ArrayRecord, whose default is zstd at level 3.
_EXAMPLE_OPTIONS: Final = "group_size:1"
_INTEGER_BYTES: Final = 10


def example_features(sample: MadeUpSample, k: int, *, is_bf16: bool) -> dict[str, NDArray[Any]]:
    """MaxText's data of a sequence: raw logits and ids, and its four optional arrays."""
    record = sample.record
    logits = sample.logits_SK[:, :k]
    if is_bf16:
        logits = torch.from_numpy(logits.copy()).bfloat16().float().numpy()
    documents = record.document_ids_S1[:-1]
    begins = np.maximum.accumulate(
        np.where(np.diff(documents, prepend=-1) != 0, np.arange(len(documents)), 0)
    )
    return {
        "inputs": record.tokens_S1[:-1].astype(np.int64),
        "top_k_logits": logits.reshape(-1).astype(np.float32),
        "top_k_indices": top_k_of(record).ids_SK[:, :k].reshape(-1).astype(np.int64),
        "sequence_hash": np.asarray([-(1 << 62) + record.sample_id], np.int64),
        "inputs_position": np.arange(len(documents)) - begins,
        "inputs_segmentation": documents.astype(np.int64) + 1,
        "targets_segmentation": documents.astype(np.int64) + 1,
        "targets": record.tokens_S1[1:].astype(np.int64),
    }


def write_example(features: Mapping[str, NDArray[Any]]) -> bytes:
    """A `tf.train.Example` in protobuf's wire format."""
    entries = []
    for name, values in features.items():
        is_float = values.dtype == np.float32
        content = values.tobytes() if is_float else _varints(values)
        feature = _field(2 if is_float else 3, _field(1, content))
        entries.append(_field(1, _field(1, name.encode()) + _field(2, feature)))
    return _field(1, b"".join(entries))


def _varints(values: NDArray[Any]) -> bytes:
    """Integers seven bits at a time, lowest first, all at once."""
    left = values.astype(np.int64).view(np.uint64)
    octets = np.empty((len(left), _INTEGER_BYTES), np.uint8)
    stays = np.empty(octets.shape, np.bool_)
    is_there = np.ones(len(left), np.bool_)
    for place in range(_INTEGER_BYTES):
        low = (left & np.uint64(0x7F)).astype(np.uint8)
        left = left >> np.uint64(7)
        octets[:, place] = low | (np.uint8(0x80) * (left != 0))
        stays[:, place] = is_there
        is_there = left != 0
    return octets[stays].tobytes()


def _field(number: int, content: bytes) -> bytes:
    head = _varints(np.asarray([number << 3 | 2])) + _varints(np.asarray([len(content)]))
    return head + content


def write_examples(path: Path, examples: Sequence[bytes]) -> None:
    """One record per sequence, with MaxText's options."""
    from array_record.python import array_record_module

    writer = array_record_module.ArrayRecordWriter(str(path), _EXAMPLE_OPTIONS)
    for example in examples:
        writer.write(example)
    writer.close()


def megatron_member(samples: Sequence[MadeUpSample], k: int) -> bytes:
    """Megatron-LM's serialised data of an iteration: a list of micro-batches of one sequence."""
    values, low, high = [], [], []
    for sample in samples:
        entries = top_k_of(sample.record)
        ids = entries.ids_SK[:, None, :k]
        assert ids.max() < _MEGATRON_VOCAB, "one bit beyond 16 is all that it has"
        values.append(torch.from_numpy(entries.log_probs_SK[:, None, :k].astype(np.float16)))
        low.append(torch.from_numpy(ids.astype(np.uint16)))
        high.append(torch.from_numpy(ids >> _MEGATRON_LOW_BITS != 0))
    buffer = io.BytesIO()
    torch.save({"values": values, "indices_low": low, "bit_17": high}, buffer)
    return buffer.getvalue()


def compressed(contents: Sequence[bytes]) -> int:
    """Bytes of all contents, each compressed separately as in the peers."""
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
    return sum(len(compressor.compress(content)) for content in contents)


def write_tar(path: Path, members: Sequence[bytes]) -> None:
    """Megatron-LM's file: one compressed member per iteration."""
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
    with tarfile.open(path, "w") as archive:
        for number, member in enumerate(members):
            content = compressor.compress(member)
            about = tarfile.TarInfo(f"{number}.pt.zst")
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))


@dataclass(frozen=True)
class ExampleParser:
    """From an Example's bytes to tokens, logits [L, k] and ids [L, k]; `name` is the decoder."""

    name: str
    parse: Callable[[bytes], Sequence[NDArray[Any]]]


def example_parsers() -> list[ExampleParser]:
    """Ours, all numpy, and protobuf's own where it is installed. TensorFlow's is not required."""
    parsers = [ExampleParser("numpy parser", _parse_by_numpy)]
    if installed("protobuf") is not None:
        parsers.append(ExampleParser("protobuf parser", _protobuf_parser()))
    return parsers


def _parse_by_numpy(content: bytes) -> Sequence[NDArray[Any]]:
    features = read_example(content)
    return _in_rows(*(features[name] for name in EXAMPLE_KEYS))


def _in_rows(
    tokens: NDArray[Any], logits: NDArray[Any], ids: NDArray[Any]
) -> Sequence[NDArray[Any]]:
    length = len(tokens)
    return tokens, logits.reshape(length, -1), ids.reshape(length, -1)


def _protobuf_parser() -> Callable[[bytes], Sequence[NDArray[Any]]]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="example", package="of", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def message(parent: Any, name: str, *fields: tuple[str, int, int, str | None, bool]) -> Any:
        made = parent.add(name=name)
        for field_name, number, kind, of, repeats in fields:
            label = kinds.LABEL_REPEATED if repeats else kinds.LABEL_OPTIONAL
            made.field.add(name=field_name, number=number, type=kind, type_name=of, label=label)
        return made

    nested = kinds.TYPE_MESSAGE
    message(file.message_type, "Floats", ("value", 1, kinds.TYPE_FLOAT, None, True))
    message(file.message_type, "Integers", ("value", 1, kinds.TYPE_INT64, None, True))
    message(
        file.message_type,
        "Feature",
        ("floats", 2, nested, ".of.Floats", False),
        ("integers", 3, nested, ".of.Integers", False),
    )
    features = message(
        file.message_type, "Features", ("feature", 1, nested, ".of.Features.FeatureEntry", True)
    )
    entry = message(
        features.nested_type,
        "FeatureEntry",
        ("key", 1, kinds.TYPE_STRING, None, False),
        ("value", 2, nested, ".of.Feature", False),
    )
    entry.options.map_entry = True
    message(file.message_type, "Example", ("features", 1, nested, ".of.Features", False))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    example = message_factory.GetMessageClass(pool.FindMessageTypeByName("of.Example"))

    def parse(content: bytes) -> Sequence[NDArray[Any]]:
        found = example.FromString(content).features.feature
        tokens, logits, ids = (found[name] for name in EXAMPLE_KEYS)
        return _in_rows(
            np.array(tokens.integers.value, np.int64),
            np.array(logits.floats.value, np.float32),
            np.array(ids.integers.value, np.int64),
        )

    return parse

"""Bytes per token of every layout, written from the same positions."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.environment import installed
from benchmarks.stores.data import VOCAB_SIZE, MadeUpSample, made_up_sample, record_of, top_k_of
from benchmarks.stores.peers import (
    compressed,
    example_features,
    megatron_member,
    write_example,
    write_examples,
    write_tar,
)
from benchmarks.stores.polynomial import BUDGET, RECOMMENDED, Polynomial, encode_bits, write_parquet
from megatron_distill.store import (
    CaptureSettings,
    Identity,
    Plan,
    SampleRecord,
    StoreReader,
    StoreWriter,
)

__all__ = ["Size", "measure_sizes", "write_store"]

KS = (64, 128, 256)
CODECS = ("f32", "f16", "u8")
_BUDGET_K = 50
_IDENTITY = Identity(teacher="made up", tokenizer="made up", dataset="made up")
_ITERATION = 8


@dataclass(frozen=True)
class Size:
    """One layout at one k.

    Attributes:
        layout: name and setting.
        k: ids per position.
        record: bytes per token of a record, before the container and its compression.
        disk: bytes per token of all files; None where the layout's writer is not installed.
    """

    layout: str
    k: int
    record: float
    disk: float | None


def write_store(
    folder: Path, records: Iterable[SampleRecord], settings: CaptureSettings, *, count: int
) -> Plan:
    """Write a whole store of `count` records in one shard."""
    writer = StoreWriter(
        folder, settings=settings, identity=_IDENTITY, samples=count, samples_per_shard=count
    )
    with writer.shard(0) as shard:
        for record in records:
            shard.add(record)
    writer.finish()
    return writer.plan


def measure_sizes(place: Path, *, positions: int, distinct: int, count: int) -> Iterator[Size]:
    """Every layout at every k; the files on disk hold `count` sequences of `positions`."""
    samples = [made_up_sample(number, positions) for number in range(distinct)]
    for k in KS:
        for codec in CODECS:
            yield from _own(place / "store", samples, k=k, codec=codec, count=count)
        for is_bf16 in (False, True):
            yield _maxtext(place / "part", samples, k=k, is_bf16=is_bf16, count=count)
        yield _megatron(place / "tar", samples, k=k, count=count)
        yield _distillkit(place / "parquet", samples, "recommended terms", RECOMMENDED, k)
    yield _distillkit(place / "parquet", samples, "budget", BUDGET, _BUDGET_K)


def _own(
    folder: Path, samples: Sequence[MadeUpSample], *, k: int, codec: str, count: int
) -> Iterator[Size]:
    positions = len(samples[0].logits_SK)
    settings = CaptureSettings(k=k, vocab_size=VOCAB_SIZE, sequence_length=positions, codec=codec)
    records = (
        record_of(samples[number % len(samples)], k, sample_id=number) for number in range(count)
    )
    write_store(folder, records, settings, count=count)
    with StoreReader.open(folder) as reader:
        contents = [reader.packed(sample_id) for sample_id in range(len(samples))]
    disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    tokens = len(contents) * positions
    record = sum(map(len, contents)) / tokens
    yield Size(f"ours, {codec}", k, record, disk / count / positions)
    yield Size(f"ours, {codec}, were it compressed", k, record, compressed(contents) / tokens)


def _maxtext(
    path: Path, samples: Sequence[MadeUpSample], *, k: int, is_bf16: bool, count: int
) -> Size:
    examples = [write_example(example_features(sample, k, is_bf16=is_bf16)) for sample in samples]
    write_examples(path, [examples[number % len(examples)] for number in range(count)])
    tokens = len(samples[0].logits_SK)
    record = sum(map(len, examples)) / len(examples) / tokens
    values = "bf16 logits widened to fp32" if is_bf16 else "fp32 logits"
    return _removed(path, f"MaxText, {values}", k, record, count * tokens)


def _megatron(path: Path, samples: Sequence[MadeUpSample], *, k: int, count: int) -> Size:
    # Within an iteration no sequence may repeat, because it is compressed as a whole.
    size = min(_ITERATION, len(samples))
    members = [
        megatron_member(samples[start : start + size], k)
        for start in range(0, len(samples) - size + 1, size)
    ]
    number = count // size
    write_tar(path, [members[index % len(members)] for index in range(number)])
    tokens = len(samples[0].logits_SK)
    record = len(members[0]) / size / tokens
    return _removed(path, "Megatron-LM, fp16", k, record, number * size * tokens)


def _distillkit(
    path: Path, samples: Sequence[MadeUpSample], name: str, codec: Polynomial, k: int
) -> Size:
    tokens, values, ids = [], [], []
    for sample in samples:
        entries = top_k_of(sample.record)
        tokens.append(sample.record.tokens_S1[:-1].tolist())
        values.append(codec.value_bytes(entries.log_probs_SK[:, :k]))
        ids.append(encode_bits(entries.ids_SK[:, :k], VOCAB_SIZE))
    count = sum(map(len, tokens))
    record = sum(len(part) for row in (*values, *ids) for part in row) / count
    if installed("pyarrow") is None:
        return Size(f"DistillKit, {name}", k, record, None)
    write_parquet(path, tokens, values, ids)
    return _removed(path, f"DistillKit, {name}", k, record, count)


def _removed(path: Path, layout: str, k: int, record: float, tokens: int) -> Size:
    """Return the size of a file that is no longer needed, and remove it."""
    disk = path.stat().st_size / tokens
    path.unlink()
    return Size(layout, k, record, disk)

"""Synthetic teacher signals from a seed, and stores that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_distill.store import (
    CaptureSettings,
    DrawnEntries,
    Identity,
    PositionScalars,
    SampleRecord,
    StoreWriter,
    StudentTokens,
    TopKEntries,
)

IDENTITY = Identity(
    teacher="sha256:aa", tokenizer="sha256:bb", dataset="sha256:cc", settings={"name": "made up"}
)


def settings(**changes: object) -> CaptureSettings:
    """A small store: 16 positions, 8 ids of 131,073."""
    plain: dict = {"k": 8, "vocab_size": 131_073, "sequence_length": 16, "codec": "u8"}
    return CaptureSettings(**(plain | changes))


def tokens_of(sample_id: int, wanted: CaptureSettings) -> dict[str, np.ndarray]:
    """Three documents with a masked prompt each, and padding."""
    rng = np.random.default_rng([7, sample_id])
    width = wanted.sequence_length + 1
    documents = np.sort(rng.integers(0, 3, width)).astype(np.int32)
    documents = np.unique(documents, return_inverse=True)[1].astype(np.int32)
    documents[width - width // 8 :] = -1
    flags = rng.integers(0, 4, width).astype(np.uint8)
    return {
        "tokens_S1": rng.integers(0, wanted.vocab_size, width).astype(np.int32),
        "document_ids_S1": documents,
        "flags_S1": flags,
    }


def top_k_of(
    logits_SV: np.ndarray, k: int, labels_S: np.ndarray, temperatures: tuple[float, ...]
) -> tuple[TopKEntries, PositionScalars]:
    """The stored values of a teacher with these logits, in fp64 and rounded once."""
    logits = logits_SV.astype(np.float64)
    order = np.lexsort((np.broadcast_to(np.arange(logits.shape[1]), logits.shape), -logits))
    chosen = order[:, :k]
    kept = np.take_along_axis(logits, chosen, 1)
    rest = np.take_along_axis(logits, order[:, k:], 1)

    def total(values: np.ndarray) -> np.ndarray:
        return np.logaddexp.reduce(values, axis=1)

    lse = total(logits)
    log_probs = logits - lse[:, None]
    entropy = -(np.exp(log_probs) * log_probs).sum(1)
    label = np.take_along_axis(log_probs, labels_S[:, None].astype(np.int64), 1)[:, 0]
    sums = [total(logits / t) for t in temperatures]
    tails = [total(rest / t) - total(logits / t) for t in temperatures]
    entries = TopKEntries(
        ids_SK=chosen.astype(np.int32),
        log_probs_SK=(kept - lse[:, None]).astype(np.float32),
        log_tail_S=(total(rest) - lse).astype(np.float32),
        temperatures=temperatures,
        log_sum_exp_TS=np.stack(sums).astype(np.float32) if sums else None,
        log_tail_TS=np.stack(tails).astype(np.float32) if tails else None,
    )
    scalars = PositionScalars(
        lse.astype(np.float32), entropy.astype(np.float32), label.astype(np.float32)
    )
    return entries, scalars


def columns_of(records: Sequence[SampleRecord]) -> list[Tensor]:
    """The tensors [S, b, ..] in which a top-k with these values is sent."""
    integers, floats = [], []
    for record in records:
        entries, scalars = record.entries, record.scalars
        assert isinstance(entries, TopKEntries)
        assert scalars is not None
        further = entries.temperatures
        rows = [scalars.log_sum_exp_S, *(entries.log_sum_exp_TS if further else ())]
        rows += [scalars.entropy_S, scalars.label_log_prob_S]
        rows += [entries.log_tail_S, *(entries.log_tail_TS if further else ())]
        floats.append(np.concatenate([np.stack(rows, 1), entries.log_probs_SK], 1))
        integers.append(entries.ids_SK)
    return [torch.from_numpy(np.stack(parts, 1)) for parts in (integers, floats)]


def made_up(sample_id: int, wanted: CaptureSettings) -> SampleRecord:
    """A record without a teacher: probabilities of a power law, ids at random."""
    rng = np.random.default_rng([3, sample_id])
    positions, k = wanted.sequence_length, wanted.k
    plain = tokens_of(sample_id, wanted)
    ids = np.argsort(rng.random((positions, min(wanted.vocab_size, 4 * k))), axis=1)[:, :k]
    # Spread over the vocabulary, its last id included.
    ids = (wanted.vocab_size - 1 - ids * (wanted.vocab_size // min(wanted.vocab_size, 4 * k))) % (
        wanted.vocab_size
    )
    scalars = PositionScalars(*(rng.normal(size=positions).astype(np.float32) for _ in range(3)))
    if wanted.mode == "sampled":
        counts = np.zeros((positions, k), np.int32)
        n = 1 + sample_id % k
        counts[:, :n] = 1
        counts[:, 0] += k - n
        ids = np.where(counts > 0, np.sort(ids, axis=1), 0).astype(np.int32)
        return SampleRecord(sample_id, **plain, entries=DrawnEntries(ids, counts), scalars=scalars)
    values = power_law(rng, positions, k)
    entries = TopKEntries(ids.astype(np.int32), values[:, :k], values[:, k].copy())
    return SampleRecord(sample_id, **plain, entries=entries, scalars=scalars)


def student_tokens(sample_id: int, wanted: CaptureSettings) -> StudentTokens:
    """The text of a sample in a student's tokens, with chunks of one to three tokens."""
    assert wanted.student_length is not None
    rng = np.random.default_rng([5, sample_id])
    width = wanted.student_length + 1
    plain = tokens_of(sample_id, settings(vocab_size=300, sequence_length=width - 1))
    chunks = []
    for tokens in (width, wanted.sequence_length + 1):
        numbers = np.repeat(np.arange(tokens), rng.integers(1, 4, tokens))[:tokens]
        inside = rng.random(tokens) < 0.8
        _, numbers[inside] = np.unique(numbers[inside], return_inverse=True)
        chunks.append(np.where(inside, numbers, -1).astype(np.int32))
    return StudentTokens(*plain.values(), *chunks)


def power_law(rng: np.random.Generator, positions: int, k: int) -> np.ndarray:
    """Log-probabilities fp32 [S, K + 1]: descending, the last being the tail's; some very sure."""
    steep = rng.uniform(0.8, 6.0, (positions, 1))
    logits = -steep * np.log(np.arange(1, k + 1)) + rng.normal(0, 0.3, (positions, k))
    logits = -np.sort(-logits, axis=1)
    tail = np.log(rng.uniform(1e-6, 0.5, (positions, 1))) + np.logaddexp.reduce(
        logits, axis=1, keepdims=True
    )
    values = np.concatenate([logits, tail], 1)
    return (values - np.logaddexp.reduce(values, axis=1, keepdims=True)).astype(np.float32)


def begin(
    folder: Path, wanted: CaptureSettings, *, samples: int = 10, per_shard: int = 4, **changes: str
) -> StoreWriter:
    """A writer of a small store."""
    identity = Identity(**(vars(IDENTITY) | changes))
    return StoreWriter(
        folder, settings=wanted, identity=identity, samples=samples, samples_per_shard=per_shard
    )


def fill(writer: StoreWriter, shards: list[int] | None = None) -> None:
    """Write shards that are not there."""
    plan = writer.plan
    for shard in writer.holes() if shards is None else shards:
        with writer.shard(shard) as open_shard:
            for offset in range(plan.count(shard)):
                open_shard.add(made_up(plan.first(shard) + offset, plan.settings))


def write_store(folder: Path, wanted: CaptureSettings, **changes: object) -> StoreWriter:
    """A complete small store."""
    writer = begin(folder, wanted, **changes)  # type: ignore[arg-type]
    fill(writer)
    writer.finish()
    return writer


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }

"""A synthetic teacher: heavy-tailed distributions over 128,256 tokens, and packed samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_distill.store import PositionScalars, SampleRecord, TopKEntries
from megatron_distill.store.records import Floats

__all__ = ["LARGEST_K", "VOCAB_SIZE", "MadeUpSample", "made_up_sample", "record_of"]

VOCAB_SIZE: Final = 128_256
LARGEST_K: Final = 256
# Ranks below these are far below the k-th even with noise; their mass is summed up as a whole.
_NOISY_RANKS: Final = 4096
_NOISE: Final = 0.3
# A token's frequency falls with its id, as in a vocabulary of merges.
_ID_EXPONENT: Final = 0.8
_DRAWS: Final = 4 * LARGEST_K
_TRAINED: Final = 3


@dataclass(frozen=True, eq=False)
class MadeUpSample:
    """S positions with their 256 most probable ids, and the S + 1 tokens of some documents.

    Attributes:
        record: a capture's record at k = 256.
        logits_SK: fp32 raw logits of the stored ids, for layouts that store logits.
    """

    record: SampleRecord
    logits_SK: Floats


def made_up_sample(number: int, positions: int, *, vocab_size: int = VOCAB_SIZE) -> MadeUpSample:
    """Zipf's law with an exponent drawn per position and noise on the logits."""
    rng = np.random.default_rng([20, number])
    values = _relative_logits(rng, positions, vocab_size)
    rest = _rest(values["exponent"], vocab_size)
    kept = values["sorted"][:, :LARGEST_K]
    tail = np.logaddexp(np.logaddexp.reduce(values["sorted"][:, LARGEST_K:], axis=1), rest)
    relative_sum = np.logaddexp(np.logaddexp.reduce(kept, axis=1), tail)
    # An offset of a model's logits that does not affect its probabilities.
    log_sum_exp = rng.normal(20.0, 3.0, positions)
    ids = _ids(rng, positions, vocab_size)
    log_probs = (kept - relative_sum[:, None]).astype(np.float32)
    tokens, documents = _packed(rng, positions + 1, vocab_size)
    record = SampleRecord(
        sample_id=number,
        tokens_S1=tokens,
        document_ids_S1=documents,
        flags_S1=np.full(positions + 1, _TRAINED, np.uint8),
        entries=TopKEntries(ids, log_probs, (tail - relative_sum).astype(np.float32)),
        scalars=PositionScalars(
            log_sum_exp.astype(np.float32),
            rng.uniform(0.0, 8.0, positions).astype(np.float32),
            log_probs[np.arange(positions), rng.integers(0, LARGEST_K, positions)],
        ),
    )
    return MadeUpSample(record, (log_probs + log_sum_exp[:, None]).astype(np.float32))


def _relative_logits(
    rng: np.random.Generator, positions: int, vocab_size: int
) -> dict[str, NDArray[np.float64]]:
    exponent = rng.uniform(0.9, 4.0, (positions, 1))
    logits = -exponent * np.log(np.arange(1, min(_NOISY_RANKS, vocab_size) + 1))
    logits += _NOISE * rng.standard_normal(logits.shape, dtype=np.float32)
    return {"exponent": exponent[:, 0], "sorted": -np.sort(-logits, axis=1)}


def _rest(exponent: NDArray[np.float64], vocab_size: int) -> NDArray[np.float64]:
    """Log of the mass of ranks without noise of their own, the noise's mean included."""
    if vocab_size <= _NOISY_RANKS:
        return np.full(exponent.shape, -np.inf)
    first, last = _NOISY_RANKS + 0.5, vocab_size + 0.5
    power = 1.0 - exponent
    power = np.where(np.abs(power) < 1e-9, 1e-9, power)
    integral = (last**power - first**power) / power
    return np.log(integral) + _NOISE**2 / 2


def _ids(rng: np.random.Generator, positions: int, vocab_size: int) -> NDArray[np.int32]:
    """Different ids [S, 256] in the order in which a Zipf distribution over the ids gives them."""
    cumulated = np.cumsum(np.arange(1, vocab_size + 1, dtype=np.float64) ** -_ID_EXPONENT)
    drawn = np.searchsorted(cumulated, rng.random((positions, _DRAWS)) * cumulated[-1])
    order = np.argsort(drawn, axis=1, kind="stable")
    ordered = np.take_along_axis(drawn, order, axis=1)
    again = np.zeros(drawn.shape, np.bool_)
    np.put_along_axis(again, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    first = np.argsort(again, axis=1, kind="stable")[:, :LARGEST_K]
    return np.take_along_axis(drawn, first, axis=1).astype(np.int32)


def _packed(
    rng: np.random.Generator, count: int, vocab_size: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Tokens, and some ten documents."""
    tokens = (vocab_size ** rng.random(count)).astype(np.int32)
    starts = rng.random(count) < 10 / count
    starts[0] = False
    return tokens, np.cumsum(starts).astype(np.int32)


def top_k_of(record: SampleRecord) -> TopKEntries:
    """The entries of a record, a top-k in all benchmarks."""
    assert isinstance(record.entries, TopKEntries)
    return record.entries


def record_of(sample: MadeUpSample, k: int, *, sample_id: int) -> SampleRecord:
    """A capture's record at this k; the dropped ids are added to the tail."""
    entries = top_k_of(sample.record)
    assert entries.log_tail_S is not None
    dropped = np.concatenate([entries.log_probs_SK[:, k:], entries.log_tail_S[:, None]], axis=1)
    tail = np.logaddexp.reduce(dropped.astype(np.float64), axis=1).astype(np.float32)
    cut = TopKEntries(
        np.ascontiguousarray(entries.ids_SK[:, :k]),
        np.ascontiguousarray(entries.log_probs_SK[:, :k]),
        tail,
    )
    return replace(sample.record, sample_id=sample_id, entries=cut)

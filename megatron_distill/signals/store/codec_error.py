"""How far decoded distributions are from what was stored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_distill.signals.store.codecs import CODECS
from megatron_distill.signals.store.layout import pack, unpack
from megatron_distill.signals.store.plan import CaptureSettings
from megatron_distill.signals.store.records import (
    Floats,
    Integers,
    PositionScalars,
    SampleRecord,
    TopKEntries,
)

__all__ = ["CodecError", "measure_codec"]


@dataclass(frozen=True)
class CodecError:
    """KL divergence of decoded from exact distributions over the kept ids and the tail, in nats.

    Attributes:
        codec: which one.
        bytes_per_token: of a whole record, without the container.
        mean: over positions.
        p99: its 99th percentile.
        largest_log_prob: largest error of a kept log-probability whose probability is above 1e-4.
    """

    codec: str
    bytes_per_token: float
    mean: float
    p99: float
    largest_log_prob: float


def measure_codec(
    codec: str, ids_SK: Integers, log_probs_SK: Floats, log_tail_S: Floats, *, vocab_size: int
) -> CodecError:
    """Store and read back S positions with a codec, and compare.

    Shapes: ids and log-probs ``[S, K]``, descending, and log tails ``[S]`` that complete them.
    """
    positions, k = ids_SK.shape
    assert codec in CODECS
    settings = CaptureSettings(k=k, vocab_size=vocab_size, sequence_length=positions, codec=codec)
    zeros = np.zeros(positions, np.float32)
    record = SampleRecord(
        sample_id=0,
        tokens_S1=np.zeros(positions + 1, np.int32),
        document_ids_S1=np.zeros(positions + 1, np.int32),
        flags_S1=np.full(positions + 1, 3, np.uint8),
        entries=TopKEntries(ids_SK, log_probs_SK, log_tail_S),
        scalars=PositionScalars(zeros, zeros, zeros),
    )
    packed = pack(record, settings, bytes(8))
    decoded = unpack(packed).top_k
    assert decoded.log_tail_S is not None
    exact = _distribution(log_probs_SK, log_tail_S)
    found = _distribution(decoded.log_probs_SK, decoded.log_tail_S)
    with np.errstate(invalid="ignore"):
        terms = np.where(exact > -np.inf, np.exp(exact) * (exact - found), 0.0)
    divergence = terms.sum(1)
    counts = log_probs_SK > np.log(1e-4)
    error = np.abs(log_probs_SK.astype(np.float64) - decoded.log_probs_SK)[counts]
    return CodecError(
        codec=codec,
        bytes_per_token=len(packed) / positions,
        mean=float(divergence.mean()),
        p99=float(np.quantile(divergence, 0.99)),
        largest_log_prob=float(error.max(initial=0.0)),
    )


def _distribution(log_probs_SK: Floats, log_tail_S: Floats) -> NDArray[np.float64]:
    """Log-probabilities [S, K + 1] whose rows sum to one in fp64."""
    values = np.concatenate([log_probs_SK, log_tail_S[:, None]], axis=1).astype(np.float64)
    total: NDArray[np.float64] = values - np.logaddexp.reduce(values, axis=1, keepdims=True)
    return total

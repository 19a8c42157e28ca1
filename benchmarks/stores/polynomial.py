"""DistillKit's layout from its formulas: an exact head, a fitted curve, ids as one bit stream."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_distill.store.records import Floats, Integers

__all__ = ["BUDGET", "RECOMMENDED", "Polynomial", "as_bf16", "encode_bits", "write_parquet"]

_LEAST_SINGULAR: Final = 1e-5


@dataclass(frozen=True)
class Polynomial:
    """One configuration of its compressor.

    Attributes:
        exact: number of values stored in bf16.
        powers: of the position; their coefficients are stored in fp32.
        has_root: whether the square root of the position is a term as well.
        is_normalised: positions from 0 to 1 (`normalize_t`) rather than 0 to n - 1.
    """

    exact: int
    powers: tuple[int, ...]
    has_root: bool = True
    is_normalised: bool = False

    @property
    def normalised(self) -> Polynomial:
        """The same with `normalize_t`."""
        return replace(self, is_normalised=True)

    @property
    def value_bytes_per_token(self) -> int:
        """Bytes of a position's values."""
        return 2 * self.exact + 4 * (len(self.powers) + self.has_root)

    def encode(self, log_probs_SK: Floats) -> tuple[NDArray[np.uint16], Floats]:
        """The head's bf16 bits [S, exact] and the coefficients [S, terms], in fp32 throughout."""
        head = log_probs_SK[:, : self.exact]
        bits = torch.from_numpy(head.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
        # As DistillKit solves it, including the rounding of fp32, which fp64 would avoid.
        basis = torch.from_numpy(self._basis(log_probs_SK.shape[1] - self.exact))
        left, singular, right = torch.linalg.svd(basis, full_matrices=False)
        inverse = torch.where(singular > _LEAST_SINGULAR, 1 / singular, 0)
        solver = (right.T * inverse) @ left.T
        fitted = torch.from_numpy(log_probs_SK[:, self.exact :].copy()) @ solver.T
        return bits, fitted.numpy()

    def decode(self, bits: NDArray[np.uint16], coefficients: Floats, k: int) -> Floats:
        """Log-probabilities [S, k]."""
        head = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
        curve = coefficients @ self._basis(k - self.exact).T
        return np.concatenate([head, curve.astype(np.float32)], axis=1)

    def value_bytes(self, log_probs_SK: Floats) -> list[bytes]:
        """Each position's bytes for its values."""
        bits, coefficients = self.encode(log_probs_SK)
        rows = np.concatenate([bits.view(np.uint8), coefficients.view(np.uint8)], axis=1)
        return [row.tobytes() for row in rows]

    def _basis(self, count: int) -> Floats:
        place = np.arange(count, dtype=np.float32)
        if self.is_normalised:
            place = np.linspace(0, 1, count, dtype=np.float32)
        columns = [place**power for power in self.powers]
        if self.has_root:
            columns.append(np.sqrt(place))
        return np.stack(columns, axis=1).astype(np.float32)


RECOMMENDED: Final = Polynomial(exact=16, powers=(0, 1, 2, 3, 4))
BUDGET: Final = Polynomial(exact=1, powers=(0, 1))


def as_bf16(log_probs_SK: Floats) -> Floats:
    """Values rounded to bf16."""
    return torch.from_numpy(log_probs_SK.copy()).bfloat16().float().numpy()


def encode_bits(ids_SK: Integers, vocab_size: int) -> list[bytes]:
    """Each position's ids as one stream of as many bits as the vocabulary needs, highest first."""
    width = (vocab_size - 1).bit_length()
    bits = ids_SK[:, :, None] >> np.arange(width - 1, -1, -1) & 1
    rows = np.packbits(bits.reshape(len(ids_SK), -1).astype(np.uint8), axis=1)
    return [row.tobytes() for row in rows]


def write_parquet(
    path: Path, tokens: list[list[int]], values: list[list[bytes]], ids: list[list[bytes]]
) -> None:
    """Its file: one row per sequence, lists of lists of bytes, the format's default compression."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    octets = arrow.list_(arrow.list_(arrow.uint8()))
    table = arrow.table(
        {
            "input_ids": arrow.array(tokens, arrow.list_(arrow.uint64())),
            "compressed_logprobs": arrow.array(_numbers(values), octets),
            "bytepacked_indices": arrow.array(_numbers(ids), octets),
        }
    )
    parquet.write_table(table, path)


def _numbers(rows: list[list[bytes]]) -> list[list[NDArray[np.uint8]]]:
    return [[np.frombuffer(part, np.uint8) for part in row] for row in rows]

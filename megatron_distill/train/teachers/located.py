"""Single positions of records, for samples that are joined with a store by documents."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_distill.errors import StoreError
from megatron_distill.store import SampleTokens

__all__ = ["record_rows", "require_tokens_at", "wanted_records", "wanted_rows"]

Places = NDArray[np.int32]
"""Record and position of each label of a micro-batch, int32 [b, s, 2]; -1 for none."""


def wanted_records(places_bs2: Places) -> tuple[int, ...]:
    """The numbers of the records that a micro-batch needs, ascending."""
    numbers = np.unique(places_bs2[..., 0])
    return tuple(numbers[numbers >= 0].tolist())


def wanted_rows(places_bs2: Places, number: int) -> NDArray[np.int64]:
    """The positions of a record that a micro-batch needs, ascending."""
    positions = places_bs2[..., 1][places_bs2[..., 0] == number]
    return np.unique(positions).astype(np.int64)


def record_rows(places_bs2: Places) -> NDArray[np.int64]:
    """The row of each label among the wanted rows of its micro-batch's records, one after another.

    A label without a record has row 0, which no loss uses.
    """
    numbers_n, positions_n = places_bs2.reshape(-1, 2).astype(np.int64).T
    keys_n = (numbers_n << 32) + positions_n
    wanted = np.unique(keys_n[numbers_n >= 0])
    return np.where(numbers_n < 0, 0, np.searchsorted(wanted, keys_n))


def require_tokens_at(
    found: SampleTokens,
    number: int,
    places_bs2: Places,
    given: tuple[NDArray[np.int64], NDArray[np.int64]],
    where: str,
) -> None:
    """Raise StoreError unless a record has a micro-batch's tokens at the places that name it.

    given: the tokens before the labels, and the labels, int64 [b, s].
    """
    is_here = places_bs2[..., 0] == number
    positions = places_bs2[is_here][:, 1]
    documents = found.document_ids_S1
    is_same = documents[positions] == documents[positions + 1]
    for offset, own_bs in enumerate(given):
        is_same &= found.tokens_S1[positions + offset] == own_bs[is_here]
    if not is_same.all():
        raise StoreError(
            f"{where}: at position {int(positions[~is_same][0])} its tokens differ from those of "
            "the teacher's tokenizer for the same text. Set data.add_bos as in the capture, or "
            "capture the store again"
        )

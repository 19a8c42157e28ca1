"""A tensor-parallel rank's columns of a vocabulary, real and padded."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["VocabShard"]

# Ids are sent as fp32 numbers, which are exact for integers up to here.
_LARGEST_SIZE = 2**24


@dataclass(frozen=True)
class VocabShard:
    """Columns ``[start, stop)`` of a vocabulary of ``size`` real entries; the rest is padding.

    Real columns are always a prefix of the shard, so that padding is cut off rather than masked.

    Raises:
        ValueError: the size is not positive or beyond 2^24, or the range is not one.
    """

    size: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"VocabShard.size is {self.size}; it must be at least 1")
        if self.size > _LARGEST_SIZE:
            raise ValueError(
                f"VocabShard.size is {self.size}; ids are exact up to {_LARGEST_SIZE} only"
            )
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"VocabShard range [{self.start}, {self.stop}) is not a column range")

    @classmethod
    def for_rank(cls, size: int, padded_size: int, rank: int, world: int) -> VocabShard:
        """Rank ``rank`` of ``world`` equal shards of ``padded_size`` columns.

        Raises:
            ValueError: the padded size is smaller than the real one or not a multiple of the ranks.
        """
        if padded_size < size:
            raise ValueError(f"padded vocabulary {padded_size} is smaller than the real one {size}")
        if padded_size % world:
            raise ValueError(
                f"padded vocabulary {padded_size} is not a multiple of the {world} ranks"
            )
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not one of {world}")
        width = padded_size // world
        return cls(size, rank * width, (rank + 1) * width)

    @property
    def width(self) -> int:
        """Columns of this shard, padding included: the V of a local tensor."""
        return self.stop - self.start

    @property
    def real_width(self) -> int:
        """Leading columns of this shard that are real (0 on a wholly padded shard)."""
        return max(0, min(self.stop, self.size) - self.start)

    def owns(self, ids: Tensor) -> Tensor:
        """Whether each global id is a real column of this shard; bool, the shape of ``ids``."""
        return (ids >= self.start) & (ids < self.start + self.real_width)

    def local(self, ids: Tensor) -> Tensor:
        """Column of each global id within this shard; ids of other shards are clamped into it."""
        return (ids - self.start).clamp(0, max(self.real_width - 1, 0))

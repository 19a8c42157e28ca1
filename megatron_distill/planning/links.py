"""Connections of devices: the time of messages and collectives by their bytes."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Link", "NearMessages", "Positive", "ProfileTable"]

Positive = Annotated[float, Field(gt=0)]


class ProfileTable(BaseModel):
    """A table of a device's file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class NearMessages(ProfileTable):
    """Messages of a CPU that follow each other closely: its ranks arrive less far apart.

    latency_us: of one collective. after_us: of work before it. far_us: the same of the link's own
    latency. Between both it grows with the work, and beyond as the root of it: delays of the ranks
    that do not depend on each other add up so. gather_wait: an all-gather's over that of a sum,
    whose ranks wait for each other twice. After much work both wait for the later rank.
    """

    latency_us: Positive
    after_us: Positive
    far_us: Positive
    gather_wait: float = Field(0.67, gt=0, le=1)  # of files from before it was measured

    def share(self, after: float) -> float:
        """Return how far a collective after so many seconds of work is one of these, 0 to 1."""
        share = (self.far_us - 1e6 * after) / (self.far_us - self.after_us)
        return min(1.0, max(0.0, share))


class Link(ProfileTable):
    """A connection of devices.

    devices: that it connects. gb_per_s: of one device in one direction. efficiency: share of it
    that sums reach. latency_us: of one collective. near: the same after less work, where measured.
    gather, scatter: time of the bytes of an all-gather and of a reduce-scatter over half of an
    all-reduce's. Above 1 for gloo, which scatters no faster than it sums.
    """

    devices: int = Field(ge=1)
    gb_per_s: Positive
    efficiency: float = Field(gt=0, le=1)
    latency_us: float = Field(ge=0)
    near: NearMessages | None = None
    gather: Positive = 1.0
    scatter: Positive = 1.0

    def gathered(self, byte_count: float, *, ranks: int, after: float | None = None) -> float:
        """Return the time of an all-gather over `ranks` of a tensor of `byte_count` in all.

        after: seconds of each rank's work since its last message; None: as long as those of
        `latency_us`. So for all collectives.
        """
        return self._collective(byte_count, ranks, self.gather, self.gather_waited(after))

    def scattered(self, byte_count: float, *, ranks: int, after: float | None = None) -> float:
        """Return the time of a reduce-scatter over `ranks` of a tensor of `byte_count` in all."""
        return self._collective(byte_count, ranks, self.scatter, self.waited(after))

    def summed(self, byte_count: float, *, ranks: int, after: float | None = None) -> float:
        """Return the time of a sum of `byte_count` over `ranks`."""
        return self._collective(byte_count, ranks, 2.0, self.waited(after))

    def _collective(self, byte_count: float, ranks: int, factor: float, wait: float) -> float:
        if ranks < 2 or not byte_count:
            return 0.0
        # Of a gather each rank receives all but its own part.
        moved = factor * byte_count * (ranks - 1) / ranks
        return wait + moved / (self.gb_per_s * 1e9 * self.efficiency)

    def waited(self, after: float | None = None) -> float:
        """Return the time of a sum of no bytes."""
        latency = self.latency_us
        if self.near is not None and after is not None:
            latency -= (latency - self.near.latency_us) * self.near.share(after)
            latency *= max(1.0, 1e6 * after / self.near.far_us) ** 0.5
        return latency * 1e-6

    def gather_waited(self, after: float | None = None) -> float:
        """Return the time of a gather of no bytes."""
        wait = self.waited(after)
        if self.near is not None and after is not None:
            wait *= 1.0 - (1.0 - self.near.gather_wait) * self.near.share(after)
        return wait

    def message(self, byte_count: float) -> float:
        """Return the time of one message between two devices."""
        return self.latency_us * 1e-6 + byte_count / (self.gb_per_s * 1e9 * self.efficiency)

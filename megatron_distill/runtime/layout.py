"""The parallel sizes of a run as one value, for code with process groups and without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """Parallel sizes: the number of ranks along each dimension of the model and the data."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    expert: int = 1
    sequence: bool = False

    @property
    def model_ranks(self) -> int:
        """Number of ranks that together hold one copy of the model and one sequence."""
        return self.tensor * self.pipeline * self.context

    @property
    def stages(self) -> int:
        """Number of pipeline stages, virtual ones included."""
        return self.pipeline * (self.virtual_pipeline or 1)

    def without_virtual_stages(self) -> Layout:
        """The same layout with one model chunk per pipeline stage."""
        return self if self.virtual_pipeline is None else _without_virtual_stages(self)


@lru_cache(maxsize=1024)
def _without_virtual_stages(layout: Layout) -> Layout:
    return replace(layout, virtual_pipeline=None)

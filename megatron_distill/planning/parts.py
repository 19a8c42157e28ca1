"""A prediction that is the sum of named parts."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Parts"]


@dataclass(frozen=True)
class Parts:
    """Numbers of one unit, the fields of a subclass, which add up to the whole."""

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """The parts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

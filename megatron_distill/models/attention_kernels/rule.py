"""The rule of a layer's attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionRule:
    """Scores of a layer: `scale * q.k`, bent by a soft cap, limited to a window.

    Attributes:
        softcap: c of z = c tanh(scale q.k / c); None: no cap.
        window: keys that a query sees, itself included; None: all of its document.
        dropout: probability of dropping an attention weight.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    dropout: float = 0.0

    def window_of(self, keys: int) -> int | None:
        """The window, or None if it hides none of so many keys."""
        return None if self.window is None or self.window >= keys else self.window

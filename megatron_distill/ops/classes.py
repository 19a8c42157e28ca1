"""Probabilities of the same classes under both models, which all divergences are made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

__all__ = ["Classes", "Model"]

Model = Literal["student", "teacher"]


@dataclass(frozen=True)
class Classes:
    """Probabilities ``[N, C]`` of the same classes under both models; a row may overwrite neither.

    None is zero: what underflows counts as the smallest normal number.

    Attributes:
        teacher: p.
        student: q.
        log_ratio: makes ``log p - log q - top_ratio`` for the caller to overwrite.
        top_ratio: ``[N, 1]``, or one for all, ``log p - log q`` of the student's top token. Where
            that is large, the rest has digits which the whole would not.
        spare: names a buffer ``[N, C]`` of the caller's; the same name is the same buffer.
        anchor: bool ``[N, 1]``, or one for all, false where slopes are wanted exact near
            ``p == 0``; elsewhere they are exact near ``p == q``.
    """

    teacher: Tensor
    student: Tensor
    log_ratio: Callable[[], Tensor]
    spare: Callable[[str], Tensor]
    anchor: Tensor | bool = True
    top_ratio: Tensor | float = 0.0

    @property
    def share_at_anchor(self) -> Tensor | float:
        """p/m where slopes are exact: one at ``p == q``, nothing at ``p == 0``."""
        if isinstance(self.anchor, bool):
            return float(self.anchor)
        return self.anchor.to(self.teacher.dtype)

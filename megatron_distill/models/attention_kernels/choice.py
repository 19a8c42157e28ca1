"""The attention kernels, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_distill.models.attention_kernels import blocked, flex, tiles, varlen
from megatron_distill.models.attention_kernels.rule import AttentionRule
from megatron_distill.runtime.segments import Segments


class Attend(Protocol):
    """Exact attention of a rank's queries to the keys of their documents."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: AttentionRule
    ) -> Tensor:
        """Return [s, b, n, d] from query [s, b, n, d], key and value [S, b, g, d]."""
        ...


@dataclass(frozen=True)
class AttentionKernel:
    """An implementation, and the inputs that it takes."""

    name: str
    takes: Callable[[Tensor, AttentionRule], bool]
    attend: Attend


def _takes_on_cpu(query: Tensor, rule: AttentionRule) -> bool:
    return query.device.type == "cpu" and rule.softcap is None and not rule.dropout


# The first that takes the inputs is used; the last takes all.
KERNELS = (
    AttentionKernel("varlen", varlen.takes, varlen.attend),
    AttentionKernel("flex", flex.takes, flex.attend),
    AttentionKernel("tiles", _takes_on_cpu, tiles.attend),
    AttentionKernel("blocked", lambda *_: True, blocked.attend),
)


def kernel_for(query: Tensor, rule: AttentionRule) -> AttentionKernel:
    """Return the fastest kernel for these queries and scores."""
    return next(kernel for kernel in KERNELS if kernel.takes(query, rule))

"""Keys and values of a sequence that context ranks share, gathered in both passes of a layer.

A layer that saved the whole sequence's keys for its backward pass would hold 2 * S * b * g * d
values, on every context rank alike. It saves this rank's part, and gathers the rest again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_distill.runtime.segments import in_sequence_order


def gathered_keys(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return keys and values of the whole sequence, [S, 2, b, g, d]; differentiable.

    key and value: this rank's, [s, b, g, d].

    Collective: `group`, one all-gather of 2 * g * d values per token; in backward one
    reduce-scatter of the same size.
    """
    return _whole(torch.stack([key, value], dim=1), group)


def _whole(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = gather_from_sequence_parallel_region(part, group=group)
    return in_sequence_order(ranks, size=group.size())


def recomputes_attention(config: TransformerConfig) -> bool:
    """Whether the backward pass of every layer begins with its attention's forward pass."""
    if config.recompute_granularity == "full":
        return config.recompute_method == "uniform"
    return config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules


@dataclass(frozen=True)
class _View:
    """A saved view of the whole keys and values: its place in their memory."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _SavedPart:
    """This rank's keys and values, in place of every saved view of the whole."""

    def __init__(self, part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
        self._part, self._group = part, group
        self._memory = whole.untyped_storage().data_ptr()
        self._views = 0  # those not asked for since the last gathering
        self._saved_views = 0
        self._whole: Tensor | None = None

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Replace a view of the whole; any other tensor, also a copy of a part, is saved."""
        if tensor.untyped_storage().data_ptr() != self._memory:
            return tensor
        self._saved_views += 1
        return _View(tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, saved: Tensor | _View) -> Tensor:
        """Return a saved tensor; the first view of a backward pass gathers the whole again."""
        if isinstance(saved, Tensor):
            return saved
        if self._whole is None:
            with torch.no_grad():
                self._whole = _whole(self._part, self._group)
            self._views = self._saved_views
        view = self._whole.as_strided(saved.size, saved.stride, saved.offset)
        self._views -= 1
        if self._views == 0:
            self._whole = None  # in memory as long as its views are
        return view


@contextmanager
def saved_in_part(
    key: Tensor, value: Tensor, whole: Tensor, group: dist.ProcessGroup
) -> Iterator[None]:
    """A block whose backward pass gathers `whole` again, instead of saving it.

    key and value: this rank's part of `whole`, as in `gathered_keys`.

    Collective: `group`, in backward one all-gather of 2 * g * d values per token.
    """
    if not torch.is_grad_enabled():
        yield
        return
    saved = _SavedPart(torch.stack([key.detach(), value.detach()], dim=1), whole, group)
    with saved_tensors_hooks(saved.pack, saved.unpack):
        yield

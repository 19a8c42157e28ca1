"""Values that a rank holds beside the rank that stores them: sent, not read a second time.

Tensor-parallel ranks hold the same norms, both end stages the same tied embedding. Stages divide
the optimizer differently, so a copy's range may come from several ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_distill.train.checkpoint.shards import Shard


@dataclass(frozen=True)
class _Range:
    """A flat range of a rectangle of a global tensor."""

    rectangle: tuple[str, tuple[int, ...], tuple[int, ...]]  # key, offset, shape
    start: int
    stop: int


@torch.no_grad()
def fill_copies(shards: Sequence[Shard], group: dist.ProcessGroup) -> None:
    """Fill the shards that are copied in this group from the ranks that have read their values.

    Collective: `group`, an all-gather of some 100 bytes per copy and one per shard that others
    need. Then each copy's bytes, from one rank to another.
    """
    rank, size = group.rank(), group.size()
    wanted = _gathered([_range_of(one) for one in shards if one.copied_in is group], group)
    rectangles = {one.rectangle for ranges in wanted for one in ranges}
    if not rectangles:
        return
    own = {found: shard for shard in shards if (found := _range_of(shard)).rectangle in rectangles}
    offers: dict[Any, list[tuple[int, _Range]]] = {}
    for sender, ranges in enumerate(
        _gathered([one for one, shard in own.items() if shard.is_stored], group)
    ):
        for one in ranges:
            offers.setdefault(one.rectangle, []).append((sender, one))
    messages, staged = [], []
    for receiver, ranges in enumerate(wanted):
        for one in ranges:
            for sender, offer, start, stop in _sources(one, offers[one.rectangle], receiver, size):
                if rank == sender:
                    part = own[offer].data[start - offer.start : stop - offer.start]
                    part = part.cpu() if _needs_host(part, group) else part
                    messages.append(_message(dist.isend, part, receiver, group))
                elif rank == receiver:
                    part = own[one].data[start - one.start : stop - one.start]
                    if _needs_host(part, group):
                        staged.append((part, torch.empty_like(part, device="cpu")))
                        part = staged[-1][1]
                    messages.append(_message(dist.irecv, part, sender, group))
    if messages:
        for request in dist.batch_isend_irecv(messages):
            request.wait()
    for part, received in staged:
        part.copy_(received)


def _needs_host(part: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether a message goes through host memory: gloo sends no memory of a device."""
    return part.device.type != "cpu" and dist.get_backend(group) == "gloo"


def _sources(
    wanted: _Range,
    offers: Iterable[tuple[int, _Range]],
    receiver: int,
    size: int,
) -> Iterator[tuple[int, _Range, int, int]]:
    """Yield sender, its range, start and stop of the parts of a wanted range.

    Of several senders the next one behind the receiver, in a group of `size` ranks: replicas send
    about as much as each other.
    """
    in_turn = sorted(offers, key=lambda offer: (offer[0] - receiver) % size)
    at = wanted.start
    while at < wanted.stop:
        sender, offer = next((sender, one) for sender, one in in_turn if one.start <= at < one.stop)
        stop = min(wanted.stop, offer.stop)
        yield sender, offer, at, stop
        at = stop


def _range_of(shard: Shard) -> _Range:
    return _Range(
        (shard.key, shard.offset, shard.shape), shard.first, shard.first + shard.data.numel()
    )


def _gathered(own: list[_Range], group: dist.ProcessGroup) -> list[list[_Range]]:
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, own, group=group)
    return every


def _message(operation: Any, part: torch.Tensor, peer: int, group: dist.ProcessGroup) -> dist.P2POp:
    other = dist.get_global_rank(group, peer)
    return dist.P2POp(operation, part.view(torch.uint8), other, group)

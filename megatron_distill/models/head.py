"""A frozen output head, cut along another model's vocabulary shards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops import VocabShard


@torch.no_grad()
def align_head(
    weight_VH: Tensor, *, own: VocabShard, wanted: VocabShard, group: dist.ProcessGroup
) -> Tensor:
    """Return the rows of a vocabulary-sharded head that belong to another sharding of it.

    Models of one vocabulary may pad it differently, and then the same rank holds other rows. A
    frozen head is cut anew once, at the start. `own` and `wanted` describe this rank's rows before
    and after; rows past the real vocabulary are zero. Returns [wanted.stop - wanted.start, H].

    Collective: `group`, one all-gather of the whole head, unless the shards agree already.
    """
    if own == wanted:
        return weight_VH
    assert own.size == wanted.size, (own, wanted)
    shards = [torch.empty_like(weight_VH) for _ in range(group.size())]
    dist.all_gather(shards, weight_VH.contiguous(), group=group)
    whole_GH = torch.cat(shards)[: own.size]
    aligned_VH = weight_VH.new_zeros(wanted.stop - wanted.start, weight_VH.shape[1])
    rows = whole_GH[wanted.start : wanted.stop]
    aligned_VH[: rows.shape[0]] = rows
    return aligned_VH

"""A sent top-k that becomes a signal, from slots of host memory or from tensors of the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_distill.losses import ChunkTerm, Term
from tests.fake_cuda.host_side import run_on_the_host
from tests.fake_cuda.opened import CUDA, open_world
from tests.support.batches import batch_of
from tests.support.store_samples import settings

ROWS, LENGTH = 2, 16


def main(rank: int, world: int, place: str, _: Sequence[str]) -> None:
    """Make the signal of a micro-batch whose columns are at `place`, and print what was seen."""
    opened = open_world(rank, world)
    from megatron_distill.train.teachers import sent_topk

    run_on_the_host(sent_topk.HostBatch, "of")
    wanted = settings(k=8, vocab_size=40, codec="f32", temperatures=(0.5,))
    terms = (Term(top_k=8), Term(top_k=3, temperature=0.5), ChunkTerm(alignment="likelihood"))
    make, batch = opened.watched(sent_topk.signal_of_columns), batch_of(ROWS, LENGTH)
    with opened.mode():
        columns = [
            column.empty(LENGTH, ROWS, torch.device(place))
            for column in sent_topk.top_k_columns(wanted)
        ]
        found = make(columns, batch, terms, wanted, CUDA.torch_device)
        places: set[str] = set()
        found.map(lambda values: places.add(str(values.device)) or values)
    opened.print_seen(places=sorted(places))

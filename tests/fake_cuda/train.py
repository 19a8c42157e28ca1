"""A training of one rank, watched from its first step's batches to its last record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from megatron_distill.config import load_config
from megatron_distill.ops.aligned.columns import TeacherLayout
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.runtime.termination import TerminationRequest
from tests.fake_cuda.host_side import (
    agree_with_itself,
    as_first_rank,
    fake,
    read_on_the_host,
    run_on_the_host,
)
from tests.fake_cuda.opened import CUDA, open_world
from tests.fake_cuda.watching_mode import WatchingMode


def main(rank: int, world: int, path: str, overrides: Sequence[str]) -> None:
    """Train as this rank of a world whose other ranks are not there, and print what was seen."""
    config = load_config(path, overrides)
    opened = open_world(rank, world)
    # Only now: these import Megatron-Core, which had to be prepared first.
    from megatron_distill.train import loop
    from megatron_distill.train.assemble import alignment
    from megatron_distill.train.assemble import data as assemble_data
    from megatron_distill.train.assemble import distillation as opening
    from megatron_distill.train.assemble import run as assembly
    from megatron_distill.train.teachers.stored import HostBatch

    for module in (assemble_data, assembly):
        patch.object(module, "on_first_rank", lambda work, **_: work()).start()
        run_on_the_host(module, "on_first_rank")
    run_on_the_host(opening, "open_tokenizer")
    run_on_the_host(assembly, "keep_assets")
    patch.object(assembly, "exchange_group", lambda **_: None).start()
    run_on_the_host(HostBatch, "of")
    _know_sizes()
    patch.object(loop, "_train", opened.watched(loop._train)).start()
    to_host = _count_states()
    agree_with_itself(lambda: opened.seen.note(opened.seen.waits))
    with opened.mode() as mode:
        read_on_the_host(mode)
        _align_on_the_host(opening, alignment, mode)
        is_done = assembly.run_training(config, CUDA, TerminationRequest())
    opened.print_seen(is_done=is_done, to_host=len(to_host))


def _count_states() -> list[int]:
    """Return a list to which each state that goes to host memory adds its micro-batch."""
    from megatron_distill.train.teachers.host_states import HostStates

    put, found = HostStates.put, []

    def counted(self: HostStates, micro_batch: int, hidden: Tensor) -> None:
        found.append(micro_batch)
        put(self, micro_batch, hidden)

    patch.object(HostStates, "put", counted).start()
    return found


def _know_sizes() -> None:
    """Let the host read, for an exchange of tokens, as many rows for each rank and expert."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    read = MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize

    def known(self: Any, point: str, counts: Tensor | None = None) -> Tensor | None:
        counts = read(self, point, counts)
        if point == self.cuda_dtoh_point:
            ranks, experts = self.ep_size, self.num_local_experts
            rows = self.num_out_tokens // ranks
            self.input_splits = self.output_splits = np.full(ranks, rows)
            if not self.config.moe_permute_fusion:  # a fused order reads them on the device
                counts_RE = np.full((ranks, experts), rows // experts)
                self.num_global_tokens_per_local_expert = counts_RE
        return counts

    patch.object(MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", known).start()


def _align_on_the_host(opening: Any, alignment: Any, mode: WatchingMode) -> None:
    """Let two vocabularies be connected with real tensors, which then are on the fake device."""
    host = torch.device("cpu")
    open_tokens, with_map = opening.open_teacher_tokens, alignment._with_map
    rows = TeacherLayout.rows

    def opened(*given: Any) -> Any:
        with as_first_rank():
            return open_tokens(*given[:-1], host)

    def connected(tokens_map: Any, shared: Any, rank: int, device: torch.device) -> Any:
        with unset_fake_temporarily():
            found, layout = with_map(tokens_map, shared, rank, host)
        return fake(found, mode, device), layout

    def arranged(self: TeacherLayout, values: Tensor) -> Any:
        with unset_fake_temporarily():
            found = rows(self, torch.zeros(values.shape, dtype=values.dtype))
        return fake(found, mode, values.device)

    patch.object(opening, "open_teacher_tokens", opened).start()
    patch.object(alignment, "_with_map", connected).start()
    patch.object(alignment, "shards_of", _equal_shards).start()
    patch.object(TeacherLayout, "rows", arranged).start()


def _equal_shards(shard: VocabShard, group: Any) -> list[VocabShard]:
    ranks = range(1 if group is None else group.size())
    return [VocabShard(shard.size, rank * shard.width, (rank + 1) * shard.width) for rank in ranks]

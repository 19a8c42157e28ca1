"""Checkpoints as earlier releases wrote them: whole moments, by the first data-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as torch_checkpoint

if TYPE_CHECKING:
    from megatron_distill.runtime.groups import Groups
    from megatron_distill.train.run_state import RunState

_SHARDED_MASTER = "optimizer.state.param."
_MASTER = "optimizer.state.fp32_param."


def old_state(state: RunState, *, is_loading: bool = False) -> dict[str, Any]:
    """The state as Megatron-Core's `fully_reshardable` format describes it."""
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    groups = state.student.groups
    metadata = _metadata(groups)
    chunks = state.student.chunks
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    found: dict[str, Any] = {
        name: chunk.sharded_state_dict(metadata=metadata)
        for name, chunk in zip(names, chunks, strict=True)
    }
    optimizer = state.optimizer.sharded_state_dict(found, is_loading=is_loading, metadata=metadata)
    found["optimizer"] = _without_layout(optimizer, has_master_weights=chunks[0].config.bf16)
    shards, _ = extract_matching_values(found, lambda leaf: isinstance(leaf, ShardedBase))
    return shards


def write_old(state: RunState, folder: Path) -> None:
    """Write the tensors of a checkpoint into a complete one's folder, in place of its own."""
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        _replace_state_dict_keys_with_sharded_keys,
        mcore_to_pyt_state_dict,
    )

    from megatron_distill.train.checkpoint.writer import RankWriter

    if torch.distributed.get_rank() == 0:
        for path in [*folder.glob("*.distcp"), folder / ".metadata"]:
            path.unlink()
    torch.distributed.barrier()
    sharded, _ = save_preprocess(old_state(state))
    own, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    torch_checkpoint.save(
        mcore_to_pyt_state_dict(own),
        storage_writer=RankWriter(folder),
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )


def _metadata(groups: Groups) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": groups.data_context,
    }


def _without_layout(state: dict[str, Any], *, has_master_weights: bool) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    kept: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            kept[key] = _without_layout(value, has_master_weights=has_master_weights)
        elif not (isinstance(value, ShardedBase) and value.key.startswith(_SHARDED_MASTER)):
            kept[key] = value
        elif has_master_weights:
            value.key = value.key.replace(_SHARDED_MASTER, _MASTER, 1)
            kept[key] = value
    return kept

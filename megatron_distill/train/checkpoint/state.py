"""The shards of a model and of its optimizer, without gathering them.

Optimizer entries of a checkpoint are moments, and a bf16 model's fp32 weights, under the names of
the model's tensors. Megatron-Core's own formats gather them on every data-parallel rank, or cannot
be read with other tensor- or pipeline-parallel sizes.

Megatron-Core also saves its parameter groups. Their number depends on the layout, and their
settings would silently override the configuration of a resumed run. Both come from the run here;
besides its moments, Adam needs only the number of applied steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params
from torch import Tensor

from megatron_distill.models.gpt import HiddenStateGPT
from megatron_distill.models.weights import sharded_parameters
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.checkpoint.shards import Shard

_STATE = "optimizer.state"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER = "fp32_param"  # of a bf16 model; where the model is fp32, its weights are these


def model_shards(chunks: Sequence[HiddenStateGPT], groups: Groups) -> list[Shard]:
    """Return every weight of this rank; data-parallel ranks are replicas of each other."""
    return [
        shard
        for parameter, pieces in sharded_parameters(chunks, groups)
        for shard in _shards(parameter, pieces, parameter, groups=groups)
    ]


def optimizer_shards(
    optimizer: ChainedOptimizer, chunks: Sequence[HiddenStateGPT], groups: Groups
) -> list[Shard]:
    """Return every moment and fp32 weight of this rank's optimizer.

    Those of the distributed optimizer are this rank's alone; otherwise they are replicated as the
    weights are.
    """
    pieces = {id(parameter): found for parameter, found in sharded_parameters(chunks, groups)}
    return [
        shard
        for owned in _owned(optimizer)
        for name, values in owned.states()
        for shard in _shards(
            owned.parameter,
            pieces[id(owned.parameter)],
            values,
            prefix=f"{_STATE}.{name}.",
            start=owned.start,
            groups=groups,
            is_whole=owned.is_whole,
        )
    ]


def replicated_shards(state: Mapping[str, ShardedTensor], groups: Groups) -> list[Shard]:
    """Return tensors that all ranks of the world hold as a whole."""
    return [
        Shard(
            key=key,
            data=part.data.detach().view(-1),
            global_shape=part.global_shape,
            offset=part.global_offset,
            shape=tuple(part.local_shape),
            replicas=groups.world if groups.world.size() > 1 else None,
        )
        for key, part in state.items()
        if part.data is not None
    ]


def set_steps(optimizer: ChainedOptimizer, steps: int) -> None:
    """Set the number of updates that Adam has applied."""
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.Adam):
            for state in part.optimizer.state.values():
                state["step"].fill_(steps)
        elif part.optimizer is not None:
            # Transformer Engine and Apex count per group.
            for group in part.optimizer.param_groups:
                group["step"] = steps


@dataclass(frozen=True)
class _Owned:
    """The optimizer's values of one parameter, from its flat element `start`."""

    parameter: Tensor
    main: Tensor  # the values that Adam updates
    state: dict[str, Any]  # Adam's, of these
    start: int
    is_whole: bool

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and values of each state in a checkpoint."""
        for name in _MOMENTS:
            if name not in self.state:
                # Transformer Engine's and Apex's Adam would allocate it in the first step.
                self.state[name] = torch.zeros_like(self.main, dtype=torch.float32)
            yield name, self.state[name]
        if self.main.dtype != self.parameter.dtype:
            yield _MASTER, self.main


def _owned(optimizer: ChainedOptimizer) -> Iterator[_Owned]:
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:
            continue  # this stage has no parameter of the kind
        is_whole = not isinstance(part, DistributedOptimizer)
        for parameter, main, start in _updated(part):
            yield _Owned(parameter, main, part.optimizer.state[main], start, is_whole)


def _updated(part: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield a parameter, the values that Adam updates for it, and their first flat element."""
    if isinstance(part, DistributedOptimizer):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            buffer, dtype, bucket = part.model_param_gbuf_map[parameter]
            ranges = part.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]
            main = part.optimizer.param_groups[group]["params"][order]
            yield parameter, main, ranges["param"].start
        return
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for parameters, mains in zip(
            part.float16_groups, part.fp32_from_float16_groups, strict=True
        ):
            for parameter, main in zip(parameters, mains, strict=True):
                yield parameter, main, 0
        groups = part.fp32_from_fp32_groups
    else:
        groups = [group["params"] for group in part.optimizer.param_groups]
    for group in groups:
        for parameter in group:
            yield parameter, parameter, 0


def _shards(
    parameter: Tensor,
    pieces: Sequence[ShardedTensor],
    values: Tensor,
    *,
    groups: Groups,
    is_whole: bool = True,
    prefix: str = "",
    start: int = 0,
) -> Iterator[Shard]:
    """Yield the values of a parameter, from its flat element `start`, by its pieces.

    A piece is a part of the parameter with a place of its own in a global tensor: gate and up
    projection are one parameter. `is_whole`: data-parallel ranks have the same values.
    """
    flat = values.detach().view(-1)
    stop = start + flat.numel()
    for piece in pieces:
        data = piece.data
        assert data is not None
        assert data.is_contiguous(), piece.key
        assert data.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        begin = data.storage_offset() - parameter.storage_offset()
        first, last = max(begin, start), min(begin + data.numel(), stop)
        if first < last:
            yield Shard(
                key=prefix + piece.key,
                data=flat[first - start : last - start],
                global_shape=piece.global_shape,
                offset=piece.global_offset,
                shape=(*(1 for _ in range(piece.prepend_axis_num)), *piece.local_shape),
                first=first - begin,
                replicas=_replicas(parameter, groups) if is_whole else None,
                copied_in=_copied_in(piece, groups),
                is_padded=piece.allow_shape_mismatch,
            )


def _replicas(parameter: Tensor, groups: Groups) -> dist.ProcessGroup | None:
    is_dense = getattr(parameter, "allreduce", True)
    group = groups.data_context if is_dense else groups.megatron.expt_dp
    return group if group.size() > 1 else None


def _copied_in(piece: ShardedTensor, groups: Groups) -> dist.ProcessGroup | None:
    """Return the ranks one of which stores a piece; None: this rank, or a data-parallel one."""
    assert isinstance(piece.replica_id, tuple)
    by_pipeline, by_tensor, _ = piece.replica_id
    if by_pipeline:
        return groups.world
    return groups.tensor if by_tensor else None

"""The process groups of a run as one value, for code that takes groups as arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)

from megatron_distill.errors import ConfigError, counted
from megatron_distill.runtime.layout import Layout


@dataclass(frozen=True)
class Groups:
    """Process groups of this rank; ranks and sizes are read from the group itself.

    Attributes:
        pipeline_back: the ranks of `pipeline` again, for messages from the last stage back to the
            rest. NCCL runs the operations of one group one after the other: two stages that send
            in both directions would wait for each other.
    """

    layout: Layout
    world: dist.ProcessGroup
    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    pipeline_back: dist.ProcessGroup
    context: dist.ProcessGroup
    data: dist.ProcessGroup
    data_context: dist.ProcessGroup
    model: dist.ProcessGroup  # tensor x pipeline: the ranks with the same data
    megatron: ProcessGroupCollection
    # Megatron-Core's process-wide variables of this layout.
    state: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage."""
        return self.pipeline.rank() == self.pipeline.size() - 1

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the first pipeline stage."""
        return self.pipeline.rank() == 0

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let Megatron-Core's functions without arguments return these groups inside the block."""
        outside = _state()
        vars(parallel_state).update(self.state)
        try:
            yield
        finally:
            vars(parallel_state).update(outside)


def create_groups(layout: Layout, *, timeout_minutes: float) -> Groups:
    """Build every process group of the layout, in Megatron-Core's rank order tp-cp-ep-dp-pp.

    Raises ConfigError if the world size does not divide into the layout, or if stages on GPUs
    would send by gloo.
    Collective: the whole world, group creation.
    """
    if layout.pipeline > 1:
        _require_messages(f"parallel.pipeline = {layout.pipeline}")
    world_size = dist.get_world_size()
    if world_size % layout.model_ranks:
        raise ConfigError(
            f"parallel.tensor * parallel.pipeline * parallel.context = {layout.tensor} * "
            f"{layout.pipeline} * {layout.context}: the layout needs a multiple of "
            f"{counted(layout.model_ranks, 'process', 'processes')}; there are {world_size}. Set "
            "--nproc-per-node or one of these keys"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1 if layout.expert > 1 else layout.tensor,
        distributed_timeout_minutes=timeout_minutes,
        create_gloo_process_groups=False,
    )
    collection = ProcessGroupCollection.use_mpu_process_groups()
    assert dist.group.WORLD is not None
    return Groups(
        layout=layout,
        world=dist.group.WORLD,
        tensor=collection.tp,
        pipeline=collection.pp,
        pipeline_back=_again(collection.pp, timeout_minutes=timeout_minutes),
        context=collection.cp,
        data=collection.dp,
        data_context=collection.dp_cp,
        model=collection.mp,
        megatron=collection,
        state=_state(),
    )


def _require_messages(cause: str) -> None:
    """Raise ConfigError for ranks on GPUs with gloo, which sends no memory of a GPU."""
    if torch.cuda.is_initialized() and dist.get_backend() == "gloo":
        raise ConfigError(
            f"{cause}: with runtime.backend = 'gloo' ranks on GPUs cannot send to each other; set "
            "runtime.backend=nccl, or runtime.device=cpu"
        )


def _again(group: dist.ProcessGroup, *, timeout_minutes: float) -> dist.ProcessGroup:
    """Return a second group of the same ranks; the group itself where it has one rank.

    The groups of all ranks are of one kind, and of one size.

    Collective: the whole world, one all-gather of ranks and group creation.
    """
    if group.size() == 1:
        return group
    own = dist.get_process_group_ranks(group)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    found = group
    for ranks in sorted({tuple(one) for one in every}):
        made = dist.new_group(list(ranks), timeout=timedelta(minutes=timeout_minutes))
        if list(ranks) == own:
            assert made is not None
            found = made
    return found


def create_second_groups(layout: Layout, *, timeout_minutes: float) -> Groups:
    """Build the groups of another layout beside those in use, which stay in use.

    Megatron-Core sees the second layout inside of `Groups.in_use` only. Raises ConfigError as
    `create_groups`.

    Collective: the whole world, group creation.
    """
    if dist.get_world_size() > 1:
        _require_messages("a teacher's `parallel`")
    outside = _state()
    vars(parallel_state).update({name: _unused(value) for name, value in outside.items()})
    try:
        return create_groups(layout, timeout_minutes=timeout_minutes)
    finally:
        vars(parallel_state).update(outside)


def _state() -> dict[str, Any]:
    """Return Megatron-Core's process-wide variables: its groups, ranks, sizes and buffers.

    They are the private ones of one module, found by their form: a new release's are included.
    """
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if name == "_global_process_group_list" or (name.startswith("_") and name.isupper())
    }


def _unused(value: Any) -> Any:
    """Return the value of a variable before any layout exists: none, or an empty table."""
    return {} if isinstance(value, dict) else None


def destroy_groups() -> None:
    """Destroy every group, so that another layout can be set up in the same process."""
    parallel_state.destroy_model_parallel()


# Large strides, so that tensor-parallel and expert offsets of two stages never give one seed.
_STAGE_STRIDE = 100_003
_DATA_STRIDE = 1_009


def seed_everything(seed: int, groups: Groups) -> None:
    """Seed every random state of this process; only dropout draws from them.

    Pipeline stages and data-parallel ranks draw different masks. Tensor-parallel ranks draw equal
    masks for replicated activations and different ones for sharded activations.
    """
    own = seed + _STAGE_STRIDE * groups.pipeline.rank() + _DATA_STRIDE * groups.data_context.rank()
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
    model_parallel_cuda_manual_seed(own, force_reset_rng=True)


@contextmanager
def repeated_dropout() -> Iterator[None]:
    """Restore the random states after the block, so that later code draws the same masks."""
    host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    try:
        yield
    finally:
        torch.set_rng_state(host)
        torch.cuda.set_rng_state(device)
        get_cuda_rng_tracker().set_states(tracked)

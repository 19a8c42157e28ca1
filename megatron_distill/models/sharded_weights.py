"""A frozen model whose layers' weights are sharded over its data-parallel ranks.

torch's FSDP2 (`fully_shard`) gathers the weights of a layer before it runs, while the layer before
it computes, and frees them afterwards. The embedding, the final norm and the head are whole on each
rank that has them. Every chunk of the loss needs the head, and a gather of the embedding would need
more buffer than a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.execution import Execution
from megatron_distill.models.gpt import HiddenStateGPT, empty_gpt
from megatron_distill.models.parameters import LAYERS_AT_ONCE
from megatron_distill.models.weights import described_tensors, parts_of
from megatron_distill.runtime.groups import Groups

__all__ = [
    "build_sharded",
    "has_sharded_weights",
    "needs_every_replica",
    "resident_numbers",
    "shard_ranks",
]

# A tensor is cut along its rows unless the padding to equal shards exceeds this part of it.
_MOST_PADDING = 1 / 8


def shard_ranks(groups: Groups) -> tuple[int, int]:
    """Return how many ranks share the weights of a layer, and those of its experts.

    The first is the number of data-parallel and context ranks, which have the same weights.
    """
    return groups.data_context.size(), _expert_group(groups).size()


def _expert_group(groups: Groups) -> dist.ProcessGroup:
    """Return the ranks with the same experts; all of a layer's weights without expert ranks."""
    if groups.layout.expert == 1:
        return groups.data_context
    group: dist.ProcessGroup = groups.megatron.expt_dp
    return group


@torch.no_grad()
def build_sharded(
    architecture: Architecture,
    *,
    groups: Groups,
    execution: Execution,
    write: Callable[[ShardedTensor], None],
) -> HiddenStateGPT:
    """Build this rank's chunk of a frozen model; one layer at a time is whole in memory.

    `write` fills one part of a tensor; its error leaves here. Nothing is exchanged before the model
    runs. Each of its forward passes has one all-gather per layer over the ranks of `shard_ranks`,
    and one for its experts with expert ranks. A rank receives `(D - 1) / D` of the layer's bytes.
    """
    assert execution.weight_shards is not None
    (chunk,) = empty_gpt(architecture, groups=groups, execution=execution, interleaved=False)
    chunk.freeze()
    in_layers = {id(parameter) for parameter in chunk.decoder.layers.parameters()}
    described = described_tensors(chunk, groups)
    _fill([value for value in described if id(value.data) not in in_layers], write)
    of_layers = {id(value.data): value for value in described if id(value.data) in in_layers}
    del described  # it would hold the layers' memory
    sharding = _Sharding(groups, execution)
    for layer in chunk.decoder.layers:
        for parameter in layer.parameters():
            parameter.untyped_storage().resize_(parameter.nbytes)
        _fill([of_layers.pop(id(parameter)) for parameter in layer.parameters()], write)
        sharding.add(layer)
    sharding.finish(chunk)
    return chunk


def _fill(
    values: Sequence[ShardedTensor | ShardedTensorFactory], write: Callable[[ShardedTensor], None]
) -> None:
    for value in values:
        value.data.zero_()  # a source may have fewer padding rows
        for part in parts_of(value):
            write(part)


class _Sharding:
    """Shards layers one after the other, and lets each begin the gathers of the next."""

    def __init__(self, groups: Groups, execution: Execution) -> None:
        device, shards = execution.device, execution.weight_shards
        assert shards is not None
        self._ranks, self._expert_ranks = shard_ranks(groups)
        self._mesh = DeviceMesh.from_group(groups.data_context, device.type)
        self._expert_mesh = DeviceMesh.from_group(_expert_group(groups), device.type)
        self._has_expert_mesh = groups.layout.expert > 1
        self._policy = OffloadPolicy()
        if shards.rest_on_host:
            self._policy = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        self._layers: list[nn.Module] = []
        self._experts: list[nn.Module] = []

    def add(self, layer: nn.Module) -> None:
        """Shard a layer's weights, and those of its experts over the ranks that have the same."""
        experts = getattr(layer.mlp, "experts", None) if self._has_expert_mesh else None
        whole: set[nn.Parameter] = set()
        if experts is not None and self._expert_ranks == 1:
            whole = set(experts.parameters())
        elif experts is not None:
            self._shard(experts, self._expert_mesh)
            self._experts.append(experts)
        if self._ranks > 1:
            self._shard(layer, self._mesh, whole)
            self._layers.append(layer)

    def finish(self, chunk: HiddenStateGPT) -> None:
        """Make the chunk the root, which begins the gathers of the first layer."""
        self._shard(chunk, self._mesh, _plain(chunk))
        for modules in (self._layers, self._experts):
            before: list[nn.Module] = [chunk, *modules]
            for module, following in zip(before, modules, strict=False):
                # After FSDP's own hook, which takes the weights of `module` from their gather. An
                # asynchronous gather runs on the group's stream, with a buffer of the stream that
                # computes: two layers are in memory, where FSDP's implicit order has three.
                module.register_forward_pre_hook(partial(_begin_gather, following))

    def _shard(
        self, module: nn.Module, mesh: DeviceMesh, whole: set[nn.Parameter] | None = None
    ) -> None:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=True,
            shard_placement_fn=partial(_cut, ranks=mesh.size()),
            offload_policy=self._policy,
            ignored_params=whole,
        )


def _begin_gather(following: nn.Module, *_: object) -> None:
    cast(FSDPModule, following).unshard(async_op=True)


def _plain(module: nn.Module) -> set[nn.Parameter]:
    return {one for one in module.parameters() if not isinstance(one, DTensor)}


def _cut(parameter: Tensor, *, ranks: int) -> Shard:
    """Return the axis along which a tensor is cut: its rows, unless they are few."""
    rows = parameter.shape[0]
    if -rows % ranks <= _MOST_PADDING * rows:
        return Shard(0)
    even = (axis for axis, size in enumerate(parameter.shape) if size % ranks == 0)
    return Shard(next(even, 0))


def has_sharded_weights(model: nn.Module) -> bool:
    """Whether the model is one of `build_sharded`."""
    return isinstance(model, FSDPModule)


def needs_every_replica(model: nn.Module, groups: Groups) -> bool:
    """Whether a forward pass needs all replicas, which have experts or shards of its weights."""
    return groups.layout.expert > 1 or has_sharded_weights(model)


def resident_numbers(model: nn.Module) -> int:
    """Return the most numbers of a model's weights that are on this rank's device at a time.

    With sharded weights: the tensors that are whole, the shards with their padding, unless they
    rest in host memory, and two layers.
    """
    plain = sum(parameter.numel() for parameter in _plain(model))
    if not isinstance(model, HiddenStateGPT) or not has_sharded_weights(model):
        return plain
    shards, layers = 0, [0]
    for layer in model.decoder.layers:
        whole = 0
        for parameter in layer.parameters():
            if isinstance(parameter, DTensor):
                size, mesh = _shard_size(parameter), parameter.device_mesh
                whole += size * mesh.size()
                rests_on_device = parameter.to_local().device.type == mesh.device_type
                shards += size if rests_on_device else 0
        layers.append(whole)
    return plain + shards + LAYERS_AT_ONCE * max(layers)


def _shard_size(parameter: DTensor) -> int:
    """Return the numbers in one shard of a tensor, with the padding to equal shards."""
    (place,) = parameter.placements
    cut = parameter.shape[cast(Shard, place).dim]
    return parameter.numel() // cut * -(-cut // parameter.device_mesh.size())

"""The projectors of feature losses and what trains them: small, and whole on every rank.

They are no part of the student: their optimizer is their own, checkpoints keep them apart, and
neither an export nor a run that starts from such a checkpoint sees them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_distill.losses import FeaturePair, Projector
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.optimizer_state import allocate_adam

_SHARED = "shared"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ProjectorShape:
    """What projectors there are, and of which sizes; the same in every run that continues one."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # student, within (an MLP's), teacher

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint's description."""
        return {key: list(value) for key, value in asdict(self).items()}


@dataclass(frozen=True)
class ProjectorOptimization:
    """How projectors are trained; the learning rate follows the student's schedule in shape."""

    learning_rate: float
    weight_decay: float  # of matrices
    betas: tuple[float, float]
    epsilon: float
    is_decoupled: bool  # AdamW, else Adam
    clip_grad_norm: float  # of all projectors together; 0: no clipping


def projector_name(pair: FeaturePair, *, shared: bool) -> str:
    """Return the name of a pair's projector; losses between the same two layers have one."""
    return _SHARED if shared else f"{pair.student}_{pair.teacher}"


class Projectors:
    """The projectors with their gradients and their Adam, the same bits on every rank."""

    def __init__(
        self,
        shape: ProjectorShape,
        optimization: ProjectorOptimization,
        *,
        seed: int,
        groups: Groups,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self._optimization = optimization
        self._groups = groups
        self._modules = {name: Projector(shape.sizes, device=device) for name in shape.names}
        for name, module in self._modules.items():
            module.initialise(name, seed=seed)
        parameters = [parameter for _, parameter in self.named_parameters()]
        self._gradient = torch.zeros(sum(p.numel() for p in parameters), device=device)
        parts = self._gradient.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self._adam = _adam(parameters, optimization)
        allocate_adam(self._adam)

    def of(self, pair: FeaturePair) -> Projector:
        """Return a pair's projector."""
        shared = self.shape.names == (_SHARED,)
        return self._modules[projector_name(pair, shared=shared)]

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield every parameter under its name in a checkpoint."""
        for name, module in self._modules.items():
            for part, parameter in module.named_parameters():
                yield f"{name}.{part}", parameter

    def zero_gradients(self) -> None:
        """Forget the gradients."""
        self._gradient.zero_()

    def reduce_gradients(self) -> Tensor:
        """Add up all ranks' gradients of a step; return their norm, an fp32 scalar.

        Without sequence parallelism the ranks of a tensor group have found the same, and one of
        them speaks for all, so that none can come to differ in its last bits.

        Collective: one all-reduce of 4 bytes per parameter in the tensor, the data x context and
        the pipeline group (a stage without a pair adds zero).
        """
        groups = self._groups
        if not groups.layout.sequence and groups.tensor.rank() > 0:
            self._gradient.zero_()
        for group in (groups.tensor, groups.data_context, groups.pipeline):
            if group.size() > 1:
                dist.all_reduce(self._gradient, group=group)
        return self._gradient.norm()

    def apply_gradients(self, schedule: OptimizerParamScheduler, *, norm: float) -> None:
        """Clip and apply the gradients, whose norm is finite."""
        optimization = self._optimization
        if optimization.clip_grad_norm > 0.0:
            self._gradient *= min(1.0, optimization.clip_grad_norm / (norm + 1e-6))
        rate = schedule.get_lr({}) * (optimization.learning_rate / schedule.max_lr)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()

    def sharded_state(self) -> dict[str, Any]:
        """Describe parameters and moments to a checkpoint; the first rank writes them."""
        return {key: _replicated(key, tensor) for key, tensor in self._tensors()}

    def load(self, state: Mapping[str, Tensor], *, applied_steps: int) -> None:
        """Continue from what was loaded for `sharded_state` and the number of steps applied."""
        with torch.no_grad():
            for key, tensor in self._tensors():
                tensor.copy_(state[key])
        for moments in self._adam.state.values():
            moments["step"].fill_(applied_steps)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.named_parameters():
            yield f"projector.{name}", parameter.data
            for moment in _MOMENTS:
                yield f"projector.{moment}.{name}", self._adam.state[parameter][moment]


def _adam(
    parameters: list[torch.nn.Parameter], optimization: ProjectorOptimization
) -> torch.optim.Adam:
    kind = torch.optim.AdamW if optimization.is_decoupled else torch.optim.Adam
    # Two groups, also where both have the same decay.
    groups = (
        (optimization.weight_decay, [p for p in parameters if p.dim() > 1]),
        (0.0, [p for p in parameters if p.dim() == 1]),
    )
    return kind(
        [{"params": some, "weight_decay": decay} for decay, some in groups],
        lr=optimization.learning_rate,
        betas=optimization.betas,
        eps=optimization.epsilon,
    )


def _replicated(key: str, tensor: Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, tensor, replica_id=dist.get_rank())

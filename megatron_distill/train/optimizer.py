"""Megatron's data parallelism, optimizer and learning-rate schedule around a student.

What an optimizer puts into a checkpoint and takes from one: moments, and nothing of its layout.

Megatron-Core would also keep its parameter groups. How many there are depends on the layout, and
they hold settings that would silently win over the configuration of a resumed run. Both are the
run's own here; the number of steps that were applied is all that Adam needs besides its moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_distill.config import OptimizerConfig, ScheduleConfig
from megatron_distill.models.gpt import HiddenStateGPT
from megatron_distill.runtime.groups import Groups

_DECAY_STYLES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "WSD"}


def wrap_data_parallel(
    chunks: Sequence[HiddenStateGPT], config: OptimizerConfig, *, groups: Groups
) -> list[DistributedDataParallel]:
    """Give each model chunk its gradient buffers and its reduction over data x context ranks."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.distributed and config.overlap_param_gather,
        use_distributed_optimizer=config.distributed,
        check_for_nan_in_grad=False,  # the step looks at the global norm instead
        average_in_collective=False,
    )
    return [
        DistributedDataParallel(
            config=chunk.config,
            ddp_config=ddp_config,
            module=chunk,
            # Interleaved stages reduce a whole chunk at a time.
            disable_bucketing=index > 0,
            pg_collection=groups.megatron,
        )
        for index, chunk in enumerate(chunks)
    ]


def build_optimizer(
    wrapped: Sequence[DistributedDataParallel],
    config: OptimizerConfig,
    schedule: ScheduleConfig,
    *,
    dtype: torch.dtype,
) -> ChainedOptimizer:
    """Return Adam or AdamW over the wrapped chunks, states in fp32."""
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            decoupled_weight_decay=config.name == "adamw",
            lr=config.learning_rate,
            min_lr=schedule.min_learning_rate,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.epsilon,
            clip_grad=config.clip_grad_norm,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=config.distributed,
            overlap_param_gather=config.distributed and config.overlap_param_gather,
        ),
        list(wrapped),
        use_gloo_process_groups=False,
    )
    allocate_moments(optimizer)
    return optimizer


def build_schedule(
    optimizer: ChainedOptimizer,
    optimizer_config: OptimizerConfig,
    schedule: ScheduleConfig,
    *,
    steps: int,
) -> OptimizerParamScheduler:
    """Return Megatron's schedule: linear warm-up, then the configured decay; weight decay fixed.

    The optimizer's groups have the rate of the first update already. The schedule counts updates
    and is stepped after each that was applied.
    """
    # A warm-up as long as the run has no decay; Megatron requires at least one update of it.
    decay_steps = schedule.decay_steps or max(steps, schedule.warmup_steps + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.initial_learning_rate,
        max_lr=optimizer_config.learning_rate,
        min_lr=schedule.min_learning_rate,
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=_DECAY_STYLES[schedule.decay],
        start_wd=optimizer_config.weight_decay,
        end_wd=optimizer_config.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
        wsd_decay_steps=schedule.wsd_decay_steps,
        lr_wsd_decay_style=schedule.wsd_decay_form,
    )


@dataclass(frozen=True)
class Update:
    """What one optimizer step did."""

    grad_norm: float
    applied: bool


def connect_schedule(
    wrapped: Sequence[DistributedDataParallel],
    config: OptimizerConfig,
    *,
    positions: int,
) -> None:
    """Tell Megatron's schedules how to scale the loss and when gradients are communicated.

    The objective is a mean already. Megatron's experts scale their auxiliary loss by their number
    of tokens and expect a division by the global number; so the loss function hands over
    `positions` times the objective, and the gradient of both is divided by `positions` here, once.
    """
    model_config = wrapped[0].config
    model_config.grad_scale_func = _Division(1.0 / positions)
    model_config.finalize_model_grads_func = _finalise
    if config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        start = [chunk.start_grad_sync for chunk in wrapped]
        single = len(wrapped) == 1
        model_config.no_sync_func = no_sync[0] if single else no_sync
        model_config.grad_sync_func = None if single else start
    if config.distributed and config.overlap_param_gather and len(wrapped) > 1:
        model_config.param_sync_func = [chunk.start_param_sync for chunk in wrapped]


@dataclass(frozen=True)
class _Division:
    factor: float

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.factor


def _finalise(
    wrapped: list[DistributedDataParallel],
    _: torch.Tensor | None = None,
    pg_collection: object = None,
    force_all_reduce: bool = False,
) -> None:
    """Complete the gradient reductions; the token count is not used, the loss is scaled already."""
    finalize_model_grads(
        wrapped, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce
    )


def apply_gradients(
    optimizer: ChainedOptimizer, *, clip_grad_norm: float, loss_is_finite: bool
) -> Update:
    """Clip and apply the gradients, unless the loss or their global norm is not finite.

    Every rank decides alike: the norm and the loss are global.

    Collective: one all-reduce of a float per parameter kind (dense, experts).
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not (loss_is_finite and math.isfinite(norm)):
        return Update(norm, applied=False)
    if clip_grad_norm > 0.0:
        for part in optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad_norm, total_norm=norm)
    optimizer.step_with_ready_grads()
    return Update(norm, applied=True)


# What the distributed optimizer and the other one call the fp32 weights of a bf16 model.
_SHARDED_MASTER = "optimizer.state.param."
_MASTER = "optimizer.state.fp32_param."


def allocate_moments(optimizer: ChainedOptimizer) -> None:
    """Give torch's Adam the state that its first step would give it.

    Megatron-Core describes the state to a checkpoint by what is there, and without Transformer
    Engine or Apex it cannot do so before the first step: neither to load, nor to save after a step
    that was not applied.
    """
    for adam in _torch_adams(optimizer):
        allocate_adam(adam)


def allocate_adam(adam: torch.optim.Adam) -> None:
    """Give one Adam the state that its first step would give it."""
    for group in adam.param_groups:
        on_device = group["capturable"] or group["fused"]
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.zeros((), device=parameter.device if on_device else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def without_layout(state: dict[str, Any], *, has_master_weights: bool) -> dict[str, Any]:
    """Return an optimizer's sharded state in the form that any other optimizer can be filled from.

    Weights that are stepped in fp32 and rounded for the model have one name, whoever holds them;
    where the model itself is fp32, they are its weights and are left out.
    """
    kept: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            kept[key] = without_layout(value, has_master_weights=has_master_weights)
        elif not _is_master(value):
            kept[key] = value
        elif has_master_weights:
            value.key = value.key.replace(_SHARDED_MASTER, _MASTER, 1)
            kept[key] = value
    return kept


def _is_master(leaf: Any) -> bool:
    return isinstance(leaf, ShardedBase) and leaf.key.startswith(_SHARDED_MASTER)


def shards_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an optimizer's sharded state that belongs into a checkpoint."""
    shards, _ = extract_matching_values(state, lambda leaf: isinstance(leaf, ShardedBase))
    return shards


def load_optimizer(
    optimizer: ChainedOptimizer,
    state: dict[str, Any],
    shards: dict[str, Any],
    *,
    applied_steps: int,
) -> None:
    """Continue from a checkpoint.

    `state` is the optimizer's own sharded state, `shards` what was loaded for `shards_of(state)`,
    `applied_steps` how often the saved optimizer had stepped.
    """
    filled = _filled(state, shards)
    single = len(optimizer.chained_optimizers) == 1
    for part in [filled] if single else filled.values():
        _set_steps(part, applied_steps)
    optimizer.load_state_dict(filled)
    for adam in _torch_adams(optimizer):
        # Upstream hands one tensor to all parameters, and each would count in it.
        for moments in adam.state.values():
            moments["step"] = moments["step"].clone()


def _torch_adams(optimizer: ChainedOptimizer) -> list[torch.optim.Adam]:
    inner = [part.optimizer for part in optimizer.chained_optimizers]
    return [adam for adam in inner if isinstance(adam, torch.optim.Adam)]


def _filled(own: Any, loaded: Any) -> Any:
    """Put what was loaded where the sharded leaves stand."""
    if isinstance(own, dict):
        return {key: _filled(value, _at(loaded, key)) for key, value in own.items()}
    if isinstance(own, list):
        return [_filled(value, _at(loaded, index)) for index, value in enumerate(own)]
    if isinstance(own, ShardedBase):
        assert loaded is not None
        return loaded
    return own.unwrap() if isinstance(own, LocalNonpersistentObject) else own


def _at(loaded: Any, place: Any) -> Any:
    """Return an entry of a dict or a list; what holds no shard is in neither."""
    if isinstance(loaded, list):
        return loaded[place] if place < len(loaded) else None
    return None if loaded is None else loaded.get(place)


def _set_steps(part: dict[str, Any], steps: int) -> None:
    """Set the number of steps in every form in which Megatron-Core's optimizers read it."""
    inner = part.get("optimizer", part)
    for group in inner["param_groups"]:
        group["step"] = steps
    if "state" in inner:
        inner["state"]["common_step"] = torch.tensor(float(steps))

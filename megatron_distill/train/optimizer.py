"""Megatron's data parallelism, optimizer and learning-rate schedule around a student."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
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
from megatron_distill.train.phase_timers import MegatronTimers, PhaseTimers

_DECAY_STYLES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "WSD"}


def wrap_data_parallel(
    chunks: Sequence[HiddenStateGPT], config: OptimizerConfig, *, groups: Groups
) -> list[DistributedDataParallel]:
    """Give each model chunk its gradient buffers and its reduction over data x context ranks."""
    overlaps_gather = config.distributed and config.overlap_param_gather
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=overlaps_gather,
        # Interleaved schedules start the gathers of a chunk themselves, see `connect_schedule`.
        align_param_gather=overlaps_gather and len(chunks) > 1,
        bucket_size=config.bucket_size,
        use_distributed_optimizer=config.distributed,
        check_for_nan_in_grad=False,  # the step checks the global norm instead
        average_in_collective=False,
    )
    return [
        DistributedDataParallel(
            config=chunk.config,
            ddp_config=ddp_config,
            module=chunk,
            # Interleaved stages reduce one whole chunk at a time.
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

    The optimizer's groups already have the rate of the first update. The schedule counts updates
    and is stepped after each applied one.
    """
    # A warm-up over the whole run leaves no decay; Megatron requires at least one step of it.
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
    """Result of one optimizer step."""

    grad_norm: float
    applied: bool


def connect_schedule(
    wrapped: Sequence[DistributedDataParallel],
    config: OptimizerConfig,
    *,
    positions: int,
    timers: PhaseTimers | None = None,
) -> None:
    """Set the loss scaling, the gradient communication and the timers of Megatron's schedules.

    The objective is a mean already. Megatron's experts scale their auxiliary loss by their number
    of tokens and expect a division by the global number. The loss function therefore returns
    `positions` times the objective, and both gradients are divided by `positions` here, once.
    """
    model_config = wrapped[0].config
    model_config.grad_scale_func = _Division(1.0 / positions)
    model_config.finalize_model_grads_func = _finalise
    model_config.timers = None if timers is None else MegatronTimers(timers)
    if config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        start = [chunk.start_grad_sync for chunk in wrapped]
        single = len(wrapped) == 1
        model_config.no_sync_func = no_sync[0] if single else no_sync
        model_config.grad_sync_func = None if single else start
    if config.distributed and config.overlap_param_gather and len(wrapped) > 1:
        model_config.param_sync_func = [chunk.start_param_sync for chunk in wrapped]


def wait_for_parameter(wrapped: DistributedDataParallel, parameter: torch.Tensor) -> None:
    """Wait until a parameter's updated values have arrived, as upstream's hook on its module does.

    For a parameter that is read without a call of its module. Does nothing if the parameters were
    gathered together, or if this one arrived already.

    Collective: data x context group, the parameter's bucket, if its gather was not started.
    """
    group = wrapped.param_to_bucket_group.get(parameter)
    if group is not None and wrapped.remove_forward_pre_hook_handles:
        group.finish_param_sync(skip_next_bucket_dispatch=wrapped.ddp_config.align_param_gather)


def finish_gathers(wrapped: Sequence[DistributedDataParallel]) -> None:
    """Wait for every gather of parameters that was started and not waited for.

    No gather may outlast its step: upstream takes one for the gather of newer values, and the
    optimizer would write the parameters that it sends.
    """
    for chunk in wrapped:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)


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
    """Complete the gathers and reductions; the token count is unused, the loss is scaled."""
    finish_gathers(wrapped)
    finalize_model_grads(
        wrapped, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce
    )


def apply_gradients(
    optimizer: ChainedOptimizer, *, clip_grad_norm: float, loss_is_finite: bool
) -> Update:
    """Clip and apply the gradients, unless the loss or their global norm is not finite.

    Every rank makes the same decision: the norm and the loss are global.

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


def allocate_moments(optimizer: ChainedOptimizer) -> None:
    """Allocate the state that the first step of Adam would create, torch's or a fused one.

    Megatron-Core derives the checkpoint's entries from the existing state. Without it torch's Adam
    can neither load nor save, and a fused one cannot save after a step that was not applied.
    """
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.Adam):
            allocate_adam(part.optimizer)
        elif part.optimizer is not None:  # None: this rank has none of the part's parameters
            part.init_state_fn(part.optimizer, part.config)


def allocate_adam(adam: torch.optim.Adam) -> None:
    """Allocate the state that the first step of one Adam would create; on a GPU it is fused.

    One kernel reads gradient, moments and weight once; torch's default there has one per operation.
    """
    for group in adam.param_groups:
        on_cuda = bool(group["params"]) and all(one.is_cuda for one in group["params"])
        group["fused"] = on_cuda or group["fused"]
        on_device = group["capturable"] or group["fused"]
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.zeros((), device=parameter.device if on_device else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

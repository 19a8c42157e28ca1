"""Megatron's data parallelism, optimizer and learning-rate schedule around a student."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import clip_grads, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

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
    allocate_moments(optimizer, next(wrapped[0].parameters()).device)
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
    """One optimizer step, launched on the device.

    Attributes:
        squares: of the gradients' global norm, by kind of parameter (dense, experts) or of both
            together; fp32 [k].
        skipped: whether weights and states stay as they are; a bool scalar.
    """

    squares: Tensor
    skipped: Tensor


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


def wait_for_parameter(wrapped: DistributedDataParallel, parameter: Tensor) -> None:
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

    def __call__(self, loss: Tensor) -> Tensor:
        return loss * self.factor


def _finalise(
    wrapped: list[DistributedDataParallel],
    _: Tensor | None = None,
    pg_collection: object = None,
    force_all_reduce: bool = False,
) -> None:
    """Complete the gathers and reductions; the token count is unused, the loss is scaled."""
    finish_gathers(wrapped)
    finalize_model_grads(
        wrapped, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce
    )


@torch.no_grad()
def apply_gradients(
    optimizer: ChainedOptimizer, *, clip_grad_norm: float, checked: Sequence[Tensor]
) -> Update:
    """Clip and apply the gradients, unless their norm or one of the checked scalars is not finite.

    Every rank makes the same decision: the norm is global, and so must the scalars be. The host
    reads nothing, except where `step_unless` says so.

    Collective: one all-reduce of a float per parameter kind (dense, experts), and those of the
    optimizer, whether the step is skipped or not.
    """
    optimizer.prepare_grads()
    squares = _squared_norms(optimizer, device=checked[0].device)
    parts = optimizer.chained_optimizers
    if clip_grad_norm > 0.0:
        factor = clip_factor(squares.double().sum().sqrt(), clip_grad_norm)
        parameters = [one for part in parts for one in part.get_parameters()]
        gradients = [one.grad for one in parameters if one.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)
    skipped = ~torch.cat([torch.stack(list(checked)), squares]).isfinite().all()
    adams = [part.optimizer for part in parts if part.optimizer is not None]
    step_unless(skipped, adams, optimizer.step_with_ready_grads)
    return Update(squares, skipped)


def _squared_norms(optimizer: ChainedOptimizer, *, device: torch.device) -> Tensor:
    """Return the square of the gradients' norm, fp32 [k], as upstream's `get_grad_norm` sums it.

    Upstream copies the sum to the host, which takes the root.
    """
    parts = optimizer.chained_optimizers
    together = optimizer.grads_states_parallel_group_is_shared()
    squares = []
    for some in [parts] if together else [[part] for part in parts]:
        gradients = [one for part in some for one in part.get_main_grads_for_grad_norm()]
        norm = torch.zeros(1, device=device)
        if gradients:
            unused = torch.zeros(1, dtype=torch.int, device=device)
            norm, _ = clip_grads.multi_tensor_applier(
                clip_grads.l2_norm_impl, unused, [gradients], False
            )
        square = norm**2.0
        dist.all_reduce(square, group=some[0].get_grad_stats_parallel_group())
        squares.append(square)
    return torch.cat(squares)


def gradient_norm(squares: Sequence[float]) -> float:
    """Return the global norm of an update's squares, in upstream's order of operations."""
    roots = [square**0.5 for square in squares]
    return roots[0] if len(roots) == 1 else math.sqrt(sum(root**2 for root in roots))


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return what gradients of this norm are multiplied by, an fp32 scalar of at most one.

    One leaves every bit as it is. The quotient is in fp64, as upstream's is on the host.
    """
    norm = norm.double()
    return (torch.full_like(norm, limit) / (norm + 1.0e-6)).clamp(max=1.0).float()


def step_unless(
    skipped: Tensor, adams: Sequence[torch.optim.Optimizer], step: Callable[[], object]
) -> None:
    """Call `step`, which steps these optimizers, unless the bool scalar `skipped` is true.

    torch's fused Adam reads the decision on the device: its kernel then writes nothing and its
    count of steps stays, as with torch's GradScaler. Of any other the host decides: on a GPU it
    waits, as with Transformer Engine's Adam, which has no such argument.
    """
    if not all(isinstance(one, torch.optim.Adam) and _is_fused(one) for one in adams):
        if not skipped.item():
            step()
        return
    for adam in adams:
        vars(adam)["found_inf"] = skipped.float()
    step()
    for adam in adams:
        del vars(adam)["found_inf"]


def _is_fused(adam: torch.optim.Adam) -> bool:
    return all(group["fused"] for group in adam.param_groups)


def allocate_moments(optimizer: ChainedOptimizer, device: torch.device) -> None:
    """Allocate the state that the first step of Adam would create, torch's or a fused one.

    Megatron-Core derives the checkpoint's entries from the existing state. Without it torch's Adam
    can neither load nor save, and a fused one cannot save after a step that was not applied.
    """
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.Adam):
            allocate_adam(part.optimizer, device)
        elif part.optimizer is not None:  # None: this rank has none of the part's parameters
            part.init_state_fn(part.optimizer, part.config)


def allocate_adam(adam: torch.optim.Adam, device: torch.device) -> None:
    """Allocate the state that the first step of one Adam would create; on a GPU it is fused.

    One kernel reads gradient, moments and weight once; torch's default there has one per operation.
    All groups are fused, also those without a parameter on this rank: `step_unless` must choose
    alike on all ranks.
    """
    for group in adam.param_groups:
        group["fused"] = device.type == "cuda" or group["fused"]
        on_device = group["capturable"] or group["fused"]
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.zeros((), device=parameter.device if on_device else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

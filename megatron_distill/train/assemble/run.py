"""Assembly of a training run from its configuration, and its execution."""

from __future__ import annotations

import gc
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_distill.config import (
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    ValidationConfig,
    with_steps,
)
from megatron_distill.data.prefetch import Lookahead, PrefetchedSteps, StepSource, exchange_group
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.errors import counted
from megatron_distill.log import get_logger
from megatron_distill.models.architecture import Execution, Recompute
from megatron_distill.runtime.collectives import on_first_rank, together
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.launch import Device
from megatron_distill.runtime.termination import TerminationRequest
from megatron_distill.train.assemble.checks import check_start, newest_checkpoint
from megatron_distill.train.assemble.data import RunSamples, open_training_loader
from megatron_distill.train.assemble.distillation import (
    assemble_held_out,
    build_balancing,
)
from megatron_distill.train.assemble.models import (
    build_student,
    execution_on,
    export_source,
    job_groups,
)
from megatron_distill.train.assemble.open_run import OpenRun, open_run
from megatron_distill.train.assemble.reporting import (
    banner_of_run,
    open_metrics,
    throughput_of_run,
)
from megatron_distill.train.assemble.start import note_start, plain_settings
from megatron_distill.train.assemble.stored import require_samples
from megatron_distill.train.balancing import Balancing
from megatron_distill.train.checkpoint.folder import CheckpointFolder, Description
from megatron_distill.train.loop import LoopPlan, Parts, train
from megatron_distill.train.optimizer import (
    build_optimizer,
    build_schedule,
    connect_schedule,
    wrap_data_parallel,
)
from megatron_distill.train.phase_timers import PhaseTimers
from megatron_distill.train.run_folder import FolderAsFound, keep_assets, run_folder
from megatron_distill.train.run_state import RunState
from megatron_distill.train.step import Student

_LOGGER = get_logger(__name__)


def run_training(config: RunConfig, device: Device, termination: TerminationRequest) -> bool:
    """Assemble and run one training in the current world; return whether it reached its last step.

    Raises a MegatronDistillError on all ranks together. Process groups are gone afterwards, so that
    another run may follow in the same processes.
    """
    # Objects of the imports are permanent: Megatron-Core collects garbage at every save, and a scan
    # of them would stop all ranks for a tenth of a second or more.
    is_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        with (
            job_groups(config.parallel, config.runtime, seed=config.seed, trains=True) as groups,
            ExitStack() as resources,
            device.alone,
        ):
            parts, plan = _assemble(config, device, groups, resources)
            if parts.state.step >= plan.steps:
                _LOGGER.info(
                    "nothing to do: %s done, train.steps is %d",
                    "1 step is" if parts.state.step == 1 else f"{parts.state.step} steps are",
                    plan.steps,
                )
                return True
            return train(parts, plan, termination)
    finally:
        if not is_frozen:
            # Else Triton's bindings, which Megatron-Core imports, report leaks at exit.
            gc.unfreeze()


def _assemble(
    config: RunConfig, device: Device, groups: Groups, resources: ExitStack
) -> tuple[Parts, LoopPlan]:
    """Check, build the models, then read the data; a failure restores the run folder."""
    found = _checked_folder(config, resources)
    opened = open_run(config, _execution(config.train, device), groups, resources)
    distillation, samples = opened.distillation, opened.samples
    _keep_assets(config.output, config.student, samples.tokenizer)
    if config.train.epochs is not None:
        config = _with_computed_steps(config, samples, device.torch_device)
    if distillation.stored is not None and config.data.sources:
        require_samples(distillation.stored, config.train)
    state = _build_state(
        opened,
        seed=config.seed,
        train=config.train,
        optimizer=config.optimizer,
        schedule=config.schedule,
        checkpoints=_checkpoints(config.output, config.checkpoint),
        configuration=plain_settings(config),
        groups=groups,
    )
    resources.callback(state.checkpoints.close)
    balancing = build_balancing(config.objective, distillation.objective)
    newest = _checkpoint_to_resume(config.output, config.checkpoint, state)
    held_out = assemble_held_out(
        samples,
        config.train,
        config.objective,
        distillation,
        groups=groups,
        device=device.torch_device,
    )
    loader = _open_source(
        samples,
        config.train,
        groups,
        device.torch_device,
        resources,
        timeout_seconds=config.runtime.timeout_seconds,
    )
    _resume(state, balancing, loader, newest)
    note_start(config, resumed=newest)
    if state.step < config.train.steps:
        _LOGGER.info("%s", banner_of_run(config, opened, state))
    metrics = open_metrics(config, resume_step=state.step)
    resources.callback(metrics.close)
    found.has_started()
    parts = Parts(
        state=state,
        teacher=distillation.teacher,
        objective=distillation.objective_of(samples.names(held_out=False)),
        balancing=balancing,
        loader=loader,
        held_out=held_out,
        metrics=metrics,
        throughput=throughput_of_run(opened, config.train, groups, device),
        timers=PhaseTimers(device.torch_device),
        device=device.torch_device,
    )
    return parts, _plan(config.train, config.validation, config.checkpoint, config.optimizer)


def _checked_folder(config: RunConfig, resources: ExitStack) -> FolderAsFound:
    """Run the checks that need no data, then create and lock the run folder."""
    found = FolderAsFound(
        Path(config.output),
        kept_file="config.yaml",
        prepared="cache",
        work=("checkpoints", "metrics.jsonl"),
    )
    with together():
        if dist.get_rank() == 0:
            check_start(config)
    resources.enter_context(run_folder(config.output))
    resources.enter_context(found.put_back_on_failure())
    return found


def _keep_assets(output: str, student: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """Save the tokenizer and the files for an export, on the rank that has the tokenizer."""
    with together():
        if tokenizer is not None:
            keep_assets(output, export_source(student), tokenizer)


def _with_computed_steps(config: RunConfig, samples: RunSamples, device: torch.device) -> RunConfig:
    """Replace `train.epochs` by the number of steps.

    Raises DataError or ConfigError on all ranks: the samples cannot be counted, or the schedule
    does not fit the steps.

    Collective: world, one broadcast of a short object.
    """
    epochs = config.train.epochs
    assert epochs is not None, "the caller has looked"
    said = [on_first_rank(samples.count_epoch, device=device)]
    dist.broadcast_object_list(said, src=0)
    count = said[0]
    assert count is not None, "the first rank has counted"
    steps = math.ceil(epochs * count / config.train.global_batch_size)
    resolved, warnings = with_steps(config, steps)
    _LOGGER.info(
        "%s of %s: %s",
        "1 epoch" if epochs == 1 else f"{epochs:g} epochs",
        counted(count, "sample"),
        counted(steps, "step"),
    )
    if dist.get_rank() == 0:
        for warning in warnings:
            _LOGGER.warning("%s", warning)
    return resolved


def _execution(train: TrainConfig, device: Device) -> Execution:
    recompute = Recompute.of(train.recompute, train.recompute_modules, train.recompute_layers)
    return execution_on(device, precision=train.precision, recompute=recompute)


def _open_source(
    samples: RunSamples,
    train: TrainConfig,
    groups: Groups,
    device: torch.device,
    resources: ExitStack,
    *,
    timeout_seconds: float,
) -> StepSource:
    """Open the training stream; a thread takes each step while the one before runs.

    Where the teacher is a store, steps are taken two steps early.

    Collective: world, creation of the group that exchanges the batches.
    """
    exchange = exchange_group(timeout_seconds=timeout_seconds)
    loader = open_training_loader(samples, train, groups=groups, device=device, exchange=exchange)
    source = resources.enter_context(
        PrefetchedSteps(loader, last_step=train.steps, device=device, group=exchange)
    )
    stored = samples.stored
    if stored is None:
        return source
    return Lookahead(
        source, last_step=train.steps, expect=stored.teacher.expect, stores=stored.identities
    )


def _build_state(
    opened: OpenRun,
    *,
    seed: int,
    train: TrainConfig,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    checkpoints: CheckpointFolder,
    configuration: dict[str, Any],
    groups: Groups,
) -> RunState:
    """Build the student, its optimizer and its schedule, at step 0."""
    features, execution = opened.distillation.objective.features, opened.execution
    length = opened.samples.data.sequence_length
    chunks = build_student(
        opened.origin, seed=seed, groups=groups, execution=execution, layers=opened.layers
    )
    if features is not None:
        features.attach(chunks)
    wrapped = wrap_data_parallel(chunks, optimizer, groups=groups)
    connect_schedule(wrapped, optimizer, positions=train.global_batch_size * length)
    built = build_optimizer(wrapped, optimizer, schedule, dtype=execution.dtype)
    return RunState(
        student=Student(chunks, wrapped, groups, length),
        optimizer=built,
        schedule=build_schedule(built, optimizer, schedule, steps=train.steps),
        architecture=opened.origin.architecture,
        tokenizer_hash=opened.vocabulary.identity,
        features=features,
        configuration=configuration,
        checkpoints=checkpoints,
    )


def _checkpoints(output: str, section: CheckpointConfig) -> CheckpointFolder:
    return CheckpointFolder(
        Path(output) / "checkpoints", keep=section.keep, asynchronous=section.asynchronous
    )


def _checkpoint_to_resume(output: str, section: CheckpointConfig, state: RunState) -> Path | None:
    """Return the newest complete checkpoint of an earlier start, checked against this model.

    Raises ConfigError or CheckpointError on all ranks.
    """
    if section.save:
        state.checkpoints.prepare()
    said: list[Path | None] = [None]
    with together():
        if dist.get_rank() == 0:
            said = [newest_checkpoint(output, section)]
            if said[0] is not None:
                state.require_same(Description.read(said[0]), said[0])
    dist.broadcast_object_list(said, src=0)
    return said[0]


def _resume(state: RunState, balancing: Balancing, loader: StepSource, newest: Path | None) -> None:
    if newest is not None:
        state.restore(newest, loader)
        state.balance = balancing.resumed(state.balance)
        _LOGGER.info("resumed from %s at step %d", newest, state.step)


def _plan(
    train: TrainConfig,
    validation: ValidationConfig,
    checkpoint: CheckpointConfig,
    optimizer: OptimizerConfig,
) -> LoopPlan:
    return LoopPlan(
        steps=train.steps,
        validation_interval=validation.interval,
        checkpoint_interval=checkpoint.interval,
        save=checkpoint.save,
        clip_grad_norm=optimizer.clip_grad_norm,
        max_bad_steps=train.max_bad_steps,
    )

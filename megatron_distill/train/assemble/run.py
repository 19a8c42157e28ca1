"""Assembly of a training run from its configuration, and its execution."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron_distill.config import (
    CheckpointConfig,
    RunConfig,
    RuntimeConfig,
    TrainConfig,
    with_steps,
)
from megatron_distill.data.prefetch import PrefetchedSteps, StepSource, exchange_group
from megatron_distill.errors import counted
from megatron_distill.log import get_logger
from megatron_distill.models.execution import Execution, Fp8, Recompute
from megatron_distill.runtime.collectives import from_first_rank, on_first_rank, together
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.imports import permanent_objects
from megatron_distill.runtime.launch import PRECISIONS, Device
from megatron_distill.runtime.termination import TerminationRequest
from megatron_distill.train.assemble.distillation import (
    OpenRun,
    build_balancing,
    open_held_out,
    open_run,
)
from megatron_distill.train.assemble.evaluation import best_rule, open_evaluation
from megatron_distill.train.assemble.models import export_source, job_groups, tensor_overlap
from megatron_distill.train.assemble.own_ranks import publish_data, publish_start, run_teacher
from megatron_distill.train.assemble.site import Site
from megatron_distill.train.assemble.start import check_start, newest_checkpoint, note_start
from megatron_distill.train.assemble.stores.teacher import require_samples
from megatron_distill.train.assemble.tasks import NO_TASKS, open_run_tasks
from megatron_distill.train.checkpoint.description import resumed_description
from megatron_distill.train.checkpoint.folder import CheckpointFolder
from megatron_distill.train.loop import LoopInputs, LoopPlan, train
from megatron_distill.train.metrics import MetricsLog, open_metrics
from megatron_distill.train.optimizer import (
    build_optimizer,
    build_schedule,
    connect_schedule,
    wrap_data_parallel,
)
from megatron_distill.train.phase_report import PhaseReports
from megatron_distill.train.phase_timers import PhaseTimers
from megatron_distill.train.profile import StepProfiler
from megatron_distill.train.progress import TrainingProgress
from megatron_distill.train.reports.opened_run import opened_run_banner
from megatron_distill.train.reports.start_memory import warn_of_memory
from megatron_distill.train.run_folder import (
    FolderAsFound,
    keep_assets,
    run_folder,
)
from megatron_distill.train.run_state import RunState
from megatron_distill.train.start_clock import StartClock
from megatron_distill.train.step import Student
from megatron_distill.train.teachers.several import on_own_ranks
from megatron_distill.train.throughput import PeakMemory
from megatron_distill.train.validation import logged_validation

_LOGGER = get_logger(__name__)


def run_training(config: RunConfig, device: Device, termination: TerminationRequest) -> bool:
    """Assemble and run one training in the current world; return whether it reached its last step.

    Raises a MegatronDistillError on all ranks together. Process groups are gone afterwards, so that
    another run may follow in the same processes.
    """
    if device.bridge is not None and device.bridge.is_teacher:
        run_teacher(config, device)
        return True
    with (
        device.meet("run"),
        permanent_objects(),
        job_groups(config.parallel, config.runtime, seed=config.seed, trains=True) as groups,
        ExitStack() as resources,
        device.alone,
    ):
        parts, plan = _assemble(config, device, groups, resources)
        if parts.state.step < plan.steps:
            for remote in on_own_ranks(parts.teacher).values():
                remote.start(steps_done=parts.state.step, last_step=plan.steps)
        return train(parts, plan, termination, StartClock(device.joined))


def _assemble(
    config: RunConfig, device: Device, groups: Groups, resources: ExitStack
) -> tuple[LoopInputs, LoopPlan]:
    """Check, build the models, then read the data; a failure restores the run folder.

    The ranks of teachers elsewhere meet these three times; see `run_teacher`.
    """
    with device.meet("tokenizer"):
        found = _checked_folder(config, resources)
        warn_of_memory(config, device, ranks=groups.world.size())
        if device.bridge is not None:
            publish_data(config.data, device.bridge)
        tasks = open_run_tasks(config, device.torch_device) if config.evaluation.tasks else NO_TASKS
        site = Site(groups, _execution(config, device, resources), device, resources)
        opened = open_run(config, site, tasks)
    with device.meet("student"):
        parts, plan = _build(config, opened, found)
        if device.bridge is not None:
            publish_start(device.bridge, parts.state.step, plan.steps, parts.loader.state_dict())
    with device.meet("teacher"):
        pass  # its ranks open their data
    return parts, plan


def _build(config: RunConfig, opened: OpenRun, found: FolderAsFound) -> tuple[LoopInputs, LoopPlan]:
    """Build the student, then open the data and the log."""
    samples, site = opened.samples, opened.site
    device, resources = site.execution.device, site.resources
    with together():
        if samples.tokenizer is not None:
            keep_assets(config.output, export_source(config.student), samples.tokenizer)
    if config.train.epochs is not None:
        config = _with_computed_steps(config, config.train.epochs, opened)
    if samples.stored is not None and config.data.sources:
        require_samples(samples.stored, config.train)
    state = _build_state(config, opened)
    resources.callback(state.checkpoints.close)
    balancing = build_balancing(config.objective, opened.objective)
    newest = _checkpoint_to_resume(config.output, config.checkpoint, state)
    held_out = open_held_out(config.train, config.objective, opened)
    evaluation = open_evaluation(config, opened, state) if config.evaluation.tasks else None
    loader = _open_training(config.train, config.runtime, opened)
    if newest is not None:
        state.restore(newest, loader)
        state.balance = balancing.resumed(state.balance)
        _LOGGER.info("resumed from %s at step %d", newest, state.step)
    note_start(config, resumed=newest)
    logged = from_first_rank(lambda: logged_validation(config.output, state.step))
    if state.step < config.train.steps:
        _LOGGER.info("%s", opened_run_banner(config, opened, state))
    metrics = resources.enter_context(_open_metrics(config, resume_step=state.step))
    found.has_started()
    profiling = config.profile.model_dump() | {"timers": state.student.timers, "device": device}
    profiler = StepProfiler(Path(config.output), bridge=site.device.bridge, **profiling)
    intervals = config.logging.model_dump(include={"timers_interval", "straggler_interval"})
    parts = LoopInputs(
        state=state,
        teacher=opened.teacher.signals,
        objective=opened.objective_of(samples.names(held_out=False)),
        balancing=balancing,
        loader=loader,
        held_out=held_out,
        metrics=metrics,
        throughput=opened.throughput(config.train),
        reports=PhaseReports.of(site.groups, device, site.device.bridge, **intervals),
        profiler=resources.enter_context(profiler),
        memory=PeakMemory(device),
        evaluation=evaluation,
        logged_validation=logged,
    )
    return parts, loop_plan(config)


def _execution(config: RunConfig, device: Device, resources: ExitStack) -> Execution:
    train, length = config.train, config.data.sequence_length
    overlap = tensor_overlap(
        config.runtime, samples=train.micro_batch_size, length=length, resources=resources
    )
    recompute = Recompute.of(train.recompute, train.recompute_modules, train.recompute_layers)
    fp8 = Fp8(train.fp8, "train.fp8") if train.fp8 else None
    precision = PRECISIONS[train.precision]
    return Execution(precision, device.torch_device, recompute, fp8, tensor_overlap=overlap)


def _checked_folder(config: RunConfig, resources: ExitStack) -> FolderAsFound:
    """Run the checks that need no data, then create and lock the run folder."""
    found = FolderAsFound.of_run(config.output)
    from_first_rank(lambda: check_start(config))
    resources.enter_context(run_folder(config.output))
    resources.enter_context(found.put_back_on_failure())
    return found


def _with_computed_steps(config: RunConfig, epochs: float, opened: OpenRun) -> RunConfig:
    """Replace `train.epochs` by the number of steps.

    Raises DataError or ConfigError on all ranks: the samples cannot be counted, or the schedule
    does not fit the steps.

    Collective: world, one broadcast of a short object.
    """
    device = opened.site.execution.device
    counts = [on_first_rank(opened.samples.count_epoch, device=device)]
    dist.broadcast_object_list(counts, src=0)
    count = counts[0]
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


def _build_state(config: RunConfig, opened: OpenRun) -> RunState:
    """Build the student, its optimizer and its schedule, at step 0."""
    features, length = opened.objective.features, config.data.sequence_length
    groups, execution = opened.site.groups, opened.site.execution
    adam, rates = config.optimizer, config.schedule
    chunks = opened.student.build(execution, groups=groups, seed=config.seed)
    if features is not None:
        features.attach(chunks)
    wrapped = wrap_data_parallel(chunks, adam, groups=groups)
    positions = config.train.global_batch_size * length
    timers = PhaseTimers(execution.device, progress=opened.site.device.alone.progress)
    connect_schedule(wrapped, adam, positions=positions, timers=timers)
    optimizer = build_optimizer(wrapped, adam, rates, dtype=execution.dtype)
    return RunState(
        student=Student(chunks, wrapped, groups, length, timers),
        optimizer=optimizer,
        schedule=build_schedule(optimizer, adam, rates, steps=config.train.steps),
        architecture=opened.student.architecture,
        tokenizer_hash=opened.vocabulary.identity,
        features=features,
        configuration=config.model_dump(mode="json"),
        checkpoints=CheckpointFolder.of_run(
            config.output, config.checkpoint.keep, asynchronous=config.checkpoint.asynchronous
        ),
    )


def _checkpoint_to_resume(output: str, section: CheckpointConfig, state: RunState) -> Path | None:
    """Return the newest complete checkpoint of an earlier start, checked against this model.

    Raises ConfigError or CheckpointError on all ranks.
    """
    if section.save:
        state.checkpoints.prepare()

    def newest() -> Path | None:
        found = newest_checkpoint(output, section)
        if found is not None:
            state.require_same(resumed_description(found), found)
        return found

    return from_first_rank(newest)


def _open_training(train: TrainConfig, runtime: RuntimeConfig, opened: OpenRun) -> StepSource:
    """Open the training stream; a thread takes each step while the one before runs.

    The thread exchanges batches in a group of its own.
    """
    samples, site = opened.samples, opened.site
    device, last_step = site.execution.device, train.steps
    exchange = exchange_group(timeout_seconds=runtime.timeout_seconds)
    loader = samples.loader(train, site.groups, device, held_out=False, exchange=exchange)
    prefetched = PrefetchedSteps(loader, last_step=last_step, device=device, group=exchange)
    steps = site.resources.enter_context(prefetched)
    return steps if samples.stored is None else samples.stored.ahead_of(steps, last_step=last_step)


def _open_metrics(config: RunConfig, *, resume_step: int) -> MetricsLog:
    logging = config.logging
    progress = partial(
        TrainingProgress.on_screen,
        total_steps=config.train.steps,
        start_step=resume_step,
        interval=logging.interval,
        ce_weight=config.objective.ce_weight,
    )
    return open_metrics(
        Path(config.output),
        resume_step=resume_step,
        tensorboard=logging.tensorboard,
        wandb=None if logging.wandb is None else logging.wandb.model_dump(),
        settings=config.model_dump(),
        screen=progress if logging.progress else None,
    )


def loop_plan(config: RunConfig) -> LoopPlan:
    """Return the schedule of a run's loop."""
    return LoopPlan(
        steps=config.train.steps,
        validation_interval=config.validation.interval,
        checkpoint_interval=config.checkpoint.interval,
        save=config.checkpoint.save,
        clip_grad_norm=config.optimizer.clip_grad_norm,
        max_bad_steps=config.train.max_bad_steps,
        best=best_rule(config.checkpoint.keep_best) if config.checkpoint.keep_best else None,
    )

"""Assembly of a training run from its configuration, and its execution."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_distill.config import (
    CheckpointConfig,
    LoggingConfig,
    ProfileConfig,
    RunConfig,
    TrainConfig,
    run_rows,
    source_in_words,
    stored_row,
    with_steps,
)
from megatron_distill.data.prefetch import Lookahead, PrefetchedSteps, StepSource, exchange_group
from megatron_distill.errors import counted
from megatron_distill.log import get_logger
from megatron_distill.models.architecture import Architecture, Execution, Fp8, Recompute
from megatron_distill.runtime.collectives import from_first_rank, on_first_rank, together
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.launch import PRECISIONS, Device
from megatron_distill.runtime.termination import TerminationRequest
from megatron_distill.train.assemble.data import RunSamples, open_samples
from megatron_distill.train.assemble.distillation import (
    OpenRun,
    build_balancing,
    open_held_out,
    open_run,
)
from megatron_distill.train.assemble.models import export_source, job_groups
from megatron_distill.train.assemble.start import check_start, newest_checkpoint, note_start
from megatron_distill.train.assemble.stored import require_samples
from megatron_distill.train.banner import banner_text, memory_rows, model_row, steps_row
from megatron_distill.train.checkpoint.folder import CheckpointFolder, Description
from megatron_distill.train.loop import LoopPlan, Parts, permanent_imports, train
from megatron_distill.train.metrics import MetricsLog, open_sinks
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
from megatron_distill.train.run_folder import FolderAsFound, keep_assets, run_folder
from megatron_distill.train.run_state import RunState
from megatron_distill.train.step import Student
from megatron_distill.train.throughput import (
    MemoryOfRank,
    RankParameters,
    Throughput,
    chunk_logits,
)

_LOGGER = get_logger(__name__)


def run_training(config: RunConfig, device: Device, termination: TerminationRequest) -> bool:
    """Assemble and run one training in the current world; return whether it reached its last step.

    Raises a MegatronDistillError on all ranks together. Process groups are gone afterwards, so that
    another run may follow in the same processes.
    """
    with (
        permanent_imports(),
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


def _assemble(
    config: RunConfig, device: Device, groups: Groups, resources: ExitStack
) -> tuple[Parts, LoopPlan]:
    """Check, build the models, then read the data; a failure restores the run folder."""
    found = _checked_folder(config, resources)
    opened = open_run(config, _execution(config.train, device), groups, resources)
    samples, online = opened.samples, opened.online
    with together():
        if samples.tokenizer is not None:
            keep_assets(config.output, export_source(config.student), samples.tokenizer)
    if config.train.epochs is not None:
        config = _with_computed_steps(config, samples, device.torch_device)
    if samples.stored is not None and config.data.sources:
        require_samples(samples.stored, config.train)
    state = _build_state(config, opened, groups)
    resources.callback(state.checkpoints.close)
    balancing = build_balancing(config.objective, opened.objective)
    newest = _checkpoint_to_resume(config.output, config.checkpoint, state)
    held_out = open_held_out(config.train, config.objective, opened, groups)
    exchange = exchange_group(timeout_seconds=config.runtime.timeout_seconds)
    loader = _open_training(config.train, samples, groups, device.torch_device, exchange, resources)
    if newest is not None:
        state.restore(newest, loader)
        state.balance = balancing.resumed(state.balance)
        _LOGGER.info("resumed from %s at step %d", newest, state.step)
    note_start(config, resumed=newest)
    if state.step < config.train.steps:
        _LOGGER.info("%s", _banner(config, opened, state))
    metrics = _open_metrics(config, resume_step=state.step)
    resources.callback(metrics.close)
    found.has_started()
    parts = Parts(
        state=state,
        teacher=opened.teacher,
        objective=opened.objective_of(samples.names(held_out=False)),
        balancing=balancing,
        loader=loader,
        held_out=held_out,
        metrics=metrics,
        throughput=Throughput.of_run(
            state.architecture,
            online.architecture if online else None,
            sequence_length=config.data.sequence_length,
            global_batch_size=config.train.global_batch_size,
            precision=config.train.precision,
            num_devices=groups.world.size(),
            device=device.torch_device,
        ),
        reports=_phase_reports(config.logging, groups, device),
        profiler=_open_profiler(config.output, config.profile, state.student, device, resources),
        device=device.torch_device,
    )
    return parts, loop_plan(config)


def _execution(train: TrainConfig, device: Device) -> Execution:
    recompute = Recompute.of(train.recompute, train.recompute_modules, train.recompute_layers)
    fp8 = Fp8(train.fp8, "train.fp8") if train.fp8 else None
    return Execution(PRECISIONS[train.precision], device.torch_device, recompute, fp8)


def _checked_folder(config: RunConfig, resources: ExitStack) -> FolderAsFound:
    """Run the checks that need no data, then create and lock the run folder."""
    found = FolderAsFound.of_run(config.output)
    with together():
        if dist.get_rank() == 0:
            check_start(config)
    resources.enter_context(run_folder(config.output))
    resources.enter_context(found.put_back_on_failure())
    return found


def _with_computed_steps(config: RunConfig, samples: RunSamples, device: torch.device) -> RunConfig:
    """Replace `train.epochs` by the number of steps.

    Raises DataError or ConfigError on all ranks: the samples cannot be counted, or the schedule
    does not fit the steps.

    Collective: world, one broadcast of a short object.
    """
    epochs = config.train.epochs
    assert epochs is not None, "the caller has looked"
    counts = [on_first_rank(samples.count_epoch, device=device)]
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


def _build_state(config: RunConfig, opened: OpenRun, groups: Groups) -> RunState:
    """Build the student, its optimizer and its schedule, at step 0."""
    features, length = opened.objective.features, config.data.sequence_length
    chunks = opened.student.build(opened.execution, groups=groups, seed=config.seed)
    if features is not None:
        features.attach(chunks)
    wrapped = wrap_data_parallel(chunks, config.optimizer, groups=groups)
    positions = config.train.global_batch_size * length
    timers = PhaseTimers(opened.execution.device)
    connect_schedule(wrapped, config.optimizer, positions=positions, timers=timers)
    optimizer = build_optimizer(
        wrapped, config.optimizer, config.schedule, dtype=opened.execution.dtype
    )
    return RunState(
        student=Student(chunks, wrapped, groups, length, timers),
        optimizer=optimizer,
        schedule=build_schedule(
            optimizer, config.optimizer, config.schedule, steps=config.train.steps
        ),
        architecture=opened.student.architecture,
        tokenizer_hash=opened.vocabulary.identity,
        features=features,
        configuration=config.model_dump(mode="json"),
        checkpoints=CheckpointFolder(
            Path(config.output) / "checkpoints",
            keep=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
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
            state.require_same(Description.read(found), found)
        return found

    return from_first_rank(newest)


def _open_training(
    train: TrainConfig,
    samples: RunSamples,
    groups: Groups,
    device: torch.device,
    exchange: dist.ProcessGroup | None,
    resources: ExitStack,
) -> StepSource:
    """Open the training stream; a thread takes each step while the one before runs.

    The thread exchanges batches in the group `exchange`. Where the teacher is a store, steps are
    taken two steps early.
    """
    loader = open_samples(
        samples, train, held_out=False, groups=groups, device=device, exchange=exchange
    )
    source = resources.enter_context(
        PrefetchedSteps(loader, last_step=train.steps, device=device, group=exchange)
    )
    stored = samples.stored
    if stored is None:
        return source
    return Lookahead(
        source, last_step=train.steps, expect=stored.teacher.expect, stores=stored.identities
    )


def _banner(config: RunConfig, opened: OpenRun, state: RunState) -> str:
    online, stored = opened.online, opened.samples.stored
    return run_banner(
        config,
        {"student": state.architecture} | ({"teacher": online.architecture} if online else {}),
        _memory(config, opened, state),
        stored_samples=stored.samples if stored else 0,
        feature_pairs=len(state.features.pairs) if state.features else 0,
        world_size=state.student.groups.world.size(),
        start_step=state.step,
    )


def run_banner(
    config: RunConfig,
    shapes: Mapping[str, Architecture],
    memory: MemoryOfRank,
    *,
    stored_samples: int,
    feature_pairs: int,
    world_size: int,
    start_step: int,
) -> str:
    """Return the lines that describe a run at its start, at most 14.

    shapes: of the models by role; a teacher without one is stored.
    """
    rows = [
        model_row(role, shapes[role], source_in_words(model, shapes[role].num_layers))
        if role in shapes
        else stored_row(model, stored_samples)
        for role, model in config.models.items()
    ]
    rows += run_rows(config, world_size=world_size, feature_pairs=feature_pairs)
    rows.append(
        steps_row(
            config.train.steps,
            start_step=start_step,
            samples=config.train.global_batch_size,
            sequence_length=config.data.sequence_length,
            micro_batch_size=config.train.micro_batch_size,
        )
    )
    rows += memory_rows(memory, pipeline=config.parallel.pipeline)
    job = "training" if config.teacher is None else "distillation"
    return banner_text(f"{job} into {config.output}", rows)


def _memory(config: RunConfig, opened: OpenRun, state: RunState) -> MemoryOfRank:
    """Return the memory of this rank by formula."""
    groups = state.student.groups
    tokens = config.train.micro_batch_size * config.data.sequence_length
    return MemoryOfRank.of_run(
        RankParameters.of(state.student.chunks, opened.online.model if opened.online else None),
        dtype=opened.execution.dtype,
        logits=chunk_logits(
            config.objective.chunk_tokens,
            tokens // config.parallel.context,
            state.architecture,
            tensor=config.parallel.tensor,
            device=opened.execution.device,
        ),
        layout=groups.layout,
        world_size=groups.world.size(),
        is_distributed=config.optimizer.distributed,
    )


def _open_metrics(config: RunConfig, *, resume_step: int) -> MetricsLog:
    """Open the log on rank 0 and an empty one elsewhere; raises ConfigError on all ranks."""
    logging = config.logging
    with together():
        if dist.get_rank() != 0:
            return MetricsLog()
        sinks = open_sinks(
            Path(config.output),
            resume_step=resume_step,
            tensorboard=logging.tensorboard,
            wandb=None if logging.wandb is None else logging.wandb.model_dump(),
            settings=config.model_dump(),
        )
        if logging.progress:
            progress = TrainingProgress.on_screen(
                total_steps=config.train.steps,
                start_step=resume_step,
                interval=logging.interval,
                ce_weight=config.objective.ce_weight,
            )
            sinks.append(progress)
        return MetricsLog(sinks)


def _phase_reports(logging: LoggingConfig, groups: Groups, device: Device) -> PhaseReports:
    return PhaseReports(
        timers_interval=logging.timers_interval,
        straggler_interval=logging.straggler_interval,
        stage=groups.pipeline.rank(),
        device=device.torch_device,
    )


def _open_profiler(
    output: str,
    section: ProfileConfig,
    student: Student,
    device: Device,
    resources: ExitStack,
) -> StepProfiler:
    """Return the profiler of `profile.steps`; it is closed with the resources."""
    profiler = StepProfiler(
        Path(output) / "profile",
        **section.model_dump(),
        timers=student.timers,
        device=device.torch_device,
    )
    resources.callback(profiler.close)
    return profiler


def loop_plan(config: RunConfig) -> LoopPlan:
    """Return the schedule of a run's loop."""
    return LoopPlan(
        steps=config.train.steps,
        validation_interval=config.validation.interval,
        checkpoint_interval=config.checkpoint.interval,
        save=config.checkpoint.save,
        clip_grad_norm=config.optimizer.clip_grad_norm,
        max_bad_steps=config.train.max_bad_steps,
    )

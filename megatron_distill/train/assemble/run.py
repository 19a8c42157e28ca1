"""Assembly of a training run from its configuration, and its execution."""

from __future__ import annotations

import gc
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_distill import log
from megatron_distill.config import RunConfig, TrainConfig
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.log import get_logger
from megatron_distill.models.architecture import Architecture, Execution, Recompute
from megatron_distill.runtime.collectives import together
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.launch import Device
from megatron_distill.runtime.termination import TerminationRequest
from megatron_distill.train.assemble.assets import keep_assets
from megatron_distill.train.assemble.banner import RankParameters, run_banner
from megatron_distill.train.assemble.checks import check_start, newest_checkpoint
from megatron_distill.train.assemble.data import open_training_loader, with_computed_steps
from megatron_distill.train.assemble.distillation import (
    Distillation,
    assemble_distillation,
    assemble_held_out,
    build_balancing,
)
from megatron_distill.train.assemble.failed_start import FolderAsFound
from megatron_distill.train.assemble.models import (
    Origin,
    build_student,
    execution_on,
    find_origin,
    job_groups,
)
from megatron_distill.train.assemble.start import note_start, plain_settings
from megatron_distill.train.assemble.stored import Stored, require_samples
from megatron_distill.train.assemble.tokenizer import Vocabulary, open_tokenizer
from megatron_distill.train.checkpoint.folder import CheckpointFolder, Description
from megatron_distill.train.features import FeatureLosses
from megatron_distill.train.loop import LoopPlan, Parts, train
from megatron_distill.train.metrics import (
    JsonLinesSink,
    MetricsLog,
    MetricsSink,
    TensorBoardSink,
    WandbSink,
)
from megatron_distill.train.optimizer import (
    build_optimizer,
    build_schedule,
    connect_schedule,
    wrap_data_parallel,
)
from megatron_distill.train.progress import TrainingProgress
from megatron_distill.train.run_folder import run_folder
from megatron_distill.train.run_state import RunState
from megatron_distill.train.step import Student
from megatron_distill.train.teachers.lookahead import Lookahead, StepSource
from megatron_distill.train.throughput import Throughput, step_flops_per_token

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
        with job_groups(config, trains=True) as groups, ExitStack() as resources, device.alone:
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
    tokenizer, vocabulary = open_tokenizer(config)
    origin = find_origin(config.student, "student", config, vocabulary)
    architecture = origin.architecture
    execution = _execution(config.train, device)
    distillation = assemble_distillation(
        config,
        vocabulary,
        architecture,
        execution=execution,
        groups=groups,
        device=device.torch_device,
        resources=resources,
    )
    with together():
        if tokenizer is not None:
            keep_assets(config, tokenizer)
    config = with_computed_steps(config, tokenizer, distillation.stored, device=device.torch_device)
    require_samples(config, distillation.stored)
    state = _build_state(
        config, origin, execution, groups, vocabulary, distillation.objective.features
    )
    resources.callback(state.checkpoints.close)
    balancing = build_balancing(config.objective, distillation.objective)
    newest = _checkpoint_to_resume(config, state)
    held_out = assemble_held_out(
        config, tokenizer, distillation, groups=groups, device=device.torch_device
    )
    source = _open_source(config, tokenizer, distillation.stored, groups, device, resources)
    if newest is not None:
        state.restore(newest, source)
        state.balance = balancing.resumed(state.balance)
        _LOGGER.info("resumed from %s at step %d", newest, state.step)
    note_start(config, resumed=newest)
    if state.step < config.train.steps:
        _LOGGER.info("%s", _banner(config, state, distillation, groups, device))
    metrics = _open_metrics(config, resume_step=state.step)
    resources.callback(metrics.close)
    found.has_started()
    online = distillation.online
    parts = Parts(
        state=state,
        teacher=distillation.teacher,
        objective=distillation.objective,
        balancing=balancing,
        loader=source,
        held_out=held_out,
        metrics=metrics,
        throughput=_throughput(
            config, architecture, online.architecture if online else None, groups, device
        ),
        device=device.torch_device,
    )
    return parts, _plan(config)


def _execution(train: TrainConfig, device: Device) -> Execution:
    recompute = Recompute.of(train.recompute, train.recompute_modules, train.recompute_layers)
    return execution_on(device, precision=train.precision, recompute=recompute)


def _banner(
    config: RunConfig,
    state: RunState,
    distillation: Distillation,
    groups: Groups,
    device: Device,
) -> str:
    online, features = distillation.online, distillation.features
    return run_banner(
        config,
        student=state.architecture,
        teacher=online.architecture if online else None,
        stored_samples=distillation.stored.samples if distillation.stored else None,
        feature_pairs=len(features.losses.pairs) if features else 0,
        mine=RankParameters.of(state.student.chunks, online.model if online else None),
        world_size=groups.world.size(),
        start_step=state.step,
        device=device.torch_device,
    )


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


def _open_source(
    config: RunConfig,
    tokenizer: Tokenizer | None,
    stored: Stored | None,
    groups: Groups,
    device: Device,
    resources: ExitStack,
) -> StepSource:
    """Open the training stream; it reads ahead where the teacher is a store."""
    loader = open_training_loader(
        config, tokenizer, stored, groups=groups, device=device.torch_device
    )
    resources.callback(loader.close)
    if stored is None:
        return loader
    return Lookahead(
        loader,
        last_step=config.train.steps,
        expect=stored.teacher.expect,
        stores=stored.identities,
    )


def _build_state(
    config: RunConfig,
    origin: Origin,
    execution: Execution,
    groups: Groups,
    vocabulary: Vocabulary,
    features: FeatureLosses | None,
) -> RunState:
    """Build the student, its optimizer and its schedule, at step 0."""
    chunks = build_student(config, origin, groups=groups, execution=execution)
    if features is not None:
        features.attach(chunks)
    wrapped = wrap_data_parallel(chunks, config.optimizer, groups=groups)
    positions = config.train.global_batch_size * config.data.sequence_length
    connect_schedule(wrapped, config.optimizer, positions=positions)
    optimizer = build_optimizer(wrapped, config.optimizer, config.schedule, dtype=execution.dtype)
    return RunState(
        student=Student(chunks, wrapped, groups, config.data.sequence_length),
        optimizer=optimizer,
        schedule=build_schedule(
            optimizer, config.optimizer, config.schedule, steps=config.train.steps
        ),
        architecture=origin.architecture,
        tokenizer_hash=vocabulary.identity,
        features=features,
        configuration=plain_settings(config),
        checkpoints=CheckpointFolder(
            Path(config.output) / "checkpoints",
            keep=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
        ),
    )


def _checkpoint_to_resume(config: RunConfig, state: RunState) -> Path | None:
    """Return the newest complete checkpoint of an earlier start, checked against this model.

    Raises ConfigError or CheckpointError on all ranks.
    """
    if config.checkpoint.save:
        state.checkpoints.prepare()
    said: list[Path | None] = [None]
    with together():
        if dist.get_rank() == 0:
            said = [newest_checkpoint(config)]
            if said[0] is not None:
                state.require_same(Description.read(said[0]), said[0])
    dist.broadcast_object_list(said, src=0)
    return said[0]


def _plan(config: RunConfig) -> LoopPlan:
    return LoopPlan(
        steps=config.train.steps,
        validation_interval=config.validation.interval,
        checkpoint_interval=config.checkpoint.interval,
        save=config.checkpoint.save,
        clip_grad_norm=config.optimizer.clip_grad_norm,
        max_bad_steps=config.train.max_bad_steps,
    )


def _open_metrics(config: RunConfig, *, resume_step: int) -> MetricsLog:
    """Open the log on rank 0 and an empty one elsewhere; raises ConfigError on all ranks."""
    sinks: list[MetricsSink] = []
    with together():
        if dist.get_rank() == 0:
            output = Path(config.output)
            sinks.append(JsonLinesSink(output / "metrics.jsonl", resume_step=resume_step))
            if config.logging.tensorboard:
                sinks.append(TensorBoardSink(output / "tensorboard", resume_step=resume_step))
            if config.logging.wandb is not None:
                wandb = config.logging.wandb
                sinks.append(
                    WandbSink(
                        output,
                        project=wandb.project,
                        name=wandb.name,
                        mode=wandb.mode,
                        settings=config.model_dump(),
                        resume_step=resume_step,
                    )
                )
            if config.logging.progress:
                progress = TrainingProgress(
                    sys.stderr,
                    total_steps=config.train.steps,
                    start_step=resume_step,
                    interval=config.logging.interval,
                    ce_weight=config.objective.ce_weight,
                )
                sinks.append(progress)
                # Log lines go above the bar, not through it.
                log.configure(dist.get_rank(), stream=progress.stream)
    return MetricsLog(sinks)


def _throughput(
    config: RunConfig,
    student: Architecture,
    teacher: Architecture | None,
    groups: Groups,
    device: Device,
) -> Throughput:
    flops = step_flops_per_token(student, teacher, sequence_length=config.data.sequence_length)
    on_cuda = device.kind == "cuda"
    return Throughput(
        tokens_per_step=config.train.global_batch_size * config.data.sequence_length,
        flops_per_token=flops.total,
        num_devices=groups.world.size(),
        device_name=torch.cuda.get_device_name(device.torch_device) if on_cuda else "cpu",
        precision=config.train.precision,
    )

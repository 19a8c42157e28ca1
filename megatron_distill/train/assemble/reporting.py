"""The banner, the metrics log and the throughput of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_distill import log
from megatron_distill.config import (
    RunConfig,
    TrainConfig,
)
from megatron_distill.runtime.collectives import together
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.launch import Device
from megatron_distill.train.assemble.banner import run_banner
from megatron_distill.train.assemble.open_run import OpenRun
from megatron_distill.train.metrics import (
    JsonLinesSink,
    MetricsLog,
    MetricsSink,
    TensorBoardSink,
    WandbSink,
)
from megatron_distill.train.progress import TrainingProgress
from megatron_distill.train.run_state import RunState
from megatron_distill.train.throughput import (
    MemoryOfRank,
    RankParameters,
    Throughput,
    chunk_logits,
    step_flops_per_token,
)


def banner_of_run(config: RunConfig, opened: OpenRun, state: RunState) -> str:
    """Return the lines that describe a run at its start."""
    online, features = opened.distillation.online, opened.distillation.features
    groups, execution = state.student.groups, opened.execution
    tokens = config.train.micro_batch_size * config.data.sequence_length
    memory = MemoryOfRank.of_run(
        RankParameters.of(state.student.chunks, online.model if online else None),
        dtype=execution.dtype,
        logits=chunk_logits(
            config.objective.chunk_tokens,
            tokens // config.parallel.context,
            state.architecture,
            tensor=config.parallel.tensor,
            device=execution.device,
        ),
        layout=groups.layout,
        world_size=groups.world.size(),
        is_distributed=config.optimizer.distributed,
    )
    return run_banner(
        output=config.output,
        student=(config.student, state.architecture),
        teacher=(config.teacher, online.architecture if online else None)
        if config.teacher
        else None,
        objective=config.objective,
        data=config.data,
        train=config.train,
        parallel=config.parallel,
        memory=memory,
        stored_samples=opened.samples.stored.samples if opened.samples.stored else 0,
        source_names=opened.samples.names(held_out=False),
        held_out=opened.samples.held_out,
        feature_pairs=len(features.losses.pairs) if features else 0,
        world_size=groups.world.size(),
        start_step=state.step,
    )


def open_metrics(config: RunConfig, *, resume_step: int) -> MetricsLog:
    """Open the log on rank 0 and an empty one elsewhere; raises ConfigError on all ranks.

    Weights & Biases records the whole configuration.
    """
    output, logging = Path(config.output), config.logging
    sinks: list[MetricsSink] = []
    with together():
        if dist.get_rank() == 0:
            sinks.append(JsonLinesSink(output / "metrics.jsonl", resume_step=resume_step))
            if logging.tensorboard:
                sinks.append(TensorBoardSink(output / "tensorboard", resume_step=resume_step))
            if logging.wandb is not None:
                sinks.append(
                    WandbSink(
                        output,
                        **logging.wandb.model_dump(),
                        settings=config.model_dump(),
                        resume_step=resume_step,
                    )
                )
            if logging.progress:
                progress = TrainingProgress(
                    sys.stderr,
                    total_steps=config.train.steps,
                    start_step=resume_step,
                    interval=logging.interval,
                    ce_weight=config.objective.ce_weight,
                )
                sinks.append(progress)
                # Log lines go above the bar, not through it.
                log.configure(dist.get_rank(), stream=progress.stream)
    return MetricsLog(sinks)


def throughput_of_run(
    opened: OpenRun, train: TrainConfig, groups: Groups, device: Device
) -> Throughput:
    """Return what turns a step's seconds into figures."""
    online, length = opened.distillation.online, opened.samples.data.sequence_length
    teacher = online.architecture if online else None
    flops = step_flops_per_token(opened.origin.architecture, teacher, sequence_length=length)
    on_cuda = device.kind == "cuda"
    return Throughput(
        tokens_per_step=train.global_batch_size * length,
        flops_per_token=flops.total,
        num_devices=groups.world.size(),
        device_name=torch.cuda.get_device_name(device.torch_device) if on_cuda else "cpu",
        precision=train.precision,
    )

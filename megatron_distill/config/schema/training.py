"""The sections `optimizer`, `schedule`, `train` and `validation`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_distill.config.schema.section import Section

__all__ = [
    "CheckpointConfig",
    "LoggingConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RuntimeConfig",
    "ScheduleConfig",
    "TrainConfig",
    "ValidationConfig",
    "WandbConfig",
]


class OptimizerConfig(Section):
    """Adam and its gradient exchange."""

    name: Literal["adamw", "adam"] = Field(
        default="adamw", description="`adam` adds the weight decay to the gradient instead."
    )
    learning_rate: float = Field(default=3e-4, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(
        default=0.1,
        ge=0,
        description="Weight decay of matrices; Megatron's own default is 0.01.",
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(
        default=0.95,
        ge=0,
        lt=1,
        description="Decay of the second moment; Megatron's own default is 0.999.",
    )
    epsilon: float = Field(default=1e-8, gt=0, description="Epsilon of the denominator.")
    clip_grad_norm: float = Field(
        default=1.0, ge=0, description="Largest global gradient norm; 0 turns clipping off."
    )
    distributed: bool = Field(
        default=True, description="Shard the optimizer state over the data-parallel ranks."
    )
    overlap_grad_reduce: bool = Field(
        default=True, description="Reduce gradients while the backward pass still runs."
    )
    overlap_param_gather: bool = Field(
        default=False,
        description="Gather updated parameters during the next forward pass, which on a CPU waits "
        "for them; needs `distributed` and `overlap_grad_reduce`.",
    )


class ScheduleConfig(Section):
    """The learning rate over the updates: that of a step follows from the updates before it.

    docs/learning_rate.md has the formulas. A step that was skipped is no update.
    """

    decay: Literal["cosine", "linear", "constant", "wsd"] = Field(
        default="cosine",
        description="Shape after the warm-up; `wsd` stays at the peak, then decays at the end.",
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Updates of linear growth from `initial_learning_rate` to the peak, which the "
        "next one has.",
    )
    initial_learning_rate: float = Field(
        default=0.0,
        ge=0,
        description="Learning rate of the first update of a warm-up; 0, as in Megatron: that one "
        "fills the moments alone.",
    )
    min_learning_rate: float = Field(
        default=0.0,
        ge=0,
        description="Learning rate at the end of the decay, one update after the last.",
    )
    decay_steps: int | None = Field(
        default=None,
        ge=1,
        description="Updates after which the decay ends, warm-up included; null: `train.steps`.",
    )
    wsd_decay_steps: int | None = Field(
        default=None, ge=1, description="Updates of the final decay; required by `wsd` alone."
    )
    wsd_decay_form: Literal["linear", "cosine", "exponential", "minus_sqrt"] = Field(
        default="linear",
        description="Of `wsd`: the form of the final decay, from 1 at d = 0 to 0 at d = 1: 1 - d, "
        "half a period of a cosine, 2 * 0.5^d - 1 (Megatron's own default), or 1 - sqrt(d).",
    )


class TrainConfig(Section):
    """Length and arithmetic of the run."""

    steps: int = Field(
        default=0, ge=0, description="Optimizer steps; required unless `epochs` is set."
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        description="Passes over the training samples, in place of `steps`, which is computed from "
        "it at the start. For one source: `megatron`, conversations, documents of up to 64 MiB, or "
        "a store.",
    )
    global_batch_size: int = Field(
        ge=1, examples=[256], description="Sequences in one step, over all ranks."
    )
    micro_batch_size: int = Field(
        default=1, ge=1, description="Sequences in one forward pass of one rank."
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="Of weights and activations; statistics are fp32 always."
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="Activations computed again in the backward pass: none, those of the "
        "attention core, or whole layers.",
    )
    max_bad_steps: int = Field(
        default=0,
        ge=0,
        description="Steps with a non-finite loss or gradient that are skipped before the run "
        "stops.",
    )


class ValidationConfig(Section):
    """Held-out losses during the run."""

    interval: int = Field(
        default=0, ge=0, description="Steps between validations; 0: only at the end."
    )
    samples: int = Field(
        default=0, ge=0, description="Held-out sequences used each time; 0: no validation."
    )


class CheckpointConfig(Section):
    """When the run is saved, and whether it continues from what is there."""

    interval: int = Field(default=0, ge=0, description="Steps between saves; 0: only at the end.")
    keep: int = Field(default=2, ge=1, description="Newest checkpoints that are kept.")
    asynchronous: bool = Field(
        default=False, description="Write in the background while training goes on."
    )
    save: bool = Field(default=True, description="Write checkpoints at all.")
    resume: bool = Field(
        default=True, description="Continue from the newest complete checkpoint in `output`."
    )


class WandbConfig(Section):
    """Weights & Biases."""

    project: str = Field(min_length=1, examples=["distill"], description="Project.")
    name: str | None = Field(
        default=None, min_length=1, description="Name of the run; null: wandb chooses."
    )
    mode: Literal["offline", "online"] = Field(
        default="offline", description="`offline` writes below `output` and needs no network."
    )


class LoggingConfig(Section):
    """Where the figures of a run go, besides `output/metrics.jsonl`."""

    interval: int = Field(
        default=1, ge=1, description="Steps between lines of the progress display."
    )
    progress: bool = Field(default=True, description="Progress bar on rank 0.")
    tensorboard: bool = Field(
        default=False, description="Event files in `output/tensorboard` (extra: tensorboard)."
    )
    wandb: WandbConfig | None = Field(
        default=None, description="Log to wandb (extra: wandb); null: do not."
    )


class ParallelConfig(Section):
    """The layout of student and teacher; ranks left over are data-parallel."""

    tensor: int = Field(default=1, ge=1, description="Ranks that share each layer's matrices.")
    pipeline: int = Field(default=1, ge=1, description="Ranks that share the layers.")
    virtual_pipeline: int | None = Field(
        default=None,
        ge=2,
        description="Chunks of student layers per pipeline rank (interleaved schedule); null: one.",
    )
    context: int = Field(default=1, ge=1, description="Ranks that share each sequence.")
    expert: int = Field(
        default=1, ge=1, description="Ranks of the data-parallel group that share the experts."
    )
    sequence: bool = Field(
        default=False,
        description="Sequence parallelism: norms and dropouts split over the tensor ranks.",
    )


class RuntimeConfig(Section):
    """Devices and process groups."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="`auto` is `cuda` where there is a GPU."
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto", description="`auto` is `nccl` on `cuda` and `gloo` on `cpu`."
    )
    timeout_seconds: int = Field(
        default=600, ge=1, description="Seconds after which a waiting collective is an error."
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="Threads of one process for torch operators; null: cores over processes.",
    )

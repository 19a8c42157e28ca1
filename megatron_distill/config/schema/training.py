"""The sections of training, its outputs, its layout and its processes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from megatron_distill.config.schema.evaluation import KeepBestConfig
from megatron_distill.config.schema.section import Section

__all__ = [
    "CheckpointConfig",
    "LoggingConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ProfileConfig",
    "RuntimeConfig",
    "ScheduleConfig",
    "StageLayersConfig",
    "TrainConfig",
    "ValidationConfig",
    "WandbConfig",
]

RecomputedModule = Literal["attention", "mlp", "layernorm"]


class OptimizerConfig(Section):
    """Adam and its gradient exchange."""

    name: Literal["adamw", "adam"] = Field(
        default="adamw",
        description="`adamw`: decoupled weight decay; `adam`: weight decay added to the gradient.",
    )
    learning_rate: float = Field(default=3e-4, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(
        default=0.1,
        ge=0,
        description="Weight decay of matrices; Megatron's default is 0.01.",
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(
        default=0.95,
        ge=0,
        lt=1,
        description="Decay of the second moment; Megatron's default is 0.999.",
    )
    epsilon: float = Field(default=1e-8, gt=0, description="Epsilon of the denominator.")
    clip_grad_norm: float = Field(
        default=1.0, ge=0, description="Maximum global gradient norm; 0: no clipping."
    )
    distributed: bool = Field(
        default=True, description="Shard the optimizer state over the data-parallel ranks."
    )
    overlap_grad_reduce: bool = Field(
        default=True, description="Overlap gradient reduction with the backward pass."
    )
    overlap_param_gather: bool = Field(
        default=False,
        description="Overlap the gather of updated parameters with the next forward pass. Needs "
        "`distributed` and `overlap_grad_reduce`.",
    )
    bucket_size: int | None = Field(
        default=None,
        ge=1,
        description="Parameters per gradient bucket on the first pipeline stage; null: Megatron's "
        "default, the larger of 40 million and 1 million per data-parallel rank. Needs "
        "`overlap_grad_reduce`.",
    )


class ScheduleConfig(Section):
    """The learning rate as a function of the completed updates.

    docs/learning_rate.md has the formulas. Skipped steps are not counted.
    """

    decay: Literal["cosine", "linear", "constant", "wsd"] = Field(
        default="cosine",
        description="Shape after the warm-up; `wsd`: constant at the peak, then a final decay.",
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Updates of linear growth from `initial_learning_rate` to the peak; the "
        "update after them has the peak rate.",
    )
    initial_learning_rate: float = Field(
        default=0.0,
        ge=0,
        description="Learning rate of the first update of the warm-up. 0, as in Megatron: that "
        "update only fills the moments.",
    )
    min_learning_rate: float = Field(
        default=0.0,
        ge=0,
        description="Learning rate at the end of the decay, one update after the last.",
    )
    decay_steps: int | None = Field(
        default=None,
        ge=1,
        description="Update at which the decay ends, including the warm-up; null: `train.steps`.",
    )
    wsd_decay_steps: int | None = Field(
        default=None, ge=1, description="`wsd`: updates of the final decay; required."
    )
    wsd_decay_form: Literal["linear", "cosine", "exponential", "minus_sqrt"] = Field(
        default="linear",
        description="`wsd`: factor of the final decay at its share d. 1 - d, half a cosine period, "
        "2 * 0.5^d - 1 (`exponential`, Megatron's default), or 1 - sqrt(d).",
    )


class TrainConfig(Section):
    """Length, batch and precision of the run. Give either `steps` or `epochs`."""

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
        ge=1, examples=[256], description="Sequences per step, over all ranks."
    )
    micro_batch_size: int = Field(
        default=1, ge=1, description="Sequences in one forward pass of one rank."
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="Precision of weights and activations; statistics are always fp32.",
    )
    fp8: Literal["e4m3", "hybrid"] | None = Field(
        default=None,
        description="Number format of the matrix products of the student's layers, by Transformer "
        "Engine on a GPU. `hybrid` is e4m3, and e5m2 for gradients, with one scale per tensor. The "
        "weights stay bf16. null: that of `precision`.",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="Activations of the student to recompute in the backward pass: `none`, "
        "`selective` (`recompute_modules` of every layer), or `full` (whole layers).",
    )
    recompute_modules: tuple[RecomputedModule, ...] = Field(
        default=("attention",),
        strict=False,
        description="With `recompute: selective`: `attention` (scores), `mlp` (feed-forward or "
        "experts), `layernorm` (outputs of norms).",
    )
    recompute_layers: int | None = Field(
        default=None,
        ge=1,
        description="With `recompute: full`: number of layers of each pipeline stage (each virtual "
        "stage), from its first; null: all.",
    )
    max_bad_steps: int = Field(
        default=0,
        ge=0,
        description="Steps with a non-finite loss or gradient to skip before the run stops.",
    )


class ValidationConfig(Section):
    """Losses on held-out samples."""

    interval: int = Field(
        default=0, ge=0, description="Steps between validations; 0: only at the end."
    )
    samples: int = Field(
        default=0,
        ge=0,
        description="Held-out sequences, the same at every validation; 0: no validation.",
    )


class CheckpointConfig(Section):
    """Saving and resuming."""

    interval: int = Field(
        default=0, ge=0, description="Steps between checkpoints; 0: only at the end."
    )
    keep: int = Field(default=2, ge=1, description="Number of newest checkpoints to keep.")
    keep_best: KeepBestConfig | None = Field(
        default=None,
        description="Save where a metric is the best so far, and keep that checkpoint too; null: "
        "off. `checkpoints/best.json` names it.",
    )
    asynchronous: bool = Field(default=False, description="Write checkpoints in the background.")
    save: bool = Field(default=True, description="Write checkpoints.")
    resume: bool = Field(
        default=True, description="Resume from the newest complete checkpoint in `output`."
    )


class WandbConfig(Section):
    """Weights & Biases."""

    project: str = Field(min_length=1, examples=["distill"], description="Name of the project.")
    name: str | None = Field(
        default=None, min_length=1, description="Name of the run; null: generated by wandb."
    )
    mode: Literal["offline", "online"] = Field(
        default="offline", description="`offline` writes within `output` and needs no network."
    )


class LoggingConfig(Section):
    """Outputs of the metrics, besides `output/metrics.jsonl`."""

    interval: int = Field(
        default=1, ge=1, description="Steps between lines of the progress display."
    )
    progress: bool = Field(default=True, description="Show a progress bar on rank 0.")
    tensorboard: bool = Field(
        default=False, description="Write event files to `output/tensorboard` (extra: tensorboard)."
    )
    wandb: WandbConfig | None = Field(
        default=None, description="Log to wandb (extra: wandb); null: off."
    )
    timers_interval: int = Field(
        default=0,
        ge=0,
        description="Steps between log lines with the mean time of each phase, smallest and "
        "largest over the ranks; 0: none. `metrics.jsonl` has rank 0's phases of every step. A "
        "teacher on ranks of its own has lines of its own.",
    )
    straggler_interval: int = Field(
        default=100,
        ge=0,
        description="Steps between log lines with the slowest rank of each phase, compared with "
        "the ranks of its pipeline stage; 0: none. A run of one rank has none. A teacher on ranks "
        "of its own has lines of its own.",
    )


class ProfileConfig(Section):
    """Traces of chosen steps, in `output/profile`."""

    steps: tuple[int, ...] = Field(
        default=(),
        strict=False,
        examples=[[10, 11, 12]],
        description="Steps to profile, counted from 1; consecutive ones share a file. Each step "
        "before these warms the profiler up. Empty: none.",
    )
    ranks: tuple[int, ...] = Field(
        default=(0,),
        strict=False,
        min_length=1,
        description="Ranks of the launch that write a trace: a Chrome trace (`json.gz`) for "
        "Perfetto. A teacher on ranks of its own has the last ones, see `--print-layout`.",
    )
    memory_snapshot: bool = Field(
        default=False,
        description="Write snapshots of the CUDA allocator too, for pytorch.org/memory_viz.",
    )
    shapes: bool = Field(default=False, description="Record the shapes of operands.")
    stacks: bool = Field(default=False, description="Record Python's stacks.")


class StageLayersConfig(Section):
    """Layers of each pipeline stage, first to last; null: chosen by the work of the stages."""

    student: tuple[int, ...] | None = Field(
        default=None,
        min_length=1,
        strict=False,
        examples=[[9, 9, 9, 5]],
        description="Layers of each stage of the student. With virtual stages one number per "
        "chunk, in the order of the forward pass: chunk 0 of every rank, then chunk 1. null: the "
        "last stage, which also has the output heads of student and live teacher, holds fewer "
        "layers where that shortens the most expensive stage.",
    )
    teacher: tuple[int, ...] | None = Field(
        default=None,
        min_length=1,
        strict=False,
        examples=[[20, 20, 20, 20]],
        description="Layers of each stage of a live teacher, which has no virtual stages; null: "
        "evenly, the remainder on the first stages.",
    )


class ParallelConfig(Section):
    """The layout of student and teacher; the remaining factor is data-parallel."""

    tensor: int = Field(
        default=1,
        ge=1,
        description="Tensor-parallel size: ranks that share the matrices of each layer.",
    )
    pipeline: int = Field(
        default=1, ge=1, description="Pipeline-parallel size: ranks that share the layers."
    )
    virtual_pipeline: int | None = Field(
        default=None,
        ge=2,
        description="Chunks of student layers per pipeline rank (interleaved schedule); null: 1.",
    )
    context: int = Field(
        default=1, ge=1, description="Context-parallel size: ranks that share each sequence."
    )
    expert: int = Field(
        default=1,
        ge=1,
        description="Expert-parallel size: data-parallel ranks that share the experts.",
    )
    layers_per_stage: StageLayersConfig = Field(
        default=StageLayersConfig(), description="Layers of each pipeline stage."
    )
    sequence: bool = Field(
        default=False,
        description="Sequence parallelism: split norms and dropouts over the tensor ranks.",
    )

    @property
    def splits_layers(self) -> bool:
        """Whether ranks exchange activations inside each layer, tensor or context parallel."""
        return self.tensor > 1 or self.context > 1


class RuntimeConfig(Section):
    """Devices and process groups."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="`auto`: `cuda` if there is a GPU, else `cpu`."
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto", description="`auto`: `nccl` on `cuda`, `gloo` on `cpu`."
    )
    timeout_seconds: int = Field(
        default=600,
        ge=1,
        description="Timeout of collectives in seconds, and of ranks that stop answering. One that "
        "hangs in a step ends the run sooner: docs/running.md.",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="Torch threads per process; null: cores divided by processes.",
    )
    transformer_engine: Literal["auto", "off", "on"] = Field(
        default="auto",
        description="Transformer Engine's layers and Adam on `cuda`, or torch's. `auto`: if "
        "Megatron-Core can import it; `on`: an error if it cannot.",
    )
    tp_comm_overlap: bool = Field(
        default=False,
        description="Overlap tensor-parallel messages with products, in Transformer Engine's user "
        "buffers. Needs sequence parallelism and bf16; not yet run on a GPU.",
    )

    def of_world(self) -> dict[str, Any]:
        """Return the settings with which a process joins the world; models read the remaining."""
        return self.model_dump(exclude={"tp_comm_overlap"})

    @field_validator("transformer_engine", mode="before")
    @classmethod
    def _switches_are_words(cls, value: object) -> object:
        """Take `on` and `off`, which are true and false in YAML."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

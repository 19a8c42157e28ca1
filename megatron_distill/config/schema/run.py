"""The configuration files of training and capture as a whole."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from megatron_distill.config.schema.data import DataConfig
from megatron_distill.config.schema.evaluation import EvaluationConfig, GenerationConfig
from megatron_distill.config.schema.model import ModelConfig
from megatron_distill.config.schema.objective import ObjectiveConfig
from megatron_distill.config.schema.section import Section
from megatron_distill.config.schema.training import (
    CheckpointConfig,
    LoggingConfig,
    OptimizerConfig,
    ParallelConfig,
    ProfileConfig,
    RuntimeConfig,
    ScheduleConfig,
    TrainConfig,
    ValidationConfig,
)

__all__ = ["CaptureConfig", "CapturePassConfig", "JobConfig", "RunConfig", "StoreConfig"]

# No point, which separates keys.
TeacherName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class JobConfig(Section):
    """The sections that training and capture have in common."""

    seed: int = Field(
        default=1234, ge=0, lt=2**31, description="Seed of initial weights, data order and dropout."
    )
    teacher: ModelConfig | None = Field(
        default=None,
        description="The frozen teacher, which a capture needs; null: train on the labels only.",
    )
    parallel: ParallelConfig = Field(default=ParallelConfig(), description="Layout over the ranks.")
    data: DataConfig = Field(
        examples=[
            {
                "sources": [{"format": "python_stdlib"}],
                "tokenizer": {"path": "tokenizers/llama3"},
                "sequence_length": 4096,
            }
        ],
        description="Training and validation data.",
    )
    runtime: RuntimeConfig = Field(
        default=RuntimeConfig(), description="Devices and process groups."
    )

    @property
    @abstractmethod
    def folder(self) -> str:
        """The output folder of the job."""

    @property
    def models(self) -> dict[str, ModelConfig]:
        """The models by role; the roles are the keys of the file."""
        return {} if self.teacher is None else {"teacher": self.teacher}


class RunConfig(JobConfig):
    """The configuration of one training run."""

    output: str = Field(
        default="runs/default", min_length=1, description="Run folder; created if missing."
    )
    student: ModelConfig = Field(
        examples=[{"checkpoint": "runs/pretrained"}], description="The model to train."
    )
    objective: ObjectiveConfig = Field(default=ObjectiveConfig(), description="The training loss.")
    teachers: dict[TeacherName, ModelConfig] | None = Field(
        default=None,
        min_length=1,
        description="Several teachers by name, instead of `teacher`; the terms, the sources and "
        "`objective.routing_weights` refer to these names. docs/teachers/several_teachers.md",
    )
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="Adam.")
    schedule: ScheduleConfig = Field(
        default=ScheduleConfig(), description="Learning-rate schedule."
    )
    train: TrainConfig = Field(
        examples=[{"steps": 1000, "global_batch_size": 256}],
        description="Length, batch and precision of the run.",
    )
    validation: ValidationConfig = Field(
        default=ValidationConfig(), description="Losses on held-out samples during the run."
    )
    evaluation: EvaluationConfig = Field(
        default=EvaluationConfig(), description="Tasks evaluated during the run."
    )
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="Saving and resuming."
    )
    logging: LoggingConfig = Field(default=LoggingConfig(), description="Outputs of the metrics.")
    profile: ProfileConfig = Field(
        default=ProfileConfig(), description="Traces and memory snapshots of chosen steps."
    )
    generation: GenerationConfig = Field(
        default=GenerationConfig(), description="Writing and scoring text."
    )

    @property
    def folder(self) -> str:
        """The run folder."""
        return self.output

    @property
    def models(self) -> dict[str, ModelConfig]:
        """The models by role; the roles are the keys of the file."""
        several = {f"teachers.{name}": model for name, model in (self.teachers or {}).items()}
        return {"student": self.student, **super().models, **several}

    @property
    def has_teacher(self) -> bool:
        """Whether there is a teacher, or several."""
        return self.teacher is not None or bool(self.teachers)

    @model_validator(mode="before")
    @classmethod
    def _no_terms_without_a_teacher(cls, tree: Any) -> Any:
        """Resolve the default of `objective.terms`, which depends on the presence of a teacher."""
        if not isinstance(tree, Mapping) or tree.get("teacher") or tree.get("teachers"):
            return tree
        objective = tree.get("objective", {})
        if isinstance(objective, ObjectiveConfig) and "terms" not in objective.model_fields_set:
            return {**tree, "objective": objective.model_copy(update={"terms": ()})}
        if isinstance(objective, Mapping) and "terms" not in objective:
            return {**tree, "objective": {**objective, "terms": ()}}
        return tree


class StoreConfig(Section):
    """The teacher store to write."""

    path: str = Field(min_length=1, examples=["stores/teacher"], description="Folder of the store.")
    samples: int = Field(
        ge=1,
        examples=[256_000],
        description="Sequences to store, from the start of the training stream. A run of N steps "
        "reads N times `train.global_batch_size`.",
    )
    mode: Literal["top_k", "sampled"] = Field(
        default="top_k",
        description="`top_k`: the most probable token ids; `sampled`: ids drawn with replacement,"
        " which estimate `forward_kl` without bias and serve no other divergence.",
    )
    k: int = Field(
        default=64, ge=1, description="Ids stored per token: the top k, or the number of draws."
    )
    codec: Literal["f32", "f16", "u8"] = Field(
        default="u8", description="Encoding of log-probabilities: fp32, fp16 or 8 bits."
    )
    top_p: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Nucleus cut: store the fewest ids whose probability reaches this, at most "
        "`k`; null: all `k`.",
    )
    temperatures: tuple[float, ...] = Field(
        default=(),
        strict=False,
        description="Temperatures other than 1 that distillation terms may use, ascending.",
    )
    samples_per_shard: int | None = Field(
        default=None,
        ge=1,
        description="Sequences per shard file; null: about 256 MB per file and at least 16 files."
        " A killed capture loses the shards in progress.",
    )
    job: int = Field(
        default=0, ge=0, description="Index of this job, from 0; it writes its part of the shards."
    )
    jobs: int = Field(
        default=1,
        ge=1,
        description="Number of jobs that write the store in parallel, each started separately. "
        "The last one to end completes the store.",
    )


class CapturePassConfig(Section):
    """Forward passes of the teacher."""

    micro_batch_size: int = Field(
        default=1, ge=1, description="Sequences in one forward pass of one rank."
    )
    micro_batches: int = Field(
        default=4,
        ge=1,
        description="Micro-batches per step; pipeline stages work on them in parallel.",
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="Precision of weights and activations; statistics are always fp32.",
    )
    chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens whose logits are in memory at once; null: those of 2^25 logits on a "
        "CPU, 2^28 on a GPU.",
    )
    aligned: bool = Field(
        default=False,
        description="The store is for a run whose terms have an `alignment`. `data.tokenizer` is "
        "the student's. The teacher has its own (`teacher.tokenizer`, or that of its folder) and "
        "reads `teacher.sequence_length` tokens. Documents of text do not need it: a store in the "
        "teacher's tokens serves every student that reads them.",
    )


class CaptureConfig(JobConfig):
    """The configuration of one capture."""

    store: StoreConfig = Field(
        examples=[{"path": "stores/teacher", "samples": 1024}],
        description="The store to write.",
    )
    capture: CapturePassConfig = Field(
        default=CapturePassConfig(), description="Settings of the teacher's forward passes."
    )

    @property
    def folder(self) -> str:
        """The store's folder."""
        return self.store.path

"""The configuration files of training and capture as a whole."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from megatron_distill.config.schema.data import DataConfig
from megatron_distill.config.schema.model import ModelConfig
from megatron_distill.config.schema.objective import ObjectiveConfig
from megatron_distill.config.schema.section import Section
from megatron_distill.config.schema.training import (
    CheckpointConfig,
    LoggingConfig,
    OptimizerConfig,
    ParallelConfig,
    RuntimeConfig,
    ScheduleConfig,
    TrainConfig,
    ValidationConfig,
)

__all__ = ["JobConfig", "RunConfig"]


class JobConfig(Section):
    """The sections that training and capture have in common."""

    seed: int = Field(
        default=1234, ge=0, lt=2**31, description="Seed of initial weights, data order and dropout."
    )
    teacher: ModelConfig | None = Field(
        default=None,
        description="The frozen teacher; null: train on the labels only.",
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
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="Saving and resuming."
    )
    logging: LoggingConfig = Field(default=LoggingConfig(), description="Outputs of the metrics.")

    @property
    def folder(self) -> str:
        """The run folder."""
        return self.output

    @property
    def models(self) -> dict[str, ModelConfig]:
        """The models by role; the roles are the keys of the file."""
        return {"student": self.student, **super().models}

    @model_validator(mode="before")
    @classmethod
    def _no_terms_without_a_teacher(cls, tree: Any) -> Any:
        """Resolve the default of `objective.terms`, which depends on the presence of a teacher."""
        if not isinstance(tree, Mapping) or tree.get("teacher") is not None:
            return tree
        objective = tree.get("objective", {})
        if isinstance(objective, ObjectiveConfig) and "terms" not in objective.model_fields_set:
            return {**tree, "objective": objective.model_copy(update={"terms": ()})}
        if isinstance(objective, Mapping) and "terms" not in objective:
            return {**tree, "objective": {**objective, "terms": ()}}
        return tree

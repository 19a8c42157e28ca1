"""The configuration of a run: schema, loading, rules."""

from megatron_distill.config.check import check_architecture, check_layout
from megatron_distill.config.load import load_config, to_yaml
from megatron_distill.config.schema import (
    ArchitectureConfig,
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    MoeConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    RuntimeConfig,
    ScheduleConfig,
    SourceConfig,
    TermConfig,
    TokenizerConfig,
    TrainConfig,
    ValidationConfig,
    WandbConfig,
)

__all__ = [
    "ArchitectureConfig",
    "CheckpointConfig",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "MoeConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "RuntimeConfig",
    "ScheduleConfig",
    "SourceConfig",
    "TermConfig",
    "TokenizerConfig",
    "TrainConfig",
    "ValidationConfig",
    "WandbConfig",
    "check_architecture",
    "check_layout",
    "load_config",
    "to_yaml",
]

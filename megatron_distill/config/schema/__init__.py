"""The configuration file as types: one class per section, every key described and bounded."""

from megatron_distill.config.schema.base import Section
from megatron_distill.config.schema.capture import CaptureConfig, CapturePassConfig, StoreConfig
from megatron_distill.config.schema.data import (
    ConversationConfig,
    DataConfig,
    SourceConfig,
    TokenizerConfig,
)
from megatron_distill.config.schema.features import FeatureConfig, ProjectorConfig
from megatron_distill.config.schema.machine import ParallelConfig, RuntimeConfig
from megatron_distill.config.schema.model import (
    ArchitectureConfig,
    ModelConfig,
    MoeConfig,
    RopeScalingConfig,
    StoreSourceConfig,
)
from megatron_distill.config.schema.objective import (
    PARAMETERS,
    BalanceConfig,
    ObjectiveConfig,
    TermConfig,
    ValueScheduleConfig,
)
from megatron_distill.config.schema.record import CheckpointConfig, LoggingConfig, WandbConfig
from megatron_distill.config.schema.run import JobConfig, RunConfig
from megatron_distill.config.schema.training import (
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    ValidationConfig,
)

__all__ = [
    "PARAMETERS",
    "ArchitectureConfig",
    "BalanceConfig",
    "CaptureConfig",
    "CapturePassConfig",
    "CheckpointConfig",
    "ConversationConfig",
    "DataConfig",
    "FeatureConfig",
    "JobConfig",
    "LoggingConfig",
    "ModelConfig",
    "MoeConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ProjectorConfig",
    "RopeScalingConfig",
    "RunConfig",
    "RuntimeConfig",
    "ScheduleConfig",
    "Section",
    "SourceConfig",
    "StoreConfig",
    "StoreSourceConfig",
    "TermConfig",
    "TokenizerConfig",
    "TrainConfig",
    "ValidationConfig",
    "ValueScheduleConfig",
    "WandbConfig",
]

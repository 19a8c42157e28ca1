"""The configuration file as types: one class per section, every key described and bounded."""

from megatron_distill.config.schema.data import (
    ConversationConfig,
    DataConfig,
    SourceConfig,
    TokenizerConfig,
)
from megatron_distill.config.schema.evaluation import (
    EvaluationConfig,
    GenerationConfig,
    KeepBestConfig,
    TaskConfig,
)
from megatron_distill.config.schema.model import (
    ArchitectureConfig,
    ModelConfig,
    MoeConfig,
    RopeScalingConfig,
    StoreSourceConfig,
    TeacherParallelConfig,
    TransferConfig,
)
from megatron_distill.config.schema.objective import (
    PARAMETERS,
    BalanceConfig,
    FeatureConfig,
    ObjectiveConfig,
    ProjectorConfig,
    TermConfig,
    ValueScheduleConfig,
)
from megatron_distill.config.schema.run import (
    CaptureConfig,
    CapturePassConfig,
    JobConfig,
    RunConfig,
    StoreConfig,
)
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
    WandbConfig,
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
    "EvaluationConfig",
    "FeatureConfig",
    "GenerationConfig",
    "JobConfig",
    "KeepBestConfig",
    "LoggingConfig",
    "ModelConfig",
    "MoeConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ProfileConfig",
    "ProjectorConfig",
    "RopeScalingConfig",
    "RunConfig",
    "RuntimeConfig",
    "ScheduleConfig",
    "Section",
    "SourceConfig",
    "StoreConfig",
    "StoreSourceConfig",
    "TaskConfig",
    "TeacherParallelConfig",
    "TermConfig",
    "TokenizerConfig",
    "TrainConfig",
    "TransferConfig",
    "ValidationConfig",
    "ValueScheduleConfig",
    "WandbConfig",
]

"""The sections `checkpoint` and `logging`: what a run leaves behind."""

from typing import Literal

from pydantic import Field

from megatron_distill.config.schema.base import Section

__all__ = ["CheckpointConfig", "LoggingConfig", "WandbConfig"]


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

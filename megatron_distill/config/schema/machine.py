"""The sections `parallel` and `runtime`: how a run lies on the machine."""

from typing import Literal

from pydantic import Field

from megatron_distill.config.schema.base import Section

__all__ = ["ParallelConfig", "RuntimeConfig"]


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

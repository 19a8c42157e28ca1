"""The file of a capture: which teacher says what about which samples, and where it is kept."""

from typing import Literal

from pydantic import Field

from megatron_distill.config.schema.run import JobConfig
from megatron_distill.config.schema.section import Section

__all__ = ["CaptureConfig", "CapturePassConfig", "StoreConfig"]


class StoreConfig(Section):
    """The teacher store that is written."""

    path: str = Field(min_length=1, examples=["stores/teacher"], description="Its folder.")
    samples: int = Field(
        ge=1,
        examples=[256_000],
        description="Sequences to keep, from the first of the training stream on; a run of N steps "
        "reads N times `train.global_batch_size`.",
    )
    mode: Literal["top_k", "sampled"] = Field(
        default="top_k",
        description="The most probable ids, or ids drawn at random with replacement (unbiased for "
        "`forward_kl`, and for no other divergence).",
    )
    k: int = Field(default=64, ge=1, description="Ids kept per token, or how often is drawn.")
    codec: Literal["f32", "f16", "u8"] = Field(
        default="u8", description="Of log-probabilities: every bit, half precision, or 8 bits."
    )
    top_p: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Cut a token's ids where their mass reaches this; null: keep all k.",
    )
    temperatures: tuple[float, ...] = Field(
        default=(),
        strict=False,
        description="Temperatures other than 1 that terms may ask for, ascending.",
    )
    samples_per_shard: int | None = Field(
        default=None,
        ge=1,
        description="Sequences in one file; null: some 256 MB, and 16 files at least. What is lost "
        "where a capture is killed.",
    )
    job: int = Field(
        default=0, ge=0, description="Which part of the shards this job writes, from 0."
    )
    jobs: int = Field(
        default=1,
        ge=1,
        description="Jobs that write the store side by side, each started by itself; the last one "
        "to end finishes the store.",
    )


class CapturePassConfig(Section):
    """How the teacher is run."""

    micro_batch_size: int = Field(
        default=1, ge=1, description="Sequences in one forward pass of one rank."
    )
    micro_batches: int = Field(
        default=4,
        ge=1,
        description="Micro-batches of one step, which the pipeline's stages work on side by side.",
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="Of weights and activations; statistics are fp32 always."
    )
    chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens whose logits exist at one time; null: 2^25 logits on a CPU, 2^28 on a "
        "GPU, however large the vocabulary.",
    )


class CaptureConfig(JobConfig):
    """One capture: everything that decides what a store holds, in one file."""

    store: StoreConfig = Field(
        examples=[{"path": "stores/teacher", "samples": 1024}],
        description="The store that is written.",
    )
    capture: CapturePassConfig = Field(
        default=CapturePassConfig(), description="How the teacher is run."
    )

    @property
    def folder(self) -> str:
        """The store's folder."""
        return self.store.path

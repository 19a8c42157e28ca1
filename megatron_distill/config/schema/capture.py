"""The file of a capture: teacher, data and the store to write."""

from typing import Literal

from pydantic import Field

from megatron_distill.config.schema.run import JobConfig
from megatron_distill.config.schema.section import Section

__all__ = ["CaptureConfig", "CapturePassConfig", "StoreConfig"]


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
        description="Tokens whose logits are in memory at once; null: as many as give 2^25 logits"
        " on a CPU, 2^28 on a GPU.",
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

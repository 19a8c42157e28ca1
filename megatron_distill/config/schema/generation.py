"""Text that a model writes: memory of its cache."""

from pydantic import Field

from megatron_distill.config.schema.section import Section

__all__ = ["GenerationConfig"]


class GenerationConfig(Section):
    """Writing and scoring text."""

    cache_gib: float = Field(
        default=4.0,
        gt=0,
        description="GiB of keys and values on each rank; it bounds the rows written at once. "
        "docs/generation.md",
    )

"""The section `objective`."""

from typing import Literal

from pydantic import Field

from megatron_distill.config.schema.base import Section

__all__ = ["Divergence", "ObjectiveConfig", "TermConfig"]

Divergence = Literal["forward_kl"]


class TermConfig(Section):
    """One divergence between teacher and student."""

    divergence: Divergence = Field(
        default="forward_kl", description="`forward_kl` is KL(teacher || student)."
    )
    weight: float = Field(default=1.0, gt=0, description="Factor of this term in the loss.")
    temperature: float = Field(
        default=1.0, gt=0, description="T: both distributions are softmax(logits / T)."
    )
    scale_by_temperature_squared: bool = Field(
        default=False, description="Multiply the term, loss and gradient alike, by T^2."
    )


class ObjectiveConfig(Section):
    """What the student is trained on."""

    ce_weight: float = Field(
        default=1.0, ge=0, description="Factor of the cross-entropy on the labels."
    )
    terms: tuple[TermConfig, ...] = Field(
        default=(TermConfig(),),
        strict=False,
        description="The distillation terms; left out: one `forward_kl` of weight 1 with a "
        "teacher, none without.",
    )
    chunk_tokens: int = Field(
        default=1024,
        ge=1,
        description="Tokens whose logits exist at one time; bounds the memory of the loss.",
    )

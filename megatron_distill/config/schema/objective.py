"""The section `objective`."""

from typing import Literal

from pydantic import Field

from megatron_distill.config.schema.base import Section
from megatron_distill.config.schema.features import FeatureConfig, ProjectorConfig

__all__ = ["PARAMETERS", "Divergence", "ObjectiveConfig", "TermConfig"]

Divergence = Literal[
    "forward_kl",
    "reverse_kl",
    "js_divergence",
    "skewed_forward_kl",
    "skewed_reverse_kl",
    "adaptive_kl",
    "total_variation",
    "squared_hellinger",
]

# The keys that are parameters of a divergence, and of which.
PARAMETERS: dict[str, tuple[Divergence, ...]] = {
    "beta": ("js_divergence",),
    "skew_lambda": ("skewed_forward_kl", "skewed_reverse_kl"),
    "adaptive_alpha": ("adaptive_kl",),
}


class TermConfig(Section):
    """One divergence between teacher and student."""

    divergence: Divergence = Field(
        default="forward_kl",
        description="`forward_kl` is KL(teacher || student), `reverse_kl` the other way round; "
        "docs/losses.md has them all.",
    )
    weight: float = Field(default=1.0, gt=0, description="Factor of this term in the loss.")
    temperature: float = Field(
        default=1.0, gt=0, description="T: both distributions are softmax(logits / T)."
    )
    scale_by_temperature_squared: bool = Field(
        default=False, description="Multiply the term, loss and gradient alike, by T^2."
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        description="Compare only the teacher's so many most probable tokens; null: all of them.",
    )
    support: Literal["tail", "renormalized", "raw"] = Field(
        default="tail",
        description="With `top_k`: all other tokens are one more class (`tail`), both models are "
        "`renormalized` over the kept ones, or the sum is over these alone (`raw`).",
    )
    beta: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Of `js_divergence`: the teacher's share of the mixture; null: 0.5.",
    )
    skew_lambda: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Of `skewed_forward_kl` and `skewed_reverse_kl`: what the mixture has of the "
        "model that the average is over; null: 0.1.",
    )
    adaptive_alpha: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Of `adaptive_kl`: the most mass of the teacher's tail; null: 0.5.",
    )

    @property
    def parameters(self) -> dict[str, float]:
        """Those of the divergence that are given."""
        given = {name: getattr(self, name) for name in PARAMETERS}
        return {name: value for name, value in given.items() if value is not None}


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
    features: tuple[FeatureConfig, ...] = Field(
        default=(),
        strict=False,
        description="Losses between layers; they need a live teacher. docs/features.md.",
    )
    projector: ProjectorConfig = Field(
        default=ProjectorConfig(), description="What features of different sizes pass through."
    )
    chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens whose logits exist at one time; bounds the memory of the loss. null: "
        "2^25 logits of each model on a CPU, 2^28 on a GPU, however large the vocabulary.",
    )

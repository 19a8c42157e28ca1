"""The section `objective`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_distill.config.schema.section import Section

__all__ = [
    "BalanceConfig",
    "Divergence",
    "FeatureConfig",
    "ObjectiveConfig",
    "PARAMETERS",
    "ProjectorConfig",
    "TermConfig",
    "ValueScheduleConfig",
]


class FeatureConfig(Section):
    """Layers of the student that are to resemble layers of the teacher.

    Layers count from 1: the first layer's output is that of layer 1.
    """

    student: int | None = Field(
        default=None, ge=1, description="The student's layer; null: `match` pairs all."
    )
    teacher: int | None = Field(
        default=None, ge=1, description="The teacher's layer; null: `match` pairs all."
    )
    match: Literal["uniform", "last"] | None = Field(
        default=None,
        description="Pair every layer of the student: `uniform` by relative depth, `last` with the "
        "teacher's last layers; null: `student` and `teacher` say which.",
    )
    loss: Literal["mse", "cosine", "attention"] = Field(
        default="mse",
        description="Of the layers' outputs: `mse`, the squared difference, mean over the hidden "
        "size, or `cosine`, one minus the cosine. `attention`: KL between what their heads attend "
        "to on average.",
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        description="Factor in the loss; with `match` of the mean over all pairs.",
    )


class ProjectorConfig(Section):
    """Learned maps from the student's hidden size to the teacher's, where the two differ."""

    kind: Literal["linear", "mlp"] = Field(
        default="linear", description="One matrix, or two with GELU between them; with biases."
    )
    shared: bool = Field(
        default=False, description="One projector for all pairs, instead of one for each."
    )
    always: bool = Field(default=False, description="Project also where the sizes are equal.")
    hidden_size: int | None = Field(
        default=None, ge=1, description="Of `mlp`: its inner size; null: the teacher's hidden size."
    )
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        description="Peak learning rate, on the student's schedule; null: the student's.",
    )
    weight_decay: float | None = Field(
        default=None, ge=0, description="Weight decay of matrices; null: the student's."
    )


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


class ValueScheduleConfig(Section):
    """How a value changes during the run, from what its own key says."""

    to: float = Field(ge=0, description="The value at the end, and from there on.", examples=[1.0])
    kind: Literal["constant", "linear", "cosine"] = Field(
        default="linear",
        description="The way there: a straight line, half a period of a cosine, or `constant` "
        "before and after `start_step`.",
    )
    steps: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps that the way takes; of `linear` and `cosine`, which need it.",
    )
    start_step: int = Field(
        default=0, ge=0, description="Optimizer steps that are done when the change begins."
    )


class TermConfig(Section):
    """One divergence between teacher and student."""

    divergence: Divergence = Field(
        default="forward_kl",
        description="`forward_kl` is KL(teacher || student), `reverse_kl` the other way round; "
        "docs/losses.md has them all.",
    )
    weight: float = Field(default=1.0, ge=0, description="Factor of this term in the loss.")
    weight_schedule: ValueScheduleConfig | None = Field(
        default=None, description="How `weight` changes; null: it does not."
    )
    temperature: float = Field(
        default=1.0, gt=0, description="T: both distributions are softmax(logits / T)."
    )
    temperature_schedule: ValueScheduleConfig | None = Field(
        default=None, description="How `temperature` changes; null: it does not."
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
        ge=0,
        le=1,
        description="Of `js_divergence`: the teacher's share of the mixture (DistiLLM's lambda is "
        "one minus it); 0 is forward KL and 1 reverse KL, as in TRL and Liger; null: 0.5.",
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
        description="Of `adaptive_kl`: the most mass of the teacher's tail, one minus the paper's "
        "mu; the token that crosses the boundary belongs to the head; null: 0.5.",
    )

    @property
    def parameters(self) -> dict[str, float]:
        """Those of the divergence that are given."""
        given = {name: getattr(self, name) for name in PARAMETERS}
        return {name: value for name, value in given.items() if value is not None}


class BalanceConfig(Section):
    """How large the losses are kept against each other; docs/balancing.md has the formulas."""

    mode: Literal["fixed", "schedule", "magnitude", "gradient_norm"] = Field(
        default="fixed",
        description="`fixed`: all weights and temperatures stay; `schedule`: they change as their "
        "schedules say; `magnitude`: distillation is scaled to the value of the cross-entropy "
        "besides; `gradient_norm`: to the norm of its gradient.",
    )
    alpha: float = Field(
        default=1.0, ge=0, description="Factor of all distillation, after any scaling."
    )
    alpha_schedule: ValueScheduleConfig | None = Field(
        default=None, description="How `alpha` changes; null: it does not."
    )
    raw_losses: Literal["exact", "previous"] = Field(
        default="exact",
        description="Of `magnitude`: ratios are those of the step itself (`exact`, which takes "
        "another forward pass of the student) or of the step before (`previous`, for nothing).",
    )
    ema: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Decay of the running mean of the sizes that ratios are of; 0: no mean.",
    )
    clamp: float | None = Field(
        default=None,
        ge=1,
        description="c: ratios are kept in [1/c, c]; null: they are not. One that is at an end for "
        "20 steps is warned of.",
    )
    epsilon: float = Field(default=1e-8, gt=0, description="Least denominator of a ratio.")
    per_microbatch: bool = Field(
        default=False,
        description="Of `magnitude`: each micro-batch of each rank has ratios of its own, as "
        "published. They depend on the layout.",
    )


class ObjectiveConfig(Section):
    """What the student is trained on."""

    ce_weight: float = Field(
        default=1.0, ge=0, description="Factor of the cross-entropy on the labels."
    )
    ce_weight_schedule: ValueScheduleConfig | None = Field(
        default=None, description="How `ce_weight` changes; null: it does not."
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
    balance: BalanceConfig = Field(
        default=BalanceConfig(), description="Labels and teacher against each other."
    )
    chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens whose logits exist at one time; bounds the memory of the loss. null: "
        "2^25 logits of each model on a CPU, 2^28 on a GPU, however large the vocabulary.",
    )

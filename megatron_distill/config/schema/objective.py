"""The section `objective`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from megatron_distill.config.schema.section import Section

__all__ = [
    "PARAMETERS",
    "Alignment",
    "BalanceConfig",
    "DivergenceName",
    "FeatureConfig",
    "ObjectiveConfig",
    "ProjectorConfig",
    "TermConfig",
    "ValueScheduleConfig",
]


class FeatureConfig(Section):
    """A loss between a student layer and a teacher layer.

    Layers are counted from 1 over the whole model, also with pipeline stages: layer 1 is the first.
    `keep_layers` and `sliding_layers` count from 0.
    """

    student: int | None = Field(
        default=None,
        ge=1,
        description="Student layer, counted from 1 over the whole model, not per stage; null with"
        " `match`.",
    )
    teacher: int | None = Field(
        default=None,
        ge=1,
        description="Teacher layer, counted from 1 over the whole model, not per stage; null with"
        " `match`.",
    )
    match: Literal["uniform", "last"] | None = Field(
        default=None,
        description="Pair every student layer: `uniform` by relative depth, `last` with the last "
        "layers of the teacher; null: `student` and `teacher` give one pair.",
    )
    loss: Literal["mse", "cosine", "attention"] = Field(
        default="mse",
        description="`mse`: squared difference of layer outputs, mean over the hidden size; "
        "`cosine`: 1 - cosine of layer outputs; `attention`: KL of attention probabilities, "
        "averaged over heads.",
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        description="Weight of this loss; with `match`, of the mean over all pairs.",
    )


class ProjectorConfig(Section):
    """Learned projections from the student's hidden size to the teacher's."""

    kind: Literal["linear", "mlp"] = Field(
        default="linear",
        description="`linear`: one matrix; `mlp`: two with GELU between them. Both with biases.",
    )
    shared: bool = Field(
        default=False, description="One projector for all pairs, instead of one per pair."
    )
    always: bool = Field(default=False, description="Project even if both hidden sizes are equal.")
    hidden_size: int | None = Field(
        default=None, ge=1, description="`mlp`: inner size; null: the teacher's hidden size."
    )
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        description="Peak learning rate, with the student's schedule; null: "
        "`optimizer.learning_rate`.",
    )
    weight_decay: float | None = Field(
        default=None,
        ge=0,
        description="Weight decay of the matrices; null: `optimizer.weight_decay`.",
    )


Alignment = Literal["likelihood", "common", "projection", "gold", "uld"]

DivergenceName = Literal[
    "forward_kl",
    "reverse_kl",
    "js_divergence",
    "skewed_forward_kl",
    "skewed_reverse_kl",
    "adaptive_kl",
    "total_variation",
    "squared_hellinger",
]

# Parameters of divergences, each with its divergences.
PARAMETERS: dict[str, tuple[DivergenceName, ...]] = {
    "beta": ("js_divergence",),
    "skew_lambda": ("skewed_forward_kl", "skewed_reverse_kl"),
    "adaptive_alpha": ("adaptive_kl",),
}


class ValueScheduleConfig(Section):
    """Change of a value during the run, from that of its own key."""

    to: float = Field(ge=0, description="Final value.", examples=[1.0])
    kind: Literal["constant", "linear", "cosine"] = Field(
        default="linear",
        description="Shape of the change: `linear`, `cosine` (half a period), or `constant`: a "
        "jump at `start_step`.",
    )
    steps: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps of the change; required for `linear` and `cosine`.",
    )
    start_step: int = Field(
        default=0, ge=0, description="Completed optimizer steps at which the change begins."
    )


class TermConfig(Section):
    """One divergence between teacher and student."""

    divergence: DivergenceName = Field(
        default="forward_kl",
        description="`forward_kl` is KL(teacher || student), `reverse_kl` is KL(student || "
        "teacher); docs/losses.md has all formulas.",
    )
    weight: float = Field(default=1.0, ge=0, description="Weight of this term in the loss.")
    weight_schedule: ValueScheduleConfig | None = Field(
        default=None, description="Schedule of `weight`; null: constant."
    )
    temperature: float = Field(
        default=1.0, gt=0, description="T: both distributions are softmax(logits / T)."
    )
    temperature_schedule: ValueScheduleConfig | None = Field(
        default=None, description="Schedule of `temperature`; null: constant."
    )
    scale_by_temperature_squared: bool = Field(
        default=False, description="Multiply the term (loss and gradient) by T^2."
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        description="Compare the teacher's k most probable tokens; null: the whole vocabulary.",
    )
    support: Literal["tail", "renormalized", "raw"] = Field(
        default="tail",
        description="With `top_k`: `tail` treats all other tokens as one more class. "
        "`renormalized` normalises both models over the top k. `raw` sums over the top k only.",
    )
    beta: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="`js_divergence`: the teacher's share of the mixture; 0 is forward KL, 1 is "
        "reverse KL, as in TRL and Liger (DistiLLM's lambda is 1 - beta). null: 0.5.",
    )
    skew_lambda: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="`skewed_forward_kl`, `skewed_reverse_kl`: mixture coefficient lambda: m = "
        "lambda p + (1 - lambda) q (forward), lambda q + (1 - lambda) p (reverse), p the teacher."
        " null: 0.1.",
    )
    adaptive_alpha: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="`adaptive_kl`: largest probability of the teacher's tail, 1 - mu in the "
        "paper; the token that crosses the boundary belongs to the head. null: 0.5.",
    )

    alignment: Alignment | None = Field(
        default=None,
        description="A teacher with another tokenizer: the loss between both models on chunks, "
        "texts that end at a token boundary of both. `likelihood`: probability of the chunk's "
        "text. `common`: tokens of both vocabularies, at chunks of one token each. `projection`: "
        "chunk means on the teacher's tokens. `gold`: common tokens and sorted probabilities of "
        "the rest. `uld`: sorted probabilities of all tokens. null: one tokenizer. "
        "docs/cross_tokenizer.md compares them.",
    )
    partition: Literal["strict", "relaxed"] = Field(
        default="strict",
        description="`gold`: common tokens are those of equal bytes (`strict`), or also those "
        "whose first piece has a projection weight of 0.6 or more (`relaxed`).",
    )
    uncommon_top_k: int = Field(
        default=256,
        ge=1,
        description="`gold`, `uld`: number of sorted probabilities compared on each side.",
    )
    published: bool = Field(
        default=False,
        description="`projection`: the loss as published by X-Token, with geometric means and "
        "T^2; it can be negative.",
    )

    teacher: str | None = Field(
        default=None,
        min_length=1,
        examples=["math"],
        description="With `teachers`: the teacher of this term on every sample; null: `teachers`, "
        "or the teacher of each sample (docs/teachers/several_teachers.md).",
    )
    teachers: dict[str, float] | None = Field(
        default=None,
        min_length=1,
        examples=[{"math": 0.7, "code": 0.3}],
        description="With `teachers` at the top: several teachers of this term with their weights,"
        " divided by their sum; a list gives equal weights.",
    )
    mixture: Literal["arithmetic", "geometric", "lowest_loss"] = Field(
        default="arithmetic",
        description="With the term's `teachers`: weighted arithmetic or geometric mean of their "
        "probabilities at `temperature`. `lowest_loss`: for each sample the teacher with the "
        "lowest loss of this term.",
    )
    score: Literal["cross_entropy", "entropy", "top_probability"] | None = Field(
        default=None,
        description="With the term's `teachers` and a mean: weights of each sample, in proportion "
        "to the teacher's weight times e^(`score_alpha` x score). The score is minus the teacher's "
        "`cross_entropy` on the sample's labels, minus its `entropy`, or its mean "
        "`top_probability`. null: the same weights for all samples.",
    )
    score_alpha: float = Field(
        default=1.0,
        gt=0,
        description="With `score`: its factor. Large values leave the best teacher of each sample.",
    )

    @field_validator("teachers", mode="before")
    @classmethod
    def _a_list_has_equal_weights(cls, teachers: object) -> object:
        if isinstance(teachers, list | tuple):
            return {name: 1.0 / len(teachers) for name in teachers}
        return teachers

    @property
    def temperatures(self) -> tuple[float, float] | None:
        """The first and the last temperature of the schedule; None if it stays the same."""
        schedule = self.temperature_schedule
        if schedule is None or schedule.to == self.temperature:
            return None
        return self.temperature, schedule.to

    @property
    def parameters(self) -> dict[str, float]:
        """The parameters of the divergence that are set."""
        given = {name: getattr(self, name) for name in PARAMETERS}
        return {name: value for name, value in given.items() if value is not None}


class BalanceConfig(Section):
    """How loss weights are balanced; docs/balancing.md has the formulas."""

    mode: Literal["fixed", "schedule", "magnitude", "gradient_norm"] = Field(
        default="fixed",
        description="`fixed`: constant weights and temperatures. `schedule`: they follow their "
        "schedules. `magnitude`: also scale distillation to the value of the cross-entropy. "
        "`gradient_norm`: also to the norm of its gradient.",
    )
    alpha: float = Field(
        default=1.0, ge=0, description="Factor of all distillation losses, after any scaling."
    )
    alpha_schedule: ValueScheduleConfig | None = Field(
        default=None, description="Schedule of `alpha`; null: constant."
    )
    raw_losses: Literal["exact", "previous"] = Field(
        default="exact",
        description="`magnitude`: losses of the same step (`exact`, one more forward pass of the "
        "student) or of the step before (`previous`, no cost).",
    )
    ema: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="EMA decay of the measured losses; 0 disables smoothing.",
    )
    clamp: float | None = Field(
        default=None,
        ge=1,
        description="c: limit ratios to [1/c, c]; null: no limit. A ratio at its limit for 20 "
        "steps is logged.",
    )
    epsilon: float = Field(default=1e-8, gt=0, description="Smallest denominator of a ratio.")
    per_microbatch: bool = Field(
        default=False,
        description="`magnitude`: compute ratios per micro-batch and rank, as published; they "
        "then depend on the layout.",
    )


class ObjectiveConfig(Section):
    """The training loss."""

    ce_weight: float = Field(
        default=1.0, ge=0, description="Weight of the cross-entropy on the labels."
    )
    ce_weight_schedule: ValueScheduleConfig | None = Field(
        default=None, description="Schedule of `ce_weight`; null: constant."
    )
    terms: tuple[TermConfig, ...] = Field(
        default=(TermConfig(),),
        strict=False,
        description="Distillation terms; default with a teacher: one `forward_kl` of weight 1, "
        "without: none.",
    )
    routing_weights: dict[str, float] | None = Field(
        default=None,
        min_length=1,
        examples=[{"math": 3, "code": 1}],
        description="With `teachers`: shares of the samples of sources without `teacher` and "
        "`teacher_field`; each sample's teacher is drawn from `seed` and the sample's number.",
    )
    features: tuple[FeatureConfig, ...] = Field(
        default=(),
        strict=False,
        description="Losses between layers; they need a single live teacher, see docs/features.md.",
    )
    projector: ProjectorConfig = Field(
        default=ProjectorConfig(), description="Projection of features with different hidden sizes."
    )
    balance: BalanceConfig = Field(
        default=BalanceConfig(), description="Balance of cross-entropy and distillation."
    )
    chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens whose logits are in memory at once; null: those of 2^25 logits per "
        "model on a CPU, 2^28 on a GPU.",
    )

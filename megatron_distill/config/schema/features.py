"""The parts of `objective` that compare layers of the two models."""

from typing import Literal

from pydantic import Field

from megatron_distill.config.schema.base import Section

__all__ = ["FeatureConfig", "ProjectorConfig"]


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

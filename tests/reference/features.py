"""A whole objective with feature losses by its definition: float64 models and plain autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.cross_tokenizer import Alignment, likelihood
from tests.reference.distillation import cross_entropy, forward_kl
from tests.reference.llama import Heads, Packed, run

Weights = Mapping[str, Tensor]
# Student's layer, teacher's layer, loss, weight.
Pair = tuple[int, int, str, float]


@dataclass(frozen=True)
class Trained:
    """Whole sequences with their labels and masks, [b, S].

    With the teacher's own tokens, chunks and their ends take the place of the KD mask: the
    divergence is of the chunks' likelihoods. Positions are sample and place, each [n].
    """

    packed: Packed
    labels: Tensor
    ce_mask: Tensor
    kd_mask: Tensor
    teacher: Packed | None = None
    chunks: Alignment | None = None
    student_ends: tuple[Tensor, Tensor] | None = None
    teacher_ends: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Answer:
    """The oracle's result: means over the batch, and gradients by name."""

    total: float
    ce: float
    kd: float
    features: list[float]
    gradients: dict[str, Tensor]
    projector_gradients: dict[str, Tensor]
    # Of CE and KD on the last hidden state, and of each loss of states on its layer's output.
    norms: list[float]


def projected(state: Tensor, projector: Weights) -> Tensor:
    """Apply a projector's linear maps, with GELU between them."""
    count = len(projector) // 2
    for index in range(count):
        state = state @ projector[f"weights.{index}"].t() + projector[f"biases.{index}"]
        if index + 1 < count:
            state = state * 0.5 * (1 + torch.erf(state / 2**0.5))
    return state


def distance(student: Tensor, teacher: Tensor, loss: str) -> Tensor:
    """One token's distance."""
    if loss == "mse":
        return ((student - teacher) ** 2).sum() / len(teacher)
    return 1 - (student @ teacher) / ((student @ student) * (teacher @ teacher)).sqrt()


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) of one query's attention, over its visible keys."""
    seen = teacher > 0
    return (teacher[seen] * (teacher[seen] / student[seen]).log()).sum()


def solve(
    student: tuple[Weights, Heads],
    teacher: tuple[Weights, Heads],
    trained: Trained,
    pairs: Sequence[Pair],
    projectors: Weights,
    *,
    ce_weight: float,
    kd_weight: float,
) -> Answer:
    """CE, KD and feature losses, and every gradient; KD is a forward KL.

    `projectors` are by the names of a checkpoint, `student_teacher.part` or `shared.part`; none
    where the sizes are equal.
    """
    own = {name: tensor.double().requires_grad_() for name, tensor in student[0].items()}
    learned = {name: tensor.double().requires_grad_() for name, tensor in projectors.items()}
    local = run(own, student[1], trained.packed)
    frozen = {name: tensor.double() for name, tensor in teacher[0].items()}
    reference = run(frozen, teacher[1], trained.teacher or trained.packed)
    ce_at, kd_at = trained.ce_mask, trained.kd_mask
    ce = cross_entropy(local.logits[ce_at], trained.labels[ce_at]).mean()
    student_at, teacher_at = trained.student_ends or kd_at, trained.teacher_ends or kd_at
    if trained.chunks is None:
        kd = forward_kl(local.logits[kd_at], reference.logits[kd_at], 1.0).mean()
    else:
        rows = (local.logits.flatten(0, 1), reference.logits.flatten(0, 1))
        kd = likelihood(*rows, trained.chunks, "forward_kl").mean()
    total = ce_weight * ce + kd_weight * kd
    values = []
    norms = [_norm(ce, local.final), _norm(kd, local.final)]
    for layer, other, loss, weight in pairs:
        if loss == "attention":
            maps = (local.maps[layer - 1][kd_at], reference.maps[other - 1][kd_at])
            terms = [divergence(a, b) for a, b in zip(*maps, strict=True)]
        else:
            prefix = "shared." if any(name.startswith("shared.") for name in learned) else ""
            prefix = prefix or f"{layer}_{other}."
            linear = {k.removeprefix(prefix): v for k, v in learned.items() if k.startswith(prefix)}
            own_states, other_states = local.outputs[layer - 1], reference.outputs[other - 1]
            states = (own_states[student_at], other_states[teacher_at])
            terms = [distance(projected(a, linear), b, loss) for a, b in zip(*states, strict=True)]
        values.append(torch.stack(terms).mean())
        total = total + weight * values[-1]
        if loss != "attention":
            norms.append(_norm(values[-1], local.outputs[layer - 1]))
    total.backward()  # type: ignore[no-untyped-call]
    return Answer(
        total.item(), ce.item(), kd.item(), [value.item() for value in values],
        _gradients(own), _gradients(learned), norms,
    )  # fmt: skip


def _norm(loss: Tensor, state: Tensor) -> float:
    (gradient,) = torch.autograd.grad(loss, state, retain_graph=True)
    return float(gradient.norm())


def _gradients(parameters: Weights) -> dict[str, Tensor]:
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}

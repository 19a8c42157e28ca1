"""Our losses against the functions that TRL, Liger and ModelOpt ship: values and gradients of the
definitions that are the same, with our parameter for each of theirs.

`make peers` installs them; a peer that is missing is skipped. Differences are named in
docs/losses.md, "Conventions".
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import (
    LossWeights,
    RatioBalance,
    RawLosses,
    feature_loss,
    scaled_weights,
    token_divergence,
)
from megatron_distill.signals import DenseLogits
from tests.reference.distillation import row_error
from tests.reference.logits import logit_pair

pytestmark = pytest.mark.slow

TOKENS, VOCAB = 24, 1009
Loss = Callable[[Tensor, Tensor], Tensor]


def ours(divergence: str, **given: Any) -> Loss:
    return lambda student, teacher: token_divergence(
        student, DenseLogits(teacher), divergence=divergence, **given
    )


def answers(loss: Loss, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values per token or their sum, and the gradient of the sum, of fp32 logits in a dtype."""
    student, teacher = (logits.to(dtype) for logits in logit_pair(TOKENS, VOCAB, seed=4))
    leaf = student.requires_grad_()
    value = loss(leaf, teacher)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach().double(), gradient.double()


def assert_same(local: Loss, other: Loss) -> None:
    """Ours in fp32 and fp64 is theirs in fp64; most peers lose digits in fp32."""
    their_value, their_gradient = answers(other, torch.float64)
    for own in (torch.float32, torch.float64):
        value, gradient = answers(local, own)
        if their_value.dim() == 0:
            value = value.sum()
        assert float(((value - their_value) / their_value).abs().max()) < 1e-6
        assert row_error(gradient, their_gradient) < 1e-6


@pytest.mark.parametrize(
    ("beta", "temperature"), [(0.0, 2.0), (0.1, 2.0), (0.5, 1.0), (0.9, 1.0), (1.0, 2.0)]
)
def test_trl_generalized_jsd(beta: float, temperature: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd", reason="TRL is not installed: make peers")

    def other(student: Tensor, teacher: Tensor) -> Tensor:
        return gkd.GKDTrainer.generalized_jsd_loss(
            student, teacher, beta=beta, temperature=temperature, reduction="none"
        ).sum(-1)

    assert_same(ours("js_divergence", beta=beta, temperature=temperature), other)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_liger_jsd(beta: float) -> None:
    losses = pytest.importorskip(
        "liger_kernel.chunked_loss.jsd_loss", reason="Liger is not installed: make peers"
    )

    def other(student: Tensor, teacher: Tensor) -> Tensor:
        return losses.LigerFusedLinearJSDFunction.distillation_loss_fn(student, teacher, beta=beta)

    assert_same(ours("js_divergence", beta=beta), other)


def test_liger_cosine() -> None:
    losses = pytest.importorskip(
        "liger_kernel.chunked_loss.cosine_similarity_loss",
        reason="Liger is not installed: make peers",
    )

    def own(student: Tensor, teacher: Tensor) -> Tensor:
        return feature_loss(student, teacher, student.new_ones(TOKENS), loss="cosine")

    other = losses.LigerFusedLinearCosineSimilarityFunction.distillation_loss_fn
    assert_same(own, lambda student, teacher: other(student, teacher))


def modelopt_loss(name: str, **given: Any) -> Loss:
    plugin = pytest.importorskip(
        "modelopt.torch.distill.plugins.megatron", reason="ModelOpt is not installed: make peers"
    )
    config = SimpleNamespace(tensor_model_parallel_size=1, sequence_parallel=False)
    module = getattr(plugin, name)(config, **given)

    def loss(student: Tensor, teacher: Tensor) -> Tensor:
        # Its fp32 rounds by up to 2e-6 depending on the CPU; the formula is what is compared.
        with mock.patch.object(Tensor, "float", Tensor.double):
            found = module(student.unsqueeze(1), teacher.unsqueeze(1))
        return (found[0] if isinstance(found, tuple) else found).squeeze(0)

    return loss


KLS = pytest.mark.parametrize(
    ("divergence", "reverse", "temperature"),
    [("forward_kl", False, 1.0), ("reverse_kl", True, 2.0)],
)


@KLS
def test_modelopt_kl(divergence: str, reverse: bool, temperature: float) -> None:
    other = modelopt_loss("LogitsKLLoss", temperature=temperature, reverse=reverse)
    assert_same(ours(divergence, temperature=temperature), other)


@KLS
def test_modelopt_top_k(divergence: str, reverse: bool, temperature: float) -> None:
    other = modelopt_loss("TopKLogitsKLLoss", temperature=temperature, reverse=reverse, top_k=32)
    own = ours(divergence, temperature=temperature, top_k=32, support="renormalized")
    assert_same(own, other)


def test_modelopt_applies_temperature_squared_outside_of_megatron() -> None:
    losses = pytest.importorskip(
        "modelopt.torch.distill.losses", reason="ModelOpt is not installed: make peers"
    )
    other = losses.LogitsDistillationLoss(temperature=2.0, reduction="none")
    own = ours("forward_kl", temperature=2.0, scale_by_temperature_squared=True)
    assert_same(own, other)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_modelopt_balancer(scale: float) -> None:
    plugin = pytest.importorskip(
        "modelopt.torch.distill.plugins.megatron", reason="ModelOpt is not installed: make peers"
    )
    balancer = plugin.LogitsAndIntermediatesLossBalancer(kd_loss_scale=scale)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        draws = torch.rand(4, generator=generator, dtype=torch.float64) * 10
        ce, kd, *features = (draw.clone().requires_grad_() for draw in draws)
        named = {"student_loss": ce, "LogitsKLLoss_0": kd, "a_1": features[0], "b_2": features[1]}
        gradients = torch.autograd.grad(
            balancer.forward(dict(named))["kd_loss"], [ce, kd, *features]
        )
        raw = RawLosses(ce.item(), (kd.item(),), tuple(one.item() for one in features))
        weights = LossWeights(1.0, (1.0,), (0.5, 0.5))
        scales = RatioBalance().scales(raw, weights)
        own = scaled_weights(weights, alpha=scale, scales=scales)
        other = [float(gradient) for gradient in gradients]
        assert [own.ce, *own.terms, *own.features] == pytest.approx(other, rel=1e-12)

"""Objectives from hidden states side by side, and the matrix products that all of them need."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_distill.losses import Term, fused_linear_objective
from megatron_distill.ops.workspace import chunk_tokens_for
from megatron_distill.runtime.launch import PRECISIONS
from megatron_distill.signals import HiddenState

Run = Callable[[], object]
_LIGER_CHUNK = 1024  # its default


@dataclass(frozen=True)
class Inputs:
    """Hidden states and heads of two models of one width, labels, and equal weights."""

    hidden: Tensor
    weight: Tensor
    teacher: HiddenState
    labels: Tensor
    weights: Tensor

    @classmethod
    def random(cls, arguments: argparse.Namespace, width: int, device: torch.device) -> Inputs:
        """Logits of standard deviation one."""
        generator = torch.Generator(device).manual_seed(4)
        tokens, vocab = arguments.tokens, arguments.vocab

        def normal(rows: int) -> Tensor:
            drawn = torch.randn(rows, width, generator=generator, device=device)
            return (drawn / width**0.25).to(PRECISIONS[arguments.precision])

        return cls(
            normal(tokens),
            normal(vocab),
            HiddenState(normal(tokens), normal(vocab)),
            torch.randint(vocab, (tokens,), generator=generator, device=device),
            torch.full((tokens,), 1 / tokens, device=device),
        )

    def leaves(self) -> tuple[Tensor, Tensor]:
        """The student's hidden states and weight, to be differentiated."""
        return self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_()


def fused_subjects(
    arguments: argparse.Namespace, width: int, device: torch.device
) -> dict[tuple[str, str], Run]:
    """Forward and backward by family and name, ours first in every family."""
    inputs = Inputs.random(arguments, width, device)
    linear, jsd = f"fused linear, width {width}", f"fused jsd, width {width}"
    bare = _products(inputs)
    runs: dict[tuple[str, str], Run] = {
        (linear, "ours"): _ours(inputs, Term(), 1.0),
        (linear, "ours, into a buffer"): _ours(inputs, Term(), 1.0, into_buffer=True),
        (linear, "bare products"): bare,
        (linear, "torch"): _eager(inputs),
        (jsd, "ours"): _ours(inputs, Term("js_divergence"), 0.0),
        (jsd, "bare products"): bare,
    }
    liger = _liger(inputs)
    return runs if liger is None else {**runs, (jsd, "Liger, chunked"): liger}


def _products(inputs: Inputs) -> Run:
    gradient = torch.empty_like(inputs.hidden @ inputs.weight.t()).normal_()

    def run() -> None:
        torch.mm(inputs.hidden, inputs.weight.t())
        torch.mm(inputs.teacher.hidden, inputs.teacher.weight.t())
        torch.mm(gradient, inputs.weight)
        torch.mm(gradient.t(), inputs.hidden)

    return run


def _ours(inputs: Inputs, term: Term, ce_coefficient: float, *, into_buffer: bool = False) -> Run:
    # A persistent buffer, as under data parallelism.
    buffer = torch.zeros(inputs.weight.shape, device=inputs.weight.device) if into_buffer else None

    def run() -> None:
        leaf, head = inputs.leaves()
        total, _ = fused_linear_objective(
            leaf,
            head,
            inputs.teacher,
            inputs.labels,
            ce_weights=inputs.weights,
            kd_weights=inputs.weights,
            terms=[term],
            chunk_tokens=chunk_tokens_for(len(inputs.weight), inputs.weight.device),
            ce_coefficient=ce_coefficient,
            weight_gradient_sum=buffer,
        )
        torch.autograd.grad(total, (leaf, head), allow_unused=into_buffer)

    return run


def _eager(inputs: Inputs) -> Run:
    def run() -> None:
        leaf, head = inputs.leaves()
        student = leaf @ head.t()
        teacher = inputs.teacher.hidden @ inputs.teacher.weight.t()
        log_q, log_p = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
        kl = F.kl_div(log_q, log_p, reduction="sum", log_target=True)
        ce = F.nll_loss(log_q, inputs.labels, reduction="sum")
        torch.autograd.grad((kl + ce) / len(leaf), (leaf, head))

    return run


def _liger(inputs: Inputs) -> Run | None:
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    except ImportError:
        return None
    # Compiled where it is meant to be: a CPU may have no compiler for it.
    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0,
        weight_soft_loss=1.0,
        compiled=inputs.hidden.device.type == "cuda",
        chunk_size=_LIGER_CHUNK,
    )

    def run() -> None:
        leaf, head = inputs.leaves()
        teacher = inputs.teacher
        total = loss(leaf, head, teacher.hidden, teacher.weight, inputs.labels)
        torch.autograd.grad(total, (leaf, head))

    return run

"""A student's head whose gradient goes straight into the buffer of Megatron's data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_distill.models.gpt import HiddenStateGPT


@dataclass(frozen=True)
class MainGradientHead:
    """The head of a model chunk, with the fp32 buffer of its gradient where it is wrapped.

    The buffer, `main_grad`, holds the sum over the micro-batches of a step and is what the data
    parallel ranks reduce. Upstream's hook on a parameter adds what autograd brings and reports the
    parameter as done; here autograd brings nothing for the head.

    Attributes:
        chunk: with the head.
        overlaps: whether gradients are reduced while others are being computed. The hook asks for
            a gradient then.
    """

    chunk: HiddenStateGPT
    overlaps: bool

    def head_weight(self) -> Tensor:
        """This rank's rows of the head [V, H]."""
        weight = self.chunk.head_weight()
        # The embedding brings a gradient to a weight that it shares.
        if self.overlaps and not getattr(weight, "zero_out_wgrad", False):
            return _Announced.apply(weight)
        return weight

    def weight_gradient_sum(self) -> Tensor | None:
        """Where the head's gradient is added up, fp32 [V, H]; None without data parallelism."""
        return getattr(self.chunk.head_weight(), "main_grad", None)


class _Announced(torch.autograd.Function):
    """The weight itself, with a gradient of arbitrary values that upstream's hook throws away."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor:
        assert gradient is None, "the gradient is in main_grad"
        ctx.weight.grad_added_to_main_grad = True
        return torch.empty_like(ctx.weight)

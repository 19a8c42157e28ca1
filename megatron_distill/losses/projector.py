"""A learned map from the student's hidden size to the teacher's, for losses between the two."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Projector"]


class Projector(torch.nn.Module):
    """Linear maps with biases through the given sizes, GELU between them.

    Two sizes are a linear projector, three an MLP. Parameters are fp32; products are taken in the
    type of what comes in, as the models' own are.
    """

    def __init__(self, sizes: Sequence[int], *, device: torch.device) -> None:
        super().__init__()
        steps = list(zip(sizes, sizes[1:], strict=False))
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(fan_out, fan_in, device=device))
            for fan_in, fan_out in steps
        )
        self.biases = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(fan_out, device=device)) for _, fan_out in steps
        )

    @torch.no_grad()
    def initialise(self, name: str, *, seed: int) -> None:
        """Draw weights of standard deviation ``fan_in^-0.5``, a function of seed and name alone.

        A state of unit variance stays one. Biases are zero.
        """
        for index, weight in enumerate(self.weights):
            digest = hashlib.sha256(f"{seed}/projector/{name}/{index}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        pairs = list(zip(self.weights, self.biases, strict=True))
        for index, (weight, bias) in enumerate(pairs):
            hidden = F.linear(hidden, weight.to(hidden.dtype), bias.to(hidden.dtype))
            if index + 1 < len(pairs):
                hidden = F.gelu(hidden)
        return hidden

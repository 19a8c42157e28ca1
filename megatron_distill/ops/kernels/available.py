"""The choice between the Triton kernels and the torch path."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

__all__ = ["KernelForm", "kernels_run"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class KernelForm:
    """The Triton function of an entry of the table of divergences, and its parameter."""

    name: Literal[
        "reverse_kl",
        "js_divergence",
        "skewed_forward_kl",
        "skewed_reverse_kl",
        "total_variation",
        "squared_hellinger",
    ]
    parameter: float = 0.0

    @property
    def parameters(self) -> tuple[float, float]:
        """The parameter and one minus it: subtracting in fp32 would lose digits."""
        return self.parameter, 1 - self.parameter


def kernels_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels support this device and dtype: CUDA, or any device if Triton interprets.

    ``TRITON_INTERPRET=1`` enables Triton's interpreter, which is slow and for tests only.
    """
    if dtype not in _DTYPES or not _is_installed():
        return False
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None

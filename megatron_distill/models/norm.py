"""Norms that work under sequence parallelism without Transformer Engine or Apex."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class ZeroCenteredRMSNorm(torch.nn.Module):
    """y = x / rms(x) * (1 + w), computed in fp32 and then rounded to the type of x.

    Source: Root Mean Square Layer Normalization, arXiv 1910.07467, equation 4; the gain stored as
    its distance from one is Gemma's.
    """

    def __init__(
        self, hidden_size: int, *, eps: float, dtype: torch.dtype, device: torch.device | int | str
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        gain = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.weight.shape, gain, self.eps).to(x.dtype)


class TorchNorm:
    """RMSNorm or LayerNorm of torch, as the configuration says, ready for sequence parallelism.

    Under sequence parallelism each tensor-parallel rank normalises its own tokens, so a weight's
    gradient is a partial sum; Megatron-Core adds those up for parameters marked
    `sequence_parallel`. Constructing this returns the torch module itself.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5
    ) -> torch.nn.Module:
        kinds = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        if config.layernorm_zero_centered_gamma:
            assert config.normalization == "RMSNorm", config.normalization
            kinds["RMSNorm"] = ZeroCenteredRMSNorm
        norm = kinds[config.normalization](
            hidden_size,
            eps=eps,
            dtype=config.params_dtype,
            device=torch.cuda.current_device(),
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

"""Norms that work under sequence parallelism without Transformer Engine or Apex."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig


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
        norm = kinds[config.normalization](
            hidden_size,
            eps=eps,
            dtype=config.params_dtype,
            device=torch.cuda.current_device(),
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

"""Rotary positions: the angle by which each pair of a head's dimensions turns at each position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_distill.models.architecture import RopeScaling


def rotary_angles(
    position_ids_bs: Tensor, *, rotary_size: int, base: float, scaling: RopeScaling | None = None
) -> Tensor:
    """Return the rotation angles of each position, fp32 [s, b, 1, rotary_size].

    Source: RoFormer, arXiv 2104.09864, equation 15; the two halves of a head's first
    `rotary_size` dimensions rotate together, and what is behind them does not turn.
    """
    frequencies_r = rotary_frequencies(
        rotary_size, base=base, scaling=scaling, device=position_ids_bs.device
    )
    angles_bsr = position_ids_bs[..., None].float() * frequencies_r
    return torch.cat((angles_bsr, angles_bsr), dim=-1).transpose(0, 1).unsqueeze(2)


def rotary_frequencies(
    rotary_size: int, *, base: float, scaling: RopeScaling | None, device: torch.device | str
) -> Tensor:
    """Return the angle per position of each pair of dimensions, fp32 [rotary_size / 2].

    Source: `linear` is Position Interpolation, arXiv 2306.15595, equation 4. `llama3` is that of
    Llama 3.1 (arXiv 2407.21783, section 3.2, and the model's own code): interpolation of the
    wavelengths beyond the pretraining's sequence only, with a share between the two that runs
    over the wavelengths in between.
    """
    exponents_r = torch.arange(0, rotary_size, 2, dtype=torch.float32, device=device) / rotary_size
    # Written as a quotient, as the published models do: angles at late positions show each bit.
    frequencies_r = 1.0 / base**exponents_r
    if scaling is None:
        return frequencies_r
    stretched_r = frequencies_r / scaling.factor
    if scaling.kind == "linear":
        return stretched_r
    assert scaling.kind == "llama3", scaling.kind
    turns_r = scaling.original_positions * frequencies_r / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    unchanged_r = ((turns_r - low) / (high - low)).clamp(0.0, 1.0)
    return torch.lerp(stretched_r, frequencies_r, unchanged_r)

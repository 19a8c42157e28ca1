"""The attention window and rotary embedding of each layer, where a model's layers differ.

Rotary angles depend on the micro-batch and on the kind of a layer. They are computed once for each
distinct kind and passed to all layers as planes of one tensor. Each layer selects the plane of its
kind. Planes are ordinary tensors, so recomputation and pipelines need no change. A window is a
number, which the layer's attention holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_distill.models.architecture import Architecture, RopeScaling


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding of a layer."""

    base: float
    scaling: RopeScaling | None


@dataclass(frozen=True)
class LayerKind:
    """The properties in which attention differs between layers."""

    window: int | None  # keys that a query sees, itself included; None: all
    rotation: Rotation | None  # None: positions are learned


@dataclass(frozen=True)
class LayerKinds:
    """The kinds of all layers of a model, on every pipeline stage."""

    layers: tuple[LayerKind, ...]

    @classmethod
    def of(cls, architecture: Architecture) -> LayerKinds:
        """Return the kinds of an architecture's layers."""
        return cls(tuple(_kind(architecture, layer) for layer in range(architecture.num_layers)))

    @cached_property
    def rotations(self) -> tuple[Rotation, ...]:
        """The distinct rotations, in the order of their first layers."""
        found = dict.fromkeys(kind.rotation for kind in self.layers)
        return tuple(rotation for rotation in found if rotation is not None)

    def window_of(self, layer: int) -> int | None:
        """Return the window of a layer (from 0)."""
        return self.layers[layer].window

    def angles_of(self, layer: int, angles_sbpr: Tensor | None) -> Tensor | None:
        """Return the rotary angles [s, b, 1, r] of a layer (from 0), None for learned positions."""
        rotation = self.layers[layer].rotation
        if angles_sbpr is None or rotation is None:
            return None
        plane = self.rotations.index(rotation)
        return angles_sbpr[:, :, plane : plane + 1]


def _kind(architecture: Architecture, layer: int) -> LayerKind:
    sliding = architecture.sliding_window is not None and (
        architecture.sliding_layers is None or layer in architecture.sliding_layers
    )
    rotation = Rotation(architecture.rope_base, architecture.rope_scaling)
    if sliding and architecture.sliding_rope_base is not None:
        rotation = Rotation(architecture.sliding_rope_base, None)
    return LayerKind(
        window=architecture.sliding_window if sliding else None,
        rotation=rotation if architecture.positions == "rope" else None,
    )


def rotary_angles(
    position_ids_bs: Tensor, *, rotary_size: int, base: float, scaling: RopeScaling | None = None
) -> Tensor:
    """Return the rotation angles of each position, fp32 [s, b, 1, rotary_size].

    Source: RoFormer, arXiv 2104.09864, equation 15; the two halves of a head's first `rotary_size`
    dimensions rotate together; further dimensions do not rotate.
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
    Llama 3.1 (arXiv 2407.21783, section 3.2, and the model's code). It interpolates only the
    wavelengths beyond the pretraining's sequence, with a linear transition over the wavelengths in
    between.
    """
    exponents_r = torch.arange(0, rotary_size, 2, dtype=torch.float32, device=device) / rotary_size
    # A quotient, as in the published models: late positions amplify every rounding difference.
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

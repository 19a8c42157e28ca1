"""Windows and rotary angles of layers, by their definitions; layers per stage."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.megatron_world import small_architecture
from tests.distributed.pool import Pool


def _chosen(rank: int, world: int, changes: dict[str, Any]) -> list[Any]:
    """The window of each layer, and the rotation that it takes from planes of their own numbers."""
    architecture = small_architecture(**changes)
    from megatron_distill.models.layer_kinds import LayerKinds

    kinds = LayerKinds.of(architecture)
    angles = torch.arange(len(kinds.rotations)).view(1, 1, -1, 1)
    turned = [kinds.angles_of(layer, angles) for layer in range(architecture.num_layers)]
    return [
        [rotation.base for rotation in kinds.rotations],
        [kinds.window_of(layer) for layer in range(architecture.num_layers)],
        [angle if angle is None else int(angle) for angle in turned],
    ]


SOME = {"sliding_window": 5, "sliding_layers": (1, 3), "sliding_rope_base": 50.0}
CHOICES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "one kind": ({}, [[1e4], [None] * 4, [0] * 4]),
    "all slide": ({"sliding_window": 5}, [[1e4], [5] * 4, [0] * 4]),
    "some slide": (SOME, [[1e4, 50.0], [None, 5, None, 5], [0, 1, 0, 1]]),
    "learned": ({"positions": "learned"}, [[], [None] * 4, [None] * 4]),
}


@pytest.mark.parametrize("case", CHOICES)
def test_each_layer_has_its_own_window_and_plane(pool: Pool, case: str) -> None:
    changes, expected = CHOICES[case]
    assert pool.run(1, _chosen, changes) == [expected]


LLAMA = {"factor": 32.0, "low": 1.0, "high": 4.0, "original": 8192}


def _frequencies(rank: int, world: int, kind: str | None) -> tuple[Tensor, Tensor]:
    small_architecture()
    from megatron_distill.models.architecture import RopeScaling
    from megatron_distill.models.layer_kinds import rotary_angles, rotary_frequencies

    scaling = None
    if kind is not None:
        scaling = RopeScaling(
            kind, LLAMA["factor"], LLAMA["low"], LLAMA["high"], int(LLAMA["original"])
        )
    frequencies = rotary_frequencies(64, base=5e5, scaling=scaling, device="cpu")
    positions = torch.tensor([[0, 1, 5], [7, 0, 8191]])
    return frequencies, rotary_angles(positions, rotary_size=64, base=5e5, scaling=scaling)


def _expected(kind: str | None) -> list[float]:
    """The definition in Python's floats, one frequency at a time."""
    found = []
    for pair in range(32):
        frequency = 5e5 ** (-2 * pair / 64)
        wavelength = 2 * math.pi / frequency
        if kind == "linear" or (kind == "llama3" and wavelength > LLAMA["original"] / LLAMA["low"]):
            frequency /= LLAMA["factor"]
        elif kind == "llama3" and wavelength > LLAMA["original"] / LLAMA["high"]:
            smooth = LLAMA["original"] / wavelength - LLAMA["low"]
            smooth /= LLAMA["high"] - LLAMA["low"]
            frequency *= (1 - smooth) / LLAMA["factor"] + smooth
        found.append(frequency)
    return found


@pytest.mark.parametrize("kind", [None, "linear", "llama3"])
def test_frequencies_and_angles_are_their_definition(pool: Pool, kind: str | None) -> None:
    ((frequencies, angles),) = pool.run(1, _frequencies, kind)
    expected = torch.tensor(_expected(kind), dtype=torch.float64)
    torch.testing.assert_close(frequencies.double(), expected, atol=0, rtol=2e-6)
    assert angles.shape == (3, 2, 1, 64)
    assert angles.dtype is torch.float32
    torch.testing.assert_close(angles[2, 1, 0, :32], 8191 * frequencies)
    assert torch.equal(angles[..., :32], angles[..., 32:])
    assert angles[0, 0].count_nonzero() == 0

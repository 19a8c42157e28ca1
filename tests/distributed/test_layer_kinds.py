"""Attention masks and rotary angles of layers, by their definitions; layers per stage.

Regimes: a window one key too wide, across documents, or cut at a context shard's chunks; a plane
given to another layer; frequencies stretched that should not be; a stage without a layer.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.megatron_world import small_architecture
from tests.distributed.pool import Pool
from tests.distributed.test_models import LENGTH, packed_batch

WINDOWS = (6, None, 3)


def _masks(rank: int, world: int, size: int, isolate: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    small_architecture()  # prepares Megatron-Core for the import
    from megatron_distill.models.attention import attention_mask
    from megatron_distill.runtime.batch import zigzag_index

    keys = torch.cat([zigzag_index(LENGTH, rank=shard, size=size) for shard in range(size)])
    found = []
    for shard in range(size):
        batch = packed_batch(isolate=isolate).context_shard(shard, size)
        mask = attention_mask(batch, context_size=size, windows=WINDOWS)
        assert mask is not None
        found.append((mask, batch.sequence_index_s, keys))
    return found


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_mask_allows_the_pairs_of_the_definition(pool: Pool, size: int, isolate: bool) -> None:
    documents = packed_batch(isolate=isolate).document_ids_bS
    windows = WINDOWS if isolate or size > 1 else (6, 3)  # None is mere causality there
    (shards,) = pool.run(1, _masks, size, isolate)
    for mask, queries, keys in shards:
        assert mask.shape == (2, len(windows), LENGTH // size, LENGTH)
        for b in range(2):
            for plane, window in enumerate(windows):
                expected = [
                    [
                        bool(documents[b, i] == documents[b, j])
                        and 0 <= i - j < (LENGTH if window is None else window)
                        for j in keys.tolist()
                    ]
                    for i in queries.tolist()
                ]
                assert mask[b, plane].tolist() == expected


def _needed(rank: int, world: int) -> list[bool]:
    small_architecture()
    from megatron_distill.models.attention import attention_mask

    return [
        attention_mask(packed_batch(isolate=False), context_size=1, windows=windows) is not None
        for windows in ((None,), (LENGTH,), (LENGTH, None), (LENGTH - 1,), (None, LENGTH - 1))
    ]


def test_a_mask_is_made_only_where_a_window_hides_something(pool: Pool) -> None:
    assert pool.run(1, _needed) == [[False, False, False, True, True]]


def _chosen(rank: int, world: int, changes: dict[str, Any], planes: int) -> list[Any]:
    """The window and rotation that each layer takes from planes that hold their own numbers."""
    architecture = small_architecture(**changes)
    from megatron_distill.models.layer_kinds import LayerKinds

    kinds = LayerKinds.of(architecture)
    masks = torch.arange(planes).view(1, -1, 1, 1)
    angles = torch.arange(len(kinds.rotations)).view(1, 1, -1, 1)
    found = []
    for layer in range(architecture.num_layers):
        mask, turned = kinds.mask_of(layer, masks), kinds.angles_of(layer, angles)
        found.append((mask if mask is None else int(mask), turned if turned is None else turned))
    assert kinds.mask_of(0, None) is None
    return [
        kinds.windows,
        [rotation.base for rotation in kinds.rotations],
        [mask for mask, _ in found],
        [angle if angle is None else int(angle) for _, angle in found],
    ]


SOME = {"sliding_window": 5, "sliding_layers": (1, 3), "sliding_rope_base": 50.0}
CHOICES: dict[str, tuple[dict[str, Any], int, list[Any]]] = {
    "one kind": ({}, 1, [(None,), [1e4], [0] * 4, [0] * 4]),
    "all slide": ({"sliding_window": 5}, 1, [(5,), [1e4], [0] * 4, [0] * 4]),
    "some slide": (SOME, 2, [(None, 5), [1e4, 50.0], [0, 1, 0, 1], [0, 1, 0, 1]]),
    "only sliding layers need a mask": (
        SOME, 1, [(None, 5), [1e4, 50.0], [None, 0, None, 0], [0, 1, 0, 1]],
    ),
    "learned": ({"positions": "learned"}, 1, [(None,), [], [0] * 4, [None] * 4]),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOICES)
def test_each_layer_takes_its_own_planes(pool: Pool, case: str) -> None:
    changes, planes, expected = CHOICES[case]
    assert pool.run(1, _chosen, changes, planes) == [expected]


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


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_frequencies_are_those_of_transformers_to_the_last_bit_but_one(
    pool: Pool, kind: str
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": kind, "rope_theta": 5e5, "factor": LLAMA["factor"]}
    if kind == "llama3":
        parameters |= {
            "low_freq_factor": LLAMA["low"],
            "high_freq_factor": LLAMA["high"],
            "original_max_position_embeddings": LLAMA["original"],
        }
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    theirs, _ = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
    ((frequencies, _),) = pool.run(1, _frequencies, kind)
    torch.testing.assert_close(frequencies, theirs, atol=0, rtol=2.5e-7)


def _stages(rank: int, world: int) -> list[Any]:
    small_architecture()
    from megatron_distill.models.pipeline_stages import even_layers, stage_layers

    found: list[Any] = []
    for layers, pipeline, virtual in ((5, 2, None), (5, 2, 2), (7, 3, 2), (11, 4, None)):
        counts = even_layers(layers, pipeline * (virtual or 1))
        table = stage_layers(counts, pipeline)
        assert table is not None
        assert table.layers == counts
        stages = [(stage, rank) for stage in range(virtual or 1) for rank in range(pipeline)]
        found.append(
            [
                (
                    table.get_layer_offset(vp_stage=stage, pp_rank=rank),
                    table.get_num_layers_to_build(vp_stage=stage, pp_rank=rank),
                )
                for stage, rank in stages
            ]
        )
    assert stage_layers((2, 2, 2, 2), 2) is None
    assert stage_layers((3,), 1) is None
    return found


def test_stages_share_layers_out_evenly_with_the_surplus_in_front(pool: Pool) -> None:
    assert pool.run(1, _stages) == [
        [
            [(0, 3), (3, 2)],
            [(0, 2), (2, 1), (3, 1), (4, 1)],
            [(0, 2), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1)],
            [(0, 3), (3, 3), (6, 3), (9, 2)],
        ]
    ]

"""Documents, windows, positions and heads of models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distill.models.layer_kinds import LayerKinds, rotary_angles, rotary_frequencies
from megatron_distill.runtime.batch import Batch
from tests.distributed.megatron_world import build, megatron_groups, small_architecture
from tests.distributed.pool import Pool

LENGTH = 32


def packed_batch(*, isolate: bool) -> Batch:
    """Two sequences of several documents, the second with padding at its end."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 200, (2, LENGTH), generator=generator)
    documents = torch.zeros(2, LENGTH, dtype=torch.int64)
    positions = torch.arange(LENGTH).repeat(2, 1)
    if isolate:
        documents[0, 5:20] = 1
        documents[0, 20:] = 2
        documents[1, 17:] = 1
        documents[1, 28:] = -1
        for row in range(2):
            for start in (5, 20) if row == 0 else (17, 28):
                positions[row, start:] = torch.arange(LENGTH - start)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    return Batch(
        tokens_bs=tokens,
        labels_bs=tokens.roll(-1, 1),
        ce_mask_bs=mask,
        kd_mask_bs=mask,
        position_ids_bs=positions,
        document_ids_bS=documents,
        sequence_index_s=torch.arange(LENGTH),
        sample_ids_b=torch.arange(2),
        isolate_documents=isolate,
    )


def _document_alone(rank: int, world: int, positions: str) -> tuple[torch.Tensor, torch.Tensor]:
    with megatron_groups() as groups:
        from megatron_distill.models.gpt import run_model

        architecture = small_architecture(positions=positions)
        (model,) = build(architecture, groups, seed=11)
        packed = packed_batch(isolate=True)
        alone = Batch.untrained(packed.tokens_bs[:1, 5:20])
        with torch.no_grad():
            together = run_model(model, packed, context_size=1)[5:20, 0]
            return together, run_model(model, alone, context_size=1)[:, 0]


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_a_packed_document_is_read_as_if_it_were_alone(pool: Pool, positions: str) -> None:
    ((together, alone),) = pool.run(1, _document_alone, positions)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def _aligned(rank: int, world: int, own_rows: int, wanted_rows: int) -> torch.Tensor:
    with megatron_groups(tensor=world) as groups:
        from megatron_distill.models.gpt import align_head
        from megatron_distill.ops import VocabShard

        size = 10
        whole = torch.arange(own_rows * world * 3, dtype=torch.float32).view(-1, 3)
        own = VocabShard(size=size, start=rank * own_rows, stop=(rank + 1) * own_rows)
        wanted = VocabShard(size=size, start=rank * wanted_rows, stop=(rank + 1) * wanted_rows)
        shard = whole[own.start : own.stop]
        return align_head(shard, own=own, wanted=wanted, group=groups.tensor)


@pytest.mark.parametrize(("own_rows", "wanted_rows"), [(5, 5), (6, 5), (5, 8), (8, 6), (12, 5)])
def test_a_frozen_head_is_cut_along_other_shards(
    pool: Pool, own_rows: int, wanted_rows: int
) -> None:
    shards = pool.run(2, _aligned, own_rows, wanted_rows)
    whole = torch.cat(shards)
    assert whole.shape[0] == 2 * wanted_rows
    torch.testing.assert_close(whole[:10], torch.arange(30, dtype=torch.float32).view(-1, 3))
    if own_rows != wanted_rows:
        assert whole[10:].count_nonzero() == 0


def _chosen(rank: int, world: int, changes: dict[str, Any]) -> list[Any]:
    """The window of each layer, and the rotation that it takes from planes of their own numbers."""
    architecture = small_architecture(**changes)

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

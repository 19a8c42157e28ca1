"""Memory of every loss between tokenizers: neither vocabulary and no number of chunks is in it."""

from __future__ import annotations

import pytest

from megatron_distill.losses import ChunkTerm
from tests.reference.tracing import traced
from tests.support.aligned_losses import aligned_step

TERMS = (
    ChunkTerm("likelihood"),
    ChunkTerm("common"),
    ChunkTerm("common", top_k=64),
    ChunkTerm("projection"),
    ChunkTerm("projection", published=True),
    ChunkTerm("gold"),
    ChunkTerm("uld"),
)
SMALL, LARGE = (2048, 1536), (8192, 6144)
TILE = 2**15  # numbers of the larger vocabulary in a tile, as `tile_tokens_for` has 2^23


def peak_of(sizes: tuple[int, int], term: ChunkTerm, *, chunks: int, tile_tokens: int) -> int:
    """Most bytes alive at once in the forward and backward pass, above those before it."""
    work, before = aligned_step(sizes, term, chunks=chunks, tile_tokens=tile_tokens)
    return traced(work, *before).peak_bytes


# Gold has the parts of projection, common tokens and sorted ranks together.
@pytest.mark.parametrize(
    "term",
    [
        pytest.param(term, id=term.name, marks=() if term.alignment == "gold" else pytest.mark.slow)
        for term in TERMS
    ],
)
def test_memory_is_that_of_a_tile(term: ChunkTerm) -> None:
    small = peak_of(SMALL, term, chunks=40, tile_tokens=TILE // SMALL[0])
    # Four times the vocabularies: a tile has a quarter of the rows.
    assert peak_of(LARGE, term, chunks=40, tile_tokens=TILE // LARGE[0]) < 1.3 * small
    # Four times the chunks: only numbers per row are added.
    assert peak_of(SMALL, term, chunks=160, tile_tokens=TILE // SMALL[0]) < 1.3 * small
    # The same rows in a tile would show the vocabulary.
    assert peak_of(LARGE, term, chunks=40, tile_tokens=TILE // SMALL[0]) > 2 * small


@pytest.mark.parametrize("sizes", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)])
def test_the_order_of_classes_takes_no_further_memory(sizes: tuple[int, int]) -> None:
    reverse, adaptive = (
        peak_of(sizes, ChunkTerm("common", name), chunks=40, tile_tokens=TILE // sizes[0])
        for name in ("reverse_kl", "adaptive_kl")
    )
    assert adaptive < 1.05 * reverse

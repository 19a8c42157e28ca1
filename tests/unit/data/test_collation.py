"""Collation: masks and positions against examples made by hand, rows to ranks and back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distill.data.collation import (
    BatchLayout,
    count_labels,
    document_positions,
    micro_batch,
    pack_samples,
)
from megatron_distill.data.samples import (
    CE_TRAINED,
    FULLY_TRAINED,
    KD_TRAINED,
    Sample,
    untrained_sample,
)
from megatron_distill.runtime.batch import LabelCounts

# Two whole documents that end in 0, the beginning of a third, and what a held-out tail looks like.
TOKENS = [11, 12, 0, 21, 0, 31, 32, 33, 34]
DOCUMENTS = [0, 0, 0, 1, 1, 2, 2, 2, 2]
TAIL_TOKENS = [41, 42, 0, 51, 0, 99, 99, 99, 99]
TAIL_DOCUMENTS = [0, 0, 0, 1, 1, -1, -1, -1, -1]


def sample_of(
    tokens: list[int], documents: list[int], flags: list[int] | None = None, sample_id: int = 0
) -> Sample:
    trained = [0 if document < 0 else FULLY_TRAINED for document in documents]
    return Sample(
        np.array(tokens, np.int32),
        np.array(documents, np.int32),
        np.array(trained if flags is None else flags, np.uint8),
        sample_id,
    )


SAMPLES = [
    sample_of(TOKENS, DOCUMENTS, sample_id=70),
    sample_of(TAIL_TOKENS, TAIL_DOCUMENTS, sample_id=71),
]


def bits(mask: torch.Tensor) -> list[list[int]]:
    return mask.int().tolist()


def test_isolated_documents_by_hand() -> None:
    batch = micro_batch(pack_samples(SAMPLES), slice(0, 2), isolate_documents=True)
    assert batch.tokens_bs.tolist() == [TOKENS[:-1], TAIL_TOKENS[:-1]]
    assert batch.labels_bs.tolist() == [TOKENS[1:], TAIL_TOKENS[1:]]
    expected = [[1, 1, 0, 1, 0, 1, 1, 1], [1, 1, 0, 1, 0, 0, 0, 0]]
    assert bits(batch.ce_mask_bs) == expected
    assert bits(batch.kd_mask_bs) == expected
    assert batch.position_ids_bs.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch.document_ids_bS.tolist() == [DOCUMENTS[:-1], TAIL_DOCUMENTS[:-1]]
    assert batch.sequence_index_s.tolist() == list(range(8))
    assert batch.sample_ids_b.tolist() == [70, 71]


def test_documents_that_are_not_isolated_by_hand() -> None:
    batch = micro_batch(pack_samples(SAMPLES), slice(0, 2), isolate_documents=False)
    expected = [[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0]]
    assert bits(batch.ce_mask_bs) == expected
    assert bits(batch.kd_mask_bs) == expected
    assert batch.position_ids_bs.tolist() == [list(range(8))] * 2
    assert batch.document_ids_bS.tolist() == [[0] * 8] * 2


def test_the_two_losses_have_masks_and_counts_of_their_own() -> None:
    flags = [CE_TRAINED, KD_TRAINED, 0, FULLY_TRAINED, CE_TRAINED, 0, 0, KD_TRAINED, KD_TRAINED]
    packed = pack_samples([sample_of(TOKENS, DOCUMENTS, flags)])
    batch = micro_batch(packed, slice(0, 1), isolate_documents=False)
    # A flag belongs to the token as a label: the mask stands one position before it.
    assert bits(batch.ce_mask_bs) == [[0, 0, 1, 1, 0, 0, 0, 0]]
    assert bits(batch.kd_mask_bs) == [[1, 0, 1, 0, 0, 0, 1, 1]]
    assert count_labels(packed, isolate_documents=False) == (LabelCounts(2, 4),)
    assert count_labels(packed, isolate_documents=True) == (LabelCounts(1, 3),)


def test_types_and_untrained_samples() -> None:
    packed = pack_samples([untrained_sample(8, token=5, sample_id=3)])
    batch = micro_batch(packed, slice(0, 1), isolate_documents=True)
    for tensor in (batch.tokens_bs, batch.labels_bs, batch.position_ids_bs, batch.document_ids_bS):
        assert tensor.dtype == torch.int64
    assert batch.ce_mask_bs.dtype == batch.kd_mask_bs.dtype == torch.bool
    assert count_labels(packed, isolate_documents=False) == (LabelCounts(0, 0),)
    assert batch.tokens_bs.unique().tolist() == [5]
    assert not batch.ce_mask_bs.any()


documents_of = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@settings(deadline=None)
@given(lengths=documents_of)
def test_positions_restart_with_each_document(lengths: list[int]) -> None:
    ids = [index for index, length in enumerate(lengths) for _ in range(length)]
    expected = [position for length in lengths for position in range(length)]
    assert document_positions(torch.tensor([ids, ids])).tolist() == [expected] * 2


@pytest.mark.parametrize(("micro", "size"), [(1, 1), (4, 1), (1, 4), (2, 2), (3, 2), (2, 6)])
def test_every_row_falls_to_one_rank_and_micro_batch(micro: int, size: int) -> None:
    rows = 24
    owners: dict[int, tuple[int, int]] = {}
    for rank in range(size):
        layout = BatchLayout(rows, micro, rank, size)
        assert layout.micro_batches * micro * size == rows
        for index in range(layout.micro_batches):
            for row in range(rows)[layout.rows(index)]:
                assert row not in owners
                owners[row] = (index, rank)
    expected = {row: (row // (micro * size), row % (micro * size) // micro) for row in range(rows)}
    assert owners == expected


def test_a_layout_that_does_not_divide_is_refused() -> None:
    with pytest.raises(AssertionError):
        BatchLayout(10, 2, 0, 2)

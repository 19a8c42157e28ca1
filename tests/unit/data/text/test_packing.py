"""Packing: no token lost or doubled, boundaries where the documents end, resume at any sample."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distill.data.samples import FULLY_TRAINED, PADDING_DOCUMENT, Sample
from megatron_distill.data.text.stream import Packer

PAD = 99


def numbered_documents(lengths: list[int]) -> list[np.ndarray]:
    """Documents of the given lengths whose tokens are all different."""
    starts = np.cumsum([0, *lengths])
    return [
        np.arange(start, start + length, dtype=np.int32) + 100
        for start, length in zip(starts, lengths, strict=False)
    ]


def cut_all(packer: Packer[int], documents: list[np.ndarray]) -> list[Sample]:
    samples: list[Sample] = []
    for mark, tokens in enumerate(documents):
        packer.add(tokens, mark)
        while packer.is_ready:
            samples.append(packer.take(len(samples)))
    return samples


lengths = st.lists(st.integers(0, 13), min_size=1, max_size=25)


@settings(deadline=None)
@given(lengths=lengths, sequence_length=st.integers(1, 9))
def test_every_token_but_the_first_is_a_label_exactly_once(
    lengths: list[int], sequence_length: int
) -> None:
    documents = numbered_documents(lengths)
    row = np.concatenate(documents)
    packer: Packer[int] = Packer(sequence_length, padding_token=PAD)
    samples = cut_all(packer, documents)
    assert len(samples) == max(0, len(row) - 1) // sequence_length
    tail = packer.flush(len(samples))
    parts = [sample.tokens_S1 for sample in samples]
    if tail is not None:
        real = tail.document_ids_S1 != PADDING_DOCUMENT
        assert (tail.tokens_S1[~real] == PAD).all()
        assert not tail.flags_S1[~real].any()
        parts.append(tail.tokens_S1[real])
    inputs = np.concatenate([part[:-1] for part in parts] or [row[:0]])
    labels = np.concatenate([part[1:] for part in parts] or [row[:0]])
    assert inputs.tolist() == row[:-1].tolist()
    assert labels.tolist() == row[1:].tolist()


@settings(deadline=None)
@given(lengths=lengths, sequence_length=st.integers(1, 9))
def test_document_ids_change_exactly_where_documents_do(
    lengths: list[int], sequence_length: int
) -> None:
    documents = numbered_documents(lengths)
    owner = {token: i for i, document in enumerate(documents) for token in document.tolist()}
    for sample in cut_all(Packer(sequence_length, padding_token=PAD), documents):
        owners = [owner[token] for token in sample.tokens_S1.tolist()]
        numbering = {document: index for index, document in enumerate(dict.fromkeys(owners))}
        assert sample.document_ids_S1.tolist() == [numbering[document] for document in owners]
        assert (sample.flags_S1 == FULLY_TRAINED).all()


@settings(deadline=None)
@given(lengths=lengths, sequence_length=st.integers(1, 9))
def test_the_start_is_enough_to_come_back_to_any_sample(
    lengths: list[int], sequence_length: int
) -> None:
    documents = numbered_documents(lengths)
    packer: Packer[int] = Packer(sequence_length, padding_token=PAD)
    expected = cut_all(Packer(sequence_length, padding_token=PAD), documents)
    taken = 0
    for mark, tokens in enumerate(documents):
        packer.add(tokens, mark)
        while packer.is_ready:
            packer.take(taken)
            taken += 1
            assert packer.start is not None
            first, offset = packer.start
            resumed: Packer[int] = Packer(sequence_length, padding_token=PAD)
            resumed.add(documents[first], first, skip=offset)
            rest = cut_all(resumed, documents[first + 1 :])
            if resumed.is_ready or rest:
                row = [sample.tokens_S1.tolist() for sample in rest]
                wanted = [sample.tokens_S1.tolist() for sample in expected[taken:]]
                assert row == wanted[: len(row)]
            assert int(documents[first][offset]) == int(expected[taken - 1].tokens_S1[-1])


@pytest.mark.parametrize("left", [0, 1])
def test_a_tail_without_a_label_is_not_a_sample(left: int) -> None:
    packer: Packer[int] = Packer(4, padding_token=PAD)
    packer.add(np.arange(left, dtype=np.int32), 0)
    assert packer.flush(0) is None

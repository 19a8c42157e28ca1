"""Laws of the packing of aligned documents: whole chunks on both sides, each label once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distill.data.aligned.documents import AlignedDocument, Side
from megatron_distill.data.aligned.packing import AlignedPacker, Window
from megatron_distill.data.collation import (
    UnitRows,
    count_labels,
    micro_batch,
    pack_samples,
    unpack_samples,
)
from megatron_distill.data.samples import CE_TRAINED, KD_TRAINED, NO_CHUNK, PADDING_DOCUMENT, Sample

PAD = 999_999
Sizes = list[tuple[int, int, int, int]]  # per chunk: tokens without text before it, tokens; twice

chunk_sizes = st.tuples(
    st.sampled_from([0, 0, 0, 1]),
    st.integers(1, 4),
    st.sampled_from([0, 0, 0, 1]),
    st.integers(1, 4),
)
documents_of_chunks = st.lists(
    st.lists(chunk_sizes, min_size=1, max_size=9), min_size=1, max_size=6
)


def side(sizes: Sequence[tuple[int, int]], first_token: int) -> Side:
    """A side whose token ids count up from `first_token`."""
    ranges, place = [], 0
    for gap, size in sizes:
        ranges.append((place + gap, place + gap + size))
        place += gap + size
    tokens = np.arange(first_token, first_token + place, dtype=np.int32)
    numbers = np.full(place, NO_CHUNK, np.int32)
    for number, (start, stop) in enumerate(ranges):
        numbers[start:stop] = number
    return Side.of_chunks(tokens, numbers)


def documents(shapes: Sequence[Sizes]) -> list[AlignedDocument]:
    """Documents whose tokens are all different: thousands per document."""
    return [
        AlignedDocument(
            side([(gap, size) for gap, size, _, _ in sizes], 1000 * (number + 1)),
            side([(gap, size) for _, _, gap, size in sizes], 1000 * (number + 1)),
        )
        for number, sizes in enumerate(shapes)
    ]


def cut_all(
    packer: AlignedPacker[int], given_documents: Sequence[AlignedDocument]
) -> Iterator[Sample]:
    """All samples of the documents, the padded rest last."""
    for number, document in enumerate(given_documents):
        packer.add(document, number)
        while packer.is_ready:
            yield packer.take(0)
    while packer.is_ready:
        yield packer.take(0)
    last = packer.flush(0)
    if last is not None:
        yield last


def chunk_texts(sample: Sample) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The label tokens of each chunk on both sides."""
    teacher = sample.teacher
    pairs = ((teacher.student_chunks_S1, sample.tokens_S1), (teacher.chunks_U1, teacher.tokens_U1))
    return [
        (tuple(pairs[0][1][pairs[0][0] == chunk]), tuple(pairs[1][1][pairs[1][0] == chunk]))
        for chunk in range(teacher.chunks)
    ]


def expected(document: AlignedDocument) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The chunks of a document whose labels all have a token before them."""
    sides = (document.student, document.teacher)
    found = []
    for chunk in range(document.chunks):
        labels = [one.tokens_n[one.chunks_n == chunk] for one in sides]
        if all(one.chunks_n[0] != chunk for one in sides):
            found.append((tuple(labels[0]), tuple(labels[1])))
    return found


@settings(deadline=None, max_examples=12)
@given(documents_of_chunks, st.integers(12, 30), st.integers(12, 30))
def test_terms_of_one_tokenizer_train_labels_outside_of_chunks_too(
    shapes: list[Sizes], student_width: int, teacher_width: int
) -> None:
    windows = Window(student_width, PAD), Window(teacher_width, PAD)
    aligned = cut_all(AlignedPacker[int](*windows), documents(shapes))
    all_labels = cut_all(AlignedPacker[int](*windows, distils_all=True), documents(shapes))
    for one, other in zip(aligned, all_labels, strict=True):
        assert (one.tokens_S1 == other.tokens_S1).all()
        assert (one.teacher.student_chunks_S1 == other.teacher.student_chunks_S1).all()
        is_real = other.document_ids_S1 != PADDING_DOCUMENT
        assert ((other.flags_S1 & KD_TRAINED > 0) == is_real).all()
        assert ((other.flags_S1 & CE_TRAINED) == (one.flags_S1 & CE_TRAINED)).all()
        (first,), (second,) = (
            count_labels(pack_samples([sample]), isolate_documents=True) for sample in (one, other)
        )
        assert second.kd == second.ce >= first.kd == first.chunk_labels
        assert (first.chunks, first.pairs, first.chunk_labels) == (
            *(second.chunks, second.pairs, second.chunk_labels),
        )


@settings(deadline=None, max_examples=25)
@given(documents_of_chunks, st.integers(12, 30), st.integers(12, 30))
def test_each_chunk_is_in_one_sample_and_whole_on_both_sides(
    shapes: list[Sizes], student_width: int, teacher_width: int
) -> None:
    made = documents(shapes)
    packer = AlignedPacker[int](Window(student_width, PAD), Window(teacher_width, PAD))
    found = []
    for sample in cut_all(packer, made):
        assert (len(sample.tokens_S1), len(sample.teacher.tokens_U1)) == (
            student_width,
            teacher_width,
        )
        found += chunk_texts(sample)
        labelled = sample.teacher.student_chunks_S1 != NO_CHUNK
        assert ((sample.flags_S1 & KD_TRAINED > 0) == labelled).all()
        for tokens, chunks, numbers in (
            (sample.tokens_S1, sample.teacher.student_chunks_S1, sample.document_ids_S1),
            (sample.teacher.tokens_U1, sample.teacher.chunks_U1, sample.teacher.document_ids_U1),
        ):
            assert chunks[0] == NO_CHUNK
            labels = np.nonzero(chunks != NO_CHUNK)[0]
            # A label follows the token before it, in one document.
            assert (tokens[labels] == tokens[labels - 1] + 1).all()
            assert (numbers[labels] == numbers[labels - 1]).all()
            assert (numbers[labels] != PADDING_DOCUMENT).all()
    assert packer.too_long == 0
    assert found == [chunk for document in made for chunk in expected(document)]


@settings(deadline=None, max_examples=12)
@given(documents_of_chunks, st.integers(12, 20), st.integers(0, 3))
def test_a_packer_resumes_where_the_next_sample_begins(
    shapes: list[Sizes], width: int, samples: int
) -> None:
    made = documents(shapes)
    windows = Window(width, PAD), Window(width, PAD)
    whole, place = AlignedPacker[int](*windows), (0, 0)
    remaining = list(enumerate(made))
    for _ in range(samples):
        while not whole.is_ready and remaining:
            number, document = remaining.pop(0)
            whole.add(document, number)
        if not whole.is_ready:
            break
        whole.take(0)
        place = whole.start
    resumed = AlignedPacker[int](*windows)
    for number, document in enumerate(made[place[0] :]):
        resumed.add(document, number, skip=place[1] if number == 0 else 0)
    expected_samples = [chunk_texts(one) for one in cut_all(whole, [made[n] for n, _ in remaining])]
    found = []
    while resumed.is_ready:
        found.append(chunk_texts(resumed.take(0)))
    last = resumed.flush(0)
    found += [] if last is None else [chunk_texts(last)]
    assert found == expected_samples


def test_a_sample_that_ends_with_a_document_leaves_a_place_to_resume() -> None:
    made = documents([[(0, 1, 0, 1)] * 6, [(0, 1, 0, 1)] * 6])
    packer = AlignedPacker[int](Window(6, PAD), Window(6, PAD))
    packer.add(made[0], 0)
    packer.take(0)
    assert packer.start == (0, 6)
    resumed = AlignedPacker[int](Window(6, PAD), Window(6, PAD))
    resumed.add(made[0], 0, skip=6)
    for one in (packer, resumed):
        one.add(made[1], 1)
    assert chunk_texts(packer.take(1)) == chunk_texts(resumed.take(1))


def test_a_chunk_longer_than_a_window_is_counted_and_the_rest_is_packed() -> None:
    made = documents([[(0, 1, 0, 1), (0, 9, 0, 1), (0, 2, 0, 2)]])
    packer = AlignedPacker[int](Window(6, PAD), Window(6, PAD))
    found = [chunk for sample in cut_all(packer, made) for chunk in chunk_texts(sample)]
    assert packer.too_long == 1
    assert found == [((1010, 1011), (1002, 1003))]


def of_two_documents(student: Window, teacher: Window) -> list[Sample]:
    """The samples of two documents, each packed alone."""
    shapes: list[Sizes] = [[(0, 1, 1, 1), (0, 1, 0, 1), (0, 3, 0, 1)], [(0, 2, 0, 1), (0, 1, 0, 1)]]
    return [
        sample
        for document in documents(shapes)
        for sample in cut_all(AlignedPacker[int](student, teacher), [document])
    ]


def test_a_batch_has_both_sides_and_counts_chunks() -> None:
    samples = of_two_documents(Window(9, PAD), Window(5, PAD))
    packed = pack_samples(samples)
    (counts,) = count_labels(packed, isolate_documents=True)
    assert (counts.chunks, counts.pairs) == (3, 2)
    batch = micro_batch(packed, slice(0, 2), isolate_documents=True)
    assert batch.chunk_count == 3
    assert batch.chunks_bs.tolist() == [
        [0, 1, 1, 1, -1, -1, -1, -1],
        [-1, 2, -1, -1, -1, -1, -1, -1],
    ]
    assert batch.teacher.chunks_bs.tolist() == [[-1, 0, 1, -1], [2, -1, -1, -1]]
    assert batch.kd_mask_bs.tolist() == (batch.chunks_bs >= 0).tolist()
    shard = batch.context_shard(1, 2)
    assert shard.teacher.chunks_bs is not None
    again = unpack_samples(packed, slice(0, 2))
    for sample, read in zip(samples, again, strict=True):
        for name in vars(sample.teacher):
            one, other = getattr(sample.teacher, name), getattr(read.teacher, name)
            assert np.array_equal(one, other), name


def test_units_of_a_teacher_in_its_own_layout_are_in_its_own_tokens_alone():
    packed = pack_samples(of_two_documents(Window(9, PAD), Window(7, PAD)))
    whole = micro_batch(packed, slice(1, 2), isolate_documents=True)
    # Neither number of context ranks divides the sequences of the other side.
    for side, ranks, has_own_tokens in ((whole, 4, False), (whole.teacher, 3, True)):
        read = []
        for rank in range(ranks):
            units = UnitRows(((1,),), rank, ranks, has_own_tokens)
            (unit,) = units.batches(packed, 0, micro_batch_size=1, isolate_documents=True)
            assert unit.teacher is None
            places = unit.sequence_index_s.tolist()
            read += zip(places, unit.tokens_bs[0].tolist(), strict=True)
        assert [token for _, token in sorted(read)] == side.tokens_bs[0].tolist()

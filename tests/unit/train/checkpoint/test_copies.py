"""From which ranks a copied range of a checkpoint's values comes."""

from __future__ import annotations

from megatron_distill.train.checkpoint.copies import _Range, _sources

RECTANGLE = ("embedding", (0, 0), (10, 10))


def sources(start: int, stop: int, *offers: tuple[int, int, int], receiver: int) -> list[object]:
    """Sender, start and stop of each part of a range in a group of four; offers by sender."""
    given = [(sender, _Range(RECTANGLE, first, last)) for sender, first, last in offers]
    found = list(_sources(_Range(RECTANGLE, start, stop), given, receiver, 4))
    assert all((sender, offer) in given for sender, offer, _, _ in found)
    assert all(offer.start <= begin < end <= offer.stop for _, offer, begin, end in found)
    return [(sender, begin, end) for sender, _, begin, end in found]


def test_a_range_is_put_together_from_the_ranks_that_have_its_parts() -> None:
    offers = ((2, 60, 100), (0, 0, 25), (1, 25, 60))
    expected = [(0, 10, 25), (1, 25, 60), (2, 60, 90)]
    assert sources(10, 90, *offers, receiver=3) == expected
    assert sources(30, 50, *offers, receiver=3) == [(1, 30, 50)]


def test_of_several_that_have_it_the_next_rank_behind_the_receiver_sends() -> None:
    offers = ((0, 0, 50), (2, 0, 50), (0, 50, 100), (2, 50, 100))
    assert sources(0, 100, *offers, receiver=1) == [(2, 0, 50), (2, 50, 100)]
    assert sources(0, 100, *offers, receiver=3) == [(0, 0, 50), (0, 50, 100)]


def test_ranges_that_overlap_are_sent_once() -> None:
    assert sources(0, 100, (1, 40, 100), (0, 0, 70), receiver=3) == [(0, 0, 70), (1, 70, 100)]

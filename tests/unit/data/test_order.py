"""Orders that are functions of a seed: every number once, another order for every key."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distill.data.samples import shuffled


@settings(deadline=None, max_examples=25)
@given(count=st.integers(1, 700), key=st.tuples(st.integers(0, 99), st.integers(0, 99)))
def test_every_number_stands_at_one_place(count: int, key: tuple[int, int]) -> None:
    assert sorted(shuffled(place, count, *key) for place in range(count)) == list(range(count))


def test_the_order_is_fixed_for_all_time() -> None:
    assert [shuffled(place, 10, 1, 2) for place in range(10)] == [7, 2, 6, 3, 8, 9, 1, 0, 4, 5]


def test_another_key_is_another_order() -> None:
    orders = {
        tuple(shuffled(place, 50, seed, epoch) for place in range(50)) for seed, epoch in KEYS
    }
    assert len(orders) == len(KEYS)


KEYS = [(seed, epoch) for seed in range(5) for epoch in range(5)]


def test_a_number_comes_at_every_place_about_as_often() -> None:
    count, orders = 12, 3000
    for number_of in (0, 7):
        seen = [0] * count
        for key in range(orders):
            seen[shuffled(number_of, count, key)] += 1
        # Five standard deviations of a fair draw.
        spread = 5 * (orders / count * (1 - 1 / count)) ** 0.5
        assert max(abs(times - orders / count) for times in seen) < spread


def test_a_place_of_a_huge_range_is_found_at_once() -> None:
    count = 10**12 + 39
    found = [shuffled(place, count, 3) for place in range(2000)]
    assert len(set(found)) == 2000
    assert max(found) < count
    assert sum(number > count // 2 for number in found) == pytest.approx(1000, abs=112)

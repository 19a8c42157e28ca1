"""The ring of nodes that sum with their neighbours, and which of them are bad after a failure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import pytest

from megatron_distill.launching.checks.ring import NodeSums, bad_sums, broken_pairs, ring


def names_of(count: int) -> list[str]:
    return [f"n{place}" for place in range(count)]


def sums_of(count: int, broken: Iterable[frozenset[int]]) -> dict[str, NodeSums]:
    """What nodes find where these pairs fail, or with one place the ranks of a node alone."""
    fails, nodes = set(broken), names_of(count)
    found = {node: NodeSums(node) for node in nodes}
    for place, node in enumerate(nodes):
        pairs = [pair for pairs in ring(count) for pair in pairs if place in pair]
        for other in (place, *(sum(pair) - place for pair in pairs)):
            found[node].begun.append(nodes[other])
            if frozenset({place, other}) in fails:
                found[node].problems[nodes[other]] = "no route"
            else:
                found[node].speeds[nodes[other]] = 1.0
    return found


def pairs_with(place: int, count: int) -> list[frozenset[int]]:
    return [frozenset({place, (place + step) % count}) for step in (-1, 1)]


@pytest.mark.parametrize("count", range(2, 10))
def test_each_node_sums_once_with_each_neighbour_and_with_one_at_a_time(count: int) -> None:
    rounds = ring(count)
    assert len(rounds) == (1 if count == 2 else 2 + count % 2)
    pairs = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(set(pairs)) == len(pairs)
    assert set(pairs) == {frozenset({place, (place + 1) % count}) for place in range(count)}
    for one in rounds:
        places = [place for pair in one for place in pair]
        assert len(set(places)) == len(places)
    firsts = [first for pairs in rounds for first, _ in pairs]
    assert len(set(firsts)) == len(firsts)  # a node holds one store


def test_a_single_node_has_no_neighbour() -> None:
    assert ring(1) == []


@pytest.mark.parametrize("count", range(3, 9))
def test_a_node_that_no_neighbour_reaches_is_the_only_bad_one(count: int) -> None:
    nodes = names_of(count)
    assert bad_sums(nodes, sums_of(count, [])) == {}
    for place in range(count):
        found = sums_of(count, pairs_with(place, count))
        bad = bad_sums(nodes, found)
        assert list(bad) == [nodes[place]]
        assert bad[nodes[place]].reason.count("no route") == 2
        assert not bad[nodes[place]].is_hang
        assert list(broken_pairs(nodes, found, bad)) == []


@pytest.mark.parametrize("count", range(5, 9))
def test_two_bad_nodes_are_found_where_a_sound_one_has_another_sound_neighbour(count: int) -> None:
    nodes = names_of(count)
    for one, other in combinations(range(count), 2):
        between = {(one + 1) % count, (one - 1) % count} & {
            (other + 1) % count,
            (other - 1) % count,
        }
        found = sums_of(count, [*pairs_with(one, count), *pairs_with(other, count)])
        enclosed = {nodes[place] for place in between - {one, other}}
        assert set(bad_sums(nodes, found)) == {nodes[one], nodes[other]} | enclosed


def test_of_two_nodes_that_fail_together_either_may_be_bad() -> None:
    assert set(bad_sums(names_of(2), sums_of(2, [frozenset({0, 1})]))) == {"n0", "n1"}


def test_a_node_whose_own_ranks_fail_does_not_count_against_its_neighbours() -> None:
    found = sums_of(4, [frozenset({1}), *pairs_with(1, 4)])
    bad = bad_sums(names_of(4), found)
    assert list(bad) == ["n1"]
    assert bad["n1"].reason == "the sum of its ranks: no route"


def test_a_broken_pair_of_sound_nodes_is_named_and_neither_is_bad() -> None:
    found = sums_of(5, [frozenset({2, 3})])
    bad = bad_sums(names_of(5), found)
    assert bad == {}
    assert list(broken_pairs(names_of(5), found, bad)) == ["node n2: its sum with n3: no route"]


def test_a_node_that_has_begun_nothing_is_not_bad_and_no_sum_with_it_counts() -> None:
    found = sums_of(4, pairs_with(1, 4))
    del found["n1"]
    assert bad_sums(names_of(4), found) == {}


@pytest.mark.parametrize(
    ("problem", "is_hang"),
    [
        (None, True),
        ("Timed out after 11 seconds waiting for clients", True),
        ("connect: connection timeout", True),
        ("Watchdog caught collective operation: ran for 10 s before timing out", True),
        ("CUDA error: no device", False),
    ],
)
def test_a_sum_that_has_not_ended_is_told_from_one_that_failed(
    problem: str | None, is_hang: bool
) -> None:
    sums = NodeSums("n0", ["n0"], {}, {} if problem is None else {"n0": problem})
    bad = bad_sums(["n0"], {"n0": sums})["n0"]
    assert bad.is_hang is is_hang
    assert bad.reason == f"the sum of its ranks: {problem or 'has not ended'}"

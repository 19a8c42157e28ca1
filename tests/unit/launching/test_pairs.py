"""The pairs of nodes that sum, and which nodes are bad after a failure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from megatron_distill.launching.checks.pairs import (
    NodeSums,
    bad_sums,
    broken_pairs,
    round_ends,
    rounds,
    untried_pairs,
)

LONG = 30.0


def names_of(count: int) -> list[str]:
    return [f"n{place}" for place in range(count)]


def pairs_of(count: int) -> list[frozenset[int]]:
    return [frozenset(pair) for pairs in rounds(count) for pair in pairs]


def sums_of(
    count: int, broken: Iterable[frozenset[int]], problem: str | None = None
) -> dict[str, NodeSums]:
    """What nodes find where these pairs fail, or with one place the ranks of a node alone.

    problem: as the ranks tell it; None: both sides wait for each other.
    """
    fails, nodes = set(broken), names_of(count)
    found = {node: NodeSums(node) for node in nodes}
    for place, node in enumerate(nodes):
        partners = [other for pair in pairs_of(count) if place in pair for other in pair - {place}]
        for other in (place, *partners):
            name, sums = nodes[other], found[node]
            sums.begun[name], sums.ended[name] = 100.0, 100.0 + LONG
            if frozenset({place, other}) not in fails:
                sums.speeds[name] = 1.0
            elif problem is not None:
                sums.problems[name] = problem
    return found


def pairs_with(place: int, count: int) -> list[frozenset[int]]:
    return [pair for pair in pairs_of(count) if place in pair]


@pytest.mark.parametrize("count", range(1, 12))
def test_each_node_has_one_pair_at_a_time_and_holds_one_store(count: int) -> None:
    found = rounds(count)
    assert len(found) == {1: 0, 2: 1, 3: 3}.get(count, 2)
    pairs = pairs_of(count)
    assert len(set(pairs)) == len(pairs)
    for one in found:
        places = [place for pair in one for place in pair]
        assert len(set(places)) == len(places)
    firsts = [first for pairs in found for first, _ in pairs]
    assert len(set(firsts)) == len(firsts)
    lone = [place for place in range(count) if len(pairs_with(place, count)) < 2]
    assert lone == ([] if count > 2 and (count == 3 or count % 2 == 0) else [*{0, count - 1}])


@pytest.mark.parametrize("problem", ["No route to host", "Timed out after 11 seconds", None])
@pytest.mark.parametrize("count", range(3, 10))
def test_a_node_that_no_neighbour_reaches_is_the_only_bad_one(
    count: int, problem: str | None
) -> None:
    nodes = names_of(count)
    assert bad_sums(nodes, sums_of(count, [])) == {}
    for place in range(count):
        failed = pairs_with(place, count)
        found = sums_of(count, failed, problem)
        bad = bad_sums(nodes, found)
        assert list(bad) == [nodes[place]]
        reason = bad[nodes[place]].reason
        assert reason.count(problem or "has not ended") == len(failed)
        assert bad[nodes[place]].is_wait == (problem != "No route to host")
        assert list(broken_pairs(nodes, found, bad)) == []


@pytest.mark.parametrize("count", range(6, 10))
def test_no_sound_node_with_a_sound_neighbour_is_bad_beside_two_that_are(count: int) -> None:
    nodes = names_of(count)
    for broken in combinations(range(count), 2):
        failed = {pair for place in broken for pair in pairs_with(place, count)}
        bad = bad_sums(nodes, sums_of(count, failed, "No route to host"))
        alone = {
            place
            for place in range(count)
            if place not in broken and all(pair in failed for pair in pairs_with(place, count))
        }
        assert set(bad) - {nodes[place] for place in alone} <= {nodes[place] for place in broken}
        # Beside a bad one alone it may be that nothing tells the two apart: neither is recorded.
        certain = {node for node, one in bad.items() if not one.is_wait}
        assert certain <= {nodes[place] for place in broken}
        assert bad


def test_of_two_nodes_that_fail_together_either_may_be_bad_and_none_is_recorded() -> None:
    bad = bad_sums(names_of(2), sums_of(2, [frozenset({0, 1})], "No route to host"))
    assert {node: one.is_wait for node, one in bad.items()} == {"n0": True, "n1": True}
    assert bad["n0"].reason == "its sum with n1: No route to host"


def test_a_node_whose_own_ranks_fail_does_not_count_against_its_neighbours() -> None:
    found = sums_of(4, [frozenset({1}), *pairs_with(1, 4)], "CUDA error: no device")
    bad = bad_sums(names_of(4), found)
    assert list(bad) == ["n1"]
    assert bad["n1"] == ("the sum of its ranks: CUDA error: no device", False)
    two = sums_of(2, [frozenset({1}), frozenset({0, 1})])
    assert list(bad_sums(names_of(2), two)) == ["n1"]


def test_a_broken_pair_of_sound_nodes_is_named_and_neither_is_bad() -> None:
    found = sums_of(6, [frozenset({2, 3})], "No route to host")
    bad = bad_sums(names_of(6), found)
    assert bad == {}
    assert list(broken_pairs(names_of(6), found, bad)) == [
        "node n2: its sum with n3: No route to host"
    ]


def test_a_node_that_has_begun_nothing_is_not_bad_and_no_sum_with_it_counts() -> None:
    found = sums_of(4, pairs_with(1, 4))
    del found["n1"]
    assert bad_sums(names_of(4), found) == {}


def test_nodes_that_come_too_late_for_each_other_have_not_failed() -> None:
    """As from a shared disk that brings torch to one of them much later."""
    found = sums_of(4, pairs_with(1, 4))
    late = found["n1"]
    begun = {name: when + LONG - 5.0 for name, when in late.begun.items()}
    for closed in (None, "Connection closed by peer", "recv: Connection refused, exceeded retries"):
        problems = {} if closed is None else dict.fromkeys(("n0", "n2"), closed)
        found["n1"] = replace(late, begun=begun, problems=problems)
        assert bad_sums(names_of(4), found) == {}
    # One that has not begun a sum at all, either.
    found["n1"] = NodeSums("n1", {"n1": 100.0}, {"n1": 101.0}, {"n1": 1.0})
    assert bad_sums(names_of(4), found) == {}
    assert untried_pairs(names_of(4), found, {}) == [("n0", "n1"), ("n1", "n2")]


@pytest.mark.parametrize(
    ("problem", "is_wait"),
    [
        (None, True),
        ("Timed out after 11 seconds waiting for clients", True),
        ("connect: connection timeout", True),
        ("Watchdog caught collective operation: ran for 10 s before timing out", True),
        ("Connection closed by remote peer", False),  # of its own ranks one has left
        ("CUDA error: no device", False),
    ],
)
def test_a_sum_that_has_not_ended_is_told_from_one_that_failed(
    problem: str | None, is_wait: bool
) -> None:
    sums = NodeSums("n0", {"n0": 1.0}, {}, {}, {} if problem is None else {"n0": problem})
    bad = bad_sums(["n0"], {"n0": sums})["n0"]
    assert bad.is_wait is is_wait
    assert bad.reason == f"the sum of its ranks: {problem or 'has not ended'}"


@pytest.mark.parametrize("count", range(2, 8))
def test_where_all_pairs_fail_all_nodes_are_bad_and_none_is_recorded(count: int) -> None:
    """As with the name of an interface that no node has."""
    found = sums_of(count, pairs_of(count), "Unable to find address for: eth9")
    bad = bad_sums(names_of(count), found)
    assert {node: one.is_wait for node, one in bad.items()} == dict.fromkeys(found, True)


def test_one_side_of_a_pair_that_has_a_wrong_sum_is_a_failure() -> None:
    found = sums_of(4, [])
    for other in ("n0", "n2"):
        del found["n1"].speeds[other]
        found["n1"].problems[other] = "7 numbers of 16 are not 16"
    assert list(bad_sums(names_of(4), found)) == ["n1"]


def test_sums_that_were_killed_with_the_check_have_failed() -> None:
    found = sums_of(2, [frozenset({0, 1})])
    for sums in found.values():
        sums.ended.clear()
    assert set(bad_sums(names_of(2), found)) == {"n0", "n1"}


def test_a_node_that_began_its_own_sum_late_has_not_failed() -> None:
    sums = NodeSums("n0", {"n0": 100.0}, {"n0": 112.0})
    assert bad_sums(["n0"], {"n0": sums}) == {}
    sums.ended["n0"] = 121.0
    assert bad_sums(["n0"], {"n0": sums})["n0"].is_wait


@pytest.mark.parametrize(("count", "least"), [(2, 20.0), (3, 14.0), (4, 18.0), (9, 18.0)])
def test_a_round_begins_when_that_before_has_ended_for_all_nodes(count: int, least: float) -> None:
    """On GPUs a sum needs ten seconds, and one that hangs takes all of its round."""
    own, *ends = round_ends(len(rounds(count)), seconds=72.0, until=1000.0)
    assert ends[-1] == 1000.0
    assert own - (1000.0 - 72.0) >= 2 * least
    for before, after in pairwise([own, *ends]):
        assert after - before >= least

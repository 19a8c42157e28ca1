"""Bounds of the time of a step, and what a search leaves out by them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from statistics import median

import pytest

from megatron_distill.models.architecture import Architecture, MixtureOfExperts
from megatron_distill.planning.device import load_device
from megatron_distill.planning.run import Choice, PlannedRun, SharedTeacher, TeacherPlace
from megatron_distill.planning.search import _PARTNERS, Planned, Search, _best_of_each, planned
from megatron_distill.planning.tries.bounds import (
    least_order,
    least_order_of_family,
    least_seconds,
    order_of,
)
from megatron_distill.planning.tries.choices import Choices, Tries
from megatron_distill.runtime.layout import Layout
from tests.unit.planning.shapes import STUDENT, TEACHER, llama, run_of

DEVICE = load_device("h100-80gb")
EXPERTS = llama(24, 2048, 5632, 16, 8, moe=MixtureOfExperts(16, 2, 1408))
RANKS = 64
# In which a step's samples are read: longer than any layout takes for the rest.
READ_SLOWLY = 1e-4
STUDENTS = pytest.mark.parametrize(
    "student",
    [
        pytest.param(STUDENT, id="dense"),
        pytest.param(EXPERTS, id="experts", marks=pytest.mark.slow),
    ],
)


def no_rule(role: str, layout: Layout) -> None:
    """Refuse no layout."""


def tries_of(run: PlannedRun, place: TeacherPlace) -> Iterator[Tries]:
    """The tries of 64 ranks; of own ranks beside as many of a teacher."""
    choices = Choices(run, DEVICE, RANKS, no_rule)
    if place != "own ranks":
        yield from choices.of_student(RANKS, place)
        return
    beside = Layout(8, 2, sequence=True)
    for tries in choices.of_student(RANKS, "none"):
        made = chain([tries.first], tries.others)
        moved = (choices.moved(choice, place, beside, RANKS) for choice in made)
        yield replace(tries, others=moved)


def all_that_fit(run: PlannedRun, place: TeacherPlace) -> list[Planned]:
    """The first choice of each of the tries that fits, each with its time and memory."""
    found = []
    for tries in tries_of(run, place):
        each = (planned(run, choice, DEVICE) for choice in chain([tries.first], tries.others))
        found += [one for one in each if one.fits(DEVICE)][:1]
    return found


@STUDENTS
@pytest.mark.parametrize(
    "place",
    [
        "shared",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("none", "own ranks", "store")),
    ],
)
@pytest.mark.parametrize("reading", [0.0, READ_SLOWLY], ids=["loaded", "read"])
def test_no_step_comes_before_its_bounds(
    student: Architecture, place: TeacherPlace, reading: float
) -> None:
    run = run_of(student, teacher=TEACHER, reading_seconds=reading)
    first_of: dict[object, Choice] = {}
    for tries in tries_of(run, place):
        first = first_of.setdefault(tries.family, tries.first)
        of_family = least_order_of_family(run, first, DEVICE)
        for choice in chain([tries.first], tries.others):
            order = order_of(planned(run, choice, DEVICE).time)
            assert least_order(run, choice, DEVICE) <= order
            assert of_family <= order
    assert len(first_of) > 10


def test_no_step_of_several_teachers_comes_before_its_bounds() -> None:
    """With shards, the more replicas there are, the more micro-batches need a teacher's head."""
    small, wide = llama(16, 512, 1408, 8, 4), llama(2, 8192, 1024, 64, 8)
    several = tuple(
        SharedTeacher(name, wide, share, shards=True)
        for name, share in (("math", 0.01), ("code", 0.99))
    )
    run = run_of(small, teacher=wide, several=several)
    first_of: dict[object, Choice] = {}
    for tries in tries_of(run, "shared"):
        first = first_of.setdefault(tries.family, tries.first)
        order = order_of(planned(run, tries.first, DEVICE).time)
        assert least_order(run, tries.first, DEVICE) <= order
        assert least_order_of_family(run, first, DEVICE) <= order


@STUDENTS
def test_bounds_are_close(student: Architecture) -> None:
    run = run_of(student)
    shares = [
        least_seconds(run, tries.first, DEVICE) / planned(run, tries.first, DEVICE).time.total
        for tries in tries_of(run, "none")
    ]
    assert 0.85 < median(shares) <= max(shares) <= 1


@pytest.mark.parametrize("reading", [0.0, READ_SLOWLY], ids=["loaded", "read"])
@pytest.mark.parametrize("place", ["none", "store"])
@STUDENTS
def test_the_fastest_layouts_are_those_of_all_choices(
    student: Architecture, place: TeacherPlace, reading: float
) -> None:
    """Also where reading decides all times, and a rest that is longer loses."""
    run = run_of(student, teacher=TEACHER, reading_seconds=reading)
    search = Search(run, DEVICE, RANKS, no_rule, (place,))
    fastest = _best_of_each(search._fastest(tries_of(run, place), most=_PARTNERS))
    everything = _best_of_each(all_that_fit(run, place))
    assert len(everything) > len(fastest) >= _PARTNERS
    assert fastest[:_PARTNERS] == everything[:_PARTNERS]
    assert search._tried < 0.5 * sum(1 for _ in tries_of(run, place))


@STUDENTS
@pytest.mark.parametrize("place", ["shared", "own ranks"])
def test_the_fastest_choice_of_every_layout_is_that_of_all_choices(
    student: Architecture, place: TeacherPlace
) -> None:
    run = run_of(student, teacher=TEACHER)
    search = Search(run, DEVICE, RANKS, no_rule, (place,))
    found = _best_of_each(search._fastest(tries_of(run, place)))
    everything = all_that_fit(run, place)
    assert {one.choice.recompute for one in everything} > {"none"}
    assert found == _best_of_each(everything)
    assert len(found) < search._tried

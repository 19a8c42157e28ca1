"""The search over layouts: what fits, what is fastest, and why popular layouts are missing."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_distill.config import load_config
from megatron_distill.config.rules.teacher_parallel import teacher_parallel
from megatron_distill.models.architecture import MixtureOfExperts
from megatron_distill.planning.device import load_device
from megatron_distill.planning.memory import USABLE, memory_need
from megatron_distill.planning.missing import POPULAR, sizes_of
from megatron_distill.planning.parameters import stage_numbers
from megatron_distill.planning.report import changed_settings, plan_report, settings
from megatron_distill.planning.run import LayerPair, TeacherPlace
from megatron_distill.planning.search import (
    Planned,
    Ranking,
    Search,
    _near,
    planned,
)
from megatron_distill.runtime.groups import Layout
from megatron_distill.train.assemble.shapes import layout_of
from megatron_distill.train.reports.memory_check import nearest
from tests.unit.planning.shapes import STUDENT, TEACHER, llama, run_of

DEVICE = load_device("h100-80gb")
STAGED = """
student: {architecture: {num_layers: 32, hidden_size: 4096, ffn_hidden_size: 14336,
  num_attention_heads: 32, num_kv_heads: 8, vocab_size: 32768}}
teacher:
  architecture: {num_layers: 80, hidden_size: 8192, ffn_hidden_size: 28672,
    num_attention_heads: 64, num_kv_heads: 8, vocab_size: 32768}
  parallel: {tensor: 2, pipeline: 2, context: 2}
parallel: {tensor: 2, pipeline: 2, sequence: true,
  layers_per_stage: {student: [17, 15], teacher: [41, 39]}}
data: {sources: [{format: python_stdlib}], sequence_length: 8192,
  tokenizer: {train_vocab_size: 300}}
train: {steps: 10, global_batch_size: 256, precision: bf16}
"""


def heads_divide(role: str, layout: Layout) -> str | None:
    shape = TEACHER if role == "teacher" else STUDENT
    if shape.num_attention_heads % layout.tensor:
        return f"{role}: {layout.tensor} does not divide its heads"
    return None if layout.tensor != 4 else f"{role}: four is refused"


def search(
    devices: int, *places: TeacherPlace, device: object = DEVICE, **changes: object
) -> Search:
    run = run_of(teacher=TEACHER, **changes)
    return Search(run, device, devices, heads_divide, places)  # type: ignore[arg-type]


def report_of(one: Search, ranking: Ranking | None = None, **changes: Any) -> str:
    """The report of a search, of a configuration that does not run if none else is given."""
    given = {"shown": 3, "store": None, "capture": None, "configured": "no reason"} | changes
    ranking = ranking or one.ranking(shown=3)
    return plan_report(one.run, one.device, one.devices, ranking, **given)


@pytest.fixture(scope="module")
def shared() -> Search:
    return search(64, "shared")


@pytest.fixture(scope="module")
def ranking(shared: Search) -> Ranking:
    return shared.ranking(shown=3)


def test_what_is_ranked_fits_runs_and_is_sorted(shared: Search, ranking: Ranking) -> None:
    assert len(ranking.fitting) > 10
    for one in ranking.fitting:
        choice = one.choice
        assert one.memory.total <= USABLE * DEVICE.memory_bytes
        assert choice.ranks == 64 == choice.data * choice.layout.model_ranks
        assert shared.run.global_batch_size % (choice.data * choice.micro_batch_size) == 0
        assert sum(choice.layers) == STUDENT.num_layers
        assert choice.layout.tensor != 4
    for fast, slow in pairwise(ranking.fitting):
        assert fast.time.total <= slow.time.total


def test_every_popular_layout_that_is_not_shown_has_a_reason(ranking: Ranking) -> None:
    reasons = {one.name: one.reason for one in ranking.missing}
    assert reasons["TP1 PP1"].startswith("needs ")
    assert "teacher" in reasons["TP1 PP1"]
    assert reasons["TP4 PP1"] == "student: four is refused"
    shown = {sizes_of(one.choice.layout) for one in ranking.fitting[:3]}
    slower = {sizes_of(one.choice.layout) for one in ranking.fitting[3:]} - shown
    expected = {}
    for sizes in POPULAR:
        tensor, pipeline, context, expert = sizes
        assert expert == 1
        name = f"TP{tensor} PP{pipeline}" + (f" CP{context}" if context > 1 else "")
        if sizes not in shown:
            expected[name] = sizes in slower
    assert {name: reason.startswith("slower: ") for name, reason in reasons.items()} == expected
    assert all(reasons.values())


def test_a_student_with_experts_has_reasons_for_popular_expert_ranks() -> None:
    moe = MixtureOfExperts(12, 2, 1408)
    student = llama(16, 2048, 5632, 16, 8, moe=moe)

    def rule(role: str, layout: Layout) -> str | None:
        return f"{role}: four are refused" if layout.expert == 4 else None

    found = Search(run_of(student), DEVICE, 16, rule, ("none",)).ranking(shown=1)
    assert {one.choice.layout.expert for one in found.fitting} == {1, 2}
    reasons = {one.name: one.reason for one in found.missing}
    assert reasons["TP1 PP1 EP4"] == "student: four are refused"
    for name in ("TP1 PP1 EP8", "TP2 PP1 EP8"):
        assert reasons[name] == "does not divide the student's 12 experts"
    assert reasons["TP1 PP4 EP8"] == "does not divide 16 devices"
    best = found.fitting[0].choice.layout
    for experts, name in ((1, "TP1 PP1"), (2, "TP1 PP1 EP2")):
        is_best = sizes_of(best) == (1, 1, 1, experts)
        assert is_best or reasons[name].startswith(("slower: ", "needs ")), name


def test_the_fastest_layouts_are_tried_with_larger_micro_batches() -> None:
    """Short samples of small models; 8 of them are the most that every layout is tried with."""
    small, large = llama(16, 2048, 5632, 16, 8), llama(24, 4096, 11_008, 32, 8)
    run = run_of(small, teacher=large, sequence_length=512, global_batch_size=2048)
    one = Search(run, DEVICE, 64, heads_divide, ("shared", "own ranks"))
    found = one.ranking(shown=3)
    for place in ("shared", "own ranks"):
        best = found.best(place)  # type: ignore[arg-type]
        assert best is not None
        size = best.choice.micro_batch_size
        assert size > 8, place
        halved = replace(best.choice, micro_batch_size=size // 2)
        assert planned(run, halved, DEVICE).time.total > best.time.total


def test_the_configured_layout_is_ranked_where_it_fits() -> None:
    """With a micro-batch and numbers of ranks that the search does not try."""
    one = search(64, "own ranks", sequence_length=512, global_batch_size=960)
    (pattern, *_) = one.ranking(shown=1).fitting
    choice = replace(
        pattern.choice, layout=Layout(8, sequence=True), ranks=24, layers=(32,),
        teacher_ranks=40, teacher_layout=Layout(8, sequence=True), teacher_layers=(80,),
        micro_batch_size=5,
    )  # fmt: skip
    alone = replace(one, places=(), configured=choice)
    (found,) = alone.ranking(shown=1).fitting
    assert found == planned(one.run, choice, DEVICE)
    tight = DEVICE.model_copy(update={"memory_gib": found.memory.total / 2**30})
    assert not replace(alone, device=tight).ranking(shown=1).fitting


def test_ranks_of_a_teacher_are_tried_near_the_balance_and_at_quarters() -> None:
    assert _near(164, 256, 8) == [128, 160, 168, 192]
    assert _near(2621, 4096, 8) == [2048, 2616, 2624, 3072]
    assert _near(1.2, 2, 1) == [1]
    assert _near(5.1, 8, 1) == [4, 5, 6]


def test_a_smaller_device_asks_for_more_ranks_per_model_or_recomputation() -> None:
    small = DEVICE.model_copy(update={"memory_gib": 40.0})
    large, less = (
        search(16, "none", device=device).ranking(shown=1).fitting for device in (DEVICE, small)
    )
    assert len(less) < len(large)
    assert less[0].time.total >= large[0].time.total


def test_nothing_fits_where_the_states_alone_are_too_large() -> None:
    tiny = DEVICE.model_copy(update={"memory_gib": 3.0})
    place: TeacherPlace = "shared"
    one = search(8, place, device=tiny)
    ranking = one.ranking(shown=3)
    assert not ranking.fitting
    text = report_of(one, ranking)
    assert "Nothing fits" in text
    assert "With a store" not in text
    assert "needs " in text
    store = search(64, place).with_store()
    text = report_of(one, ranking, store=store)
    assert "With a store in place of the live teacher, TP" in " ".join(text.split())


def test_layouts_with_one_reason_are_named_together() -> None:
    words = " ".join(report_of(search(2, "shared")).split())
    assert words.count("does not divide 2 devices") == 1
    assert "TP8 PP2, TP4 PP4, TP8 PP4, TP8 PP8, TP8 PP1 CP2 does not divide 2 devices" in words


def test_a_teacher_on_its_own_ranks_leaves_the_rest_to_the_student() -> None:
    best = search(16, "own ranks", global_batch_size=32).ranking(shown=1).fitting
    assert best
    for one in best:
        assert one.choice.devices == 16
        assert 0 < one.choice.teacher_ranks < 16
        assert one.memory.total <= USABLE * DEVICE.memory_bytes


@pytest.mark.parametrize(("tensor", "divides"), [(2, True), (4, False)])
def test_heads_are_sent_where_one_number_of_tensor_ranks_divides_the_other(
    tensor: int, *, divides: bool
) -> None:
    # A node of six: the student has tensor ranks for all of it.
    node = DEVICE.node.model_copy(update={"devices": 6})
    six, wanted = DEVICE.model_copy(update={"node": node}), {"student": 6, "teacher": tensor}

    def rule(role: str, layout: Layout) -> str | None:
        return None if layout.tensor == wanted[role] else "another number of tensor ranks"

    shapes = {"student": llama(12, 1536, 4096, 12, 12), "teacher": llama(12, 3072, 8192, 24, 24)}
    run = run_of(**shapes, global_batch_size=48)
    found = {
        sends: Search(replace(run, sends_heads=sends), six, 24, rule, ("shared",)).ranking(shown=1)
        for sends in (False, True)
    }
    assert found[False].fitting
    assert bool(found[True].fitting) == divides


def test_the_nearest_layouts_change_as_little_as_possible(ranking: Ranking) -> None:
    found = ranking.fitting
    wanted = max(found, key=lambda one: one.choice.layout.tensor).choice
    ways = nearest(found, wanted, count=3)
    assert len(ways) == 3
    assert ways[0].choice == wanted
    assert changed_settings(ways[0].choice, wanted) == []
    assert changed_settings(ways[1].choice, wanted)
    assert f"parallel.tensor={wanted.layout.tensor}" in settings(wanted)


def test_the_keys_of_a_layout_take_back_another_recomputation(ranking: Ranking) -> None:
    none = next(one.choice for one in ranking.fitting if one.choice.recompute == "none")
    selective = replace(none, recompute="selective", modules=("mlp",))
    full = replace(none, recompute="full", recomputed_layers=2)
    assert changed_settings(none, selective) == [
        "train.recompute=none", "train.recompute_modules=[attention]"
    ]  # fmt: skip
    assert changed_settings(none, full) == ["train.recompute=none", "train.recompute_layers=null"]


def test_printed_keys_run_where_the_configuration_names_stages_and_a_teacher_s_sizes(
    tmp_path: Path, ranking: Ranking
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(STAGED)
    shared = next(
        one.choice for one in ranking.fitting
        if one.choice.is_same_layout and one.choice.layout.pipeline == 4
    )  # fmt: skip
    own = replace(shared, teacher_layout=Layout(2, 2, sequence=True), teacher_layers=(40, 40))
    there = replace(
        shared, layout=Layout(2, 2, sequence=True), layers=(17, 15),
        teacher_layout=Layout(2, 2, context=2), teacher_layers=(41, 39), micro_batch_size=1,
    )  # fmt: skip
    for choice in (shared, own, replace(there, layers=(16, 16))):
        for words in (settings(choice), changed_settings(choice, there)):
            found = load_config(path, words)
            assert found.parallel.pipeline == choice.layout.pipeline
            assert set(found.parallel.layers_per_stage.model_dump().values()) == {None}
            assert layout_of(teacher_parallel(found)) == choice.teacher_layout
    assert changed_settings(there, replace(there, micro_batch_size=2)) == [
        "train.micro_batch_size=1"
    ]


def test_a_report_has_every_table_and_the_break_even(shared: Search, ranking: Ranking) -> None:
    stored = {"store": shared.with_store(), "capture": shared.capture()}
    text = report_of(shared, ranking, **stored, configured=ranking.fitting[2])
    wanted = ["tokens/s", "Time of a step", "Memory of the fullest rank", "it pays from"]
    wanted += ["Messages of a step to the rank that receives most (GB)"]
    wanted += ["Recommended live: shared ranks", "Popular layouts", "Configured: ", "fits, "]
    for words in wanted:
        assert words in " ".join(text.split()), words
    lines = text.splitlines()
    keys = lines[lines.index("The first row's keys:") + 1]
    assert max(len(line) for line in lines if line != keys) <= 110
    # The first row and the configured one, the third, differ in these alone.
    assert {word.strip("'").partition("=")[0] for word in keys.split()} == {
        word.partition("=")[0]
        for word in changed_settings(ranking.fitting[0].choice, ranking.fitting[2].choice)
    }


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (0.4, "it pays from 1 run on"),
        (1.0, "it pays from 1 run on"),
        (2.5, "it pays from 3 runs on"),
        (None, "a run with it is no faster: keep the teacher live"),
    ],
)
def test_break_even_days_and_device_hours_follow_from_the_times(
    shared: Search, ranking: Ranking, factor: float | None, words: str
) -> None:
    run = replace(shared.run, steps=12_000)
    store, capture = shared.with_store(), shared.capture()
    live = ranking.fitting[0]
    saved = live.time.total - store.time.total
    assert saved > 0
    if factor is None:
        store = live
    else:
        capture = replace(capture, seconds_per_step=factor * saved)
    given = {"store": store, "capture": capture, "configured": live}
    text = " ".join(report_of(replace(shared, run=run), ranking, **given).split())
    assert words in text
    seconds = 12_000 * live.time.total
    tokens = 12_000 * 256 * 8192 / 1e9
    assert (
        f"Cost of 1: 12,000 steps = {tokens:,.2f} billion tokens in {seconds / 86_400:.2f} days, "
        f"{seconds / 3600 * 64:,.0f} device-hours"
    ) in text


def test_a_configured_layout_that_is_the_first_needs_no_keys(
    shared: Search, ranking: Ranking
) -> None:
    texts = [
        report_of(shared, ranking, configured=one, shown=1)
        for one in (ranking.fitting[0], "this configuration: 1 problem")
    ]
    assert "The first row is the configured layout.\n" in texts[0]
    assert "parallel.tensor=" not in texts[0]
    assert "does not run on 64 devices: this configuration: 1 problem\n" in texts[1]
    words = [word for word in settings(ranking.fitting[0].choice) if "{" not in word]
    assert all(word.split("[")[0] in texts[1] for word in words)


def test_times_below_a_second_have_three_digits_and_a_tie_is_named() -> None:
    small = llama(2, 64, 192, 4, 2, vocab_size=512)
    run = run_of(small, teacher=small, sequence_length=128, global_batch_size=64,
                 reading_seconds=1e-5)  # fmt: skip
    one = Search(run, DEVICE, 8, lambda role, layout: None, ("shared", "own ranks"))
    text = report_of(one)
    assert re.search(r" 0\.0819 +100,000 ", text)  # reading decides
    assert (
        "Recommended live: shared ranks, because with ranks of its own a step takes as long."
        in (text)
    )


def two_places() -> tuple[Search, Ranking, Planned, Planned]:
    """A search, its ranking, and the best with a teacher on own and on shared ranks."""
    one = search(64, "shared", "own ranks")
    found = one.ranking(shown=3)
    own, shared = found.best("own ranks"), found.best("shared")
    assert own is not None
    assert shared is not None
    return one, found, own, shared


def test_keys_are_those_of_the_recommended_row() -> None:
    """Of two that take as long, shared ranks are recommended, and not the first row's."""
    one, found, own, shared = two_places()
    for factor, row in ((0.999, "The keys of row 2, which is recommended:"),
                        (0.9, "The first row's keys:")):  # fmt: skip
        parts = {name: factor * value for name, value in shared.time.parts.items()}
        first = replace(own, time=replace(shared.time, **parts))
        text = report_of(one, replace(found, fitting=(first, shared)))
        assert row in text
        keys = text.split(f"{row}\n")[1].splitlines()[0]
        assert ("teacher.ranks=null" in keys) == (factor > 0.99)


def test_keys_are_those_of_a_recommended_layout_without_a_row() -> None:
    one, found, own, shared = two_places()
    parts = {name: 0.999 * value for name, value in shared.time.parts.items()}
    first = replace(own, time=replace(shared.time, **parts))
    text = report_of(one, replace(found, fitting=(first, shared)), shown=1)
    assert "Recommended live: shared ranks" in text
    (keys,) = re.findall(r"\nThe keys of TP.*, which is recommended:\n(.*)\n", text)
    assert "teacher.ranks=null" in keys


def test_a_short_run_is_told_in_small_units() -> None:
    small = llama(2, 64, 192, 4, 2, vocab_size=512)
    run = run_of(small, teacher=small, sequence_length=128, global_batch_size=64, steps=20)
    text = report_of(Search(run, DEVICE, 8, lambda role, layout: None, ("shared",)))
    assert re.search(r"20 steps = 0\.16 million tokens in 0\.0\d+ seconds, 0\.\d+ device-sec", text)
    assert "slower: 0%" not in text


def test_where_nothing_fits_more_devices_and_keys_are_named() -> None:
    tiny = DEVICE.model_copy(update={"memory_gib": 12.0})
    one = search(2, "shared", device=tiny)
    ranking = one.ranking(shown=3)
    assert not ranking.fitting
    words = one.way_out()
    found = int(re.findall(r"^([\d,]+) devices are the first power of two", words)[0])
    sizes = [2**power for power in range(2, 13) if 2**power <= found]
    fits = [bool(search(size, "shared", device=tiny).ranking(shown=1).fitting) for size in sizes]
    assert fits == [size == found for size in sizes]
    assert "no key of teacher or optimizer lowers it" in words
    run = replace(one.run, precision="fp32")
    wide = Search(run, tiny, 2, one.shape_rule, one.places)
    assert not wide.ranking(shown=1).fitting
    assert "lower the least need of a layout here, " in (text := wide.way_out())
    assert "train.precision=bf16 to " in text
    assert " ".join(words.split()) in " ".join(report_of(one, ranking, way_out=words).split())


def test_a_store_is_no_way_for_losses_between_layers(shared: Search, ranking: Ranking) -> None:
    layered = replace(shared, run=replace(shared.run, paired_layers=(LayerPair(1, 2),)))
    text = report_of(layered, ranking, store=shared.with_store(), capture=shared.capture())
    assert "A store serves no losses between layers, which this objective has.\n" in text
    assert "it pays from" not in text
    assert not re.search(r"^  store ", text, re.MULTILINE)


def test_recomputation_and_smaller_micro_batches_need_less() -> None:
    found = {}
    one = search(64, "none")
    tries = one._choices.of_student(64, "none")
    for choice in chain.from_iterable((each.first, *each.others) for each in tries):
        if choice.layout == Layout(8, sequence=True):
            numbers = stage_numbers(STUDENT, choice.layout, choice.layers)
            need = memory_need(one.run, choice, DEVICE, numbers)
            found[choice.recompute, choice.micro_batch_size] = need.total
    assert found["full", 1] < found["selective", 1] < found["none", 1] < found["none", 2]

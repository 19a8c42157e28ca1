"""The walk of a step against the arithmetic of equal stages, where that is exact; its traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from matplotlib.image import imread

from megatron_distill.planning.device import load_device
from megatron_distill.planning.run import Choice, LayerPair
from megatron_distill.planning.schedule import (
    Operation,
    TimedTask,
    chrome_trace,
    interleaved_order,
    one_forward_one_backward,
    simulate,
    walk,
)
from megatron_distill.planning.search import Planned, planned
from megatron_distill.planning.step_time import alternating_seconds, student_stages
from megatron_distill.planning.timeline import draw_timeline
from megatron_distill.runtime.groups import Layout
from tests.unit.planning.shapes import STUDENT, TEACHER, run_of

DEVICE = load_device("h100-80gb")
# Without the heads' work on the last stage and the embedding's on the first, which memory limits,
# all stages are equal; a message takes no time.
FAST = DEVICE.network.model_copy(update={"gb_per_s": 1e9, "latency_us": 0.0})
EVEN = DEVICE.model_copy(
    update={"network": FAST, "node": FAST.model_copy(update={"devices": DEVICE.node.devices}),
            "factors": {"loss": 1e-9}, "memory_gb_per_s": 1e12, "kernel_us": 0.0}
)  # fmt: skip


def chosen(layout: Layout, ranks: int, **changes: object) -> Choice:
    fields = {
        "layout": layout,
        "ranks": ranks,
        "micro_batch_size": 1,
        "layers": (STUDENT.num_layers // layout.stages,) * layout.stages,
        "recompute": "full",
    }
    return Choice(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (Layout(8), 64),
        (Layout(8, 4), 256),
        (Layout(8, 4, 2, sequence=True), 256),
        (Layout(8, 8, 4), 512),
        (Layout(1, 32), 32),
        (Layout(8, 16), 4096),
    ],
)
def test_equal_stages_take_the_time_of_the_formula(layout: Layout, ranks: int) -> None:
    run = run_of(global_batch_size=32 * ranks // layout.model_ranks)
    one = planned(run, chosen(layout, ranks), EVEN)
    timeline = simulate(run, one.choice, EVEN, one.time)
    assert timeline.seconds == pytest.approx(one.time.total, rel=1e-6)
    assert sum(timeline.ranks) == ranks
    per_stage = ranks // layout.pipeline
    assert timeline.lane_ranks(0) == ("1 rank" if per_stage == 1 else f"{per_stage:,} ranks")


def walked(forward: list[float], backward: list[float], micro_batches: int) -> float:
    """The end of 1F1B over stages with these times, without messages."""
    stages = len(forward)
    lanes = []
    for stage in range(stages):
        lane = []
        for kind, number, _ in one_forward_one_backward(stage, stages, micro_batches):
            seconds = (forward if kind == "forward" else backward)[stage]
            neighbour = stage - 1 if kind == "forward" else stage + 1
            needed = Operation(kind, 0, number, neighbour)
            needs = ((needed, 0.0),) if 0 <= neighbour < stages else ()
            lane.append(TimedTask(Operation(kind, 0, number, stage), seconds, needs))
        lanes.append(lane)
    return max(one.end for one in walk(lanes))


@pytest.mark.parametrize(("slow", "mean", "most"), [(-1, 1e-9, 1e-9), (0, 2e-3, 0.04)])
def test_unequal_stages_take_the_longest_of_their_paths(
    slow: int, mean: float, most: float
) -> None:
    """Stages differ by a fifth, and one is half as slow again: the last, or the first."""
    random, errors = Random(0), []
    for _ in range(300):
        stages, micro_batches = random.choice([2, 3, 4, 8]), random.choice([1, 2, 3, 4, 8, 16])
        forward = [random.uniform(0.8, 1.2) for _ in range(stages)]
        backward = [2 * one * random.uniform(0.9, 1.1) for one in forward]
        forward[slow], backward[slow] = 1.8, 3.6
        found = alternating_seconds(forward, backward, micro_batches)
        errors.append(found / walked(forward, backward, micro_batches) - 1)
    assert max(errors) < 1e-9  # never above
    assert -min(errors) < most
    assert -sum(errors) / len(errors) < mean


@pytest.mark.parametrize("layout", [Layout(8), Layout(8, 4), Layout(8, 4, 2, sequence=True)])
@pytest.mark.parametrize("measures", ["losses", "gradients"])
def test_a_pass_that_measures_losses_goes_before_the_student_and_after_the_teacher(
    layout: Layout, measures: str
) -> None:
    own = layout.without_virtual_stages()
    run = run_of(teacher=TEACHER, global_batch_size=32, keeps_signals=True, measures=measures)
    choice = chosen(
        layout, layout.model_ranks, place="shared", teacher_layout=own,
        teacher_layers=(TEACHER.num_layers // own.pipeline,) * own.pipeline,
    )  # fmt: skip
    one = planned(run, choice, EVEN)
    assert one.time.balance > one.time.forward
    timeline = simulate(run, choice, EVEN, one.time)
    # A stage of the teacher that has ended begins the student's pass before the last stage ends.
    assert timeline.seconds == pytest.approx(
        one.time.total, rel=1e-6 if own.pipeline == 1 else 0.05
    )
    for lane in range(layout.pipeline):
        kinds = [done.operation.kind for done in timeline.done if done.lane == lane]
        assert kinds.count("measure") == kinds.count("forward") == kinds.count("backward")
        first, last = kinds.index("measure"), len(kinds) - 1 - kinds[::-1].index("measure")
        assert set(kinds[:first]) == {"teacher"}
        assert set(kinds[first : last + 1]) == {"measure"}


@pytest.mark.parametrize("virtual", [None, 2, 4])
def test_messages_between_stages_change_it_by_less_than_five_per_cent(virtual: int | None) -> None:
    run = run_of()
    one = planned(run, chosen(Layout(2, 4, virtual), 64), DEVICE)
    timeline = simulate(run, one.choice, DEVICE, one.time)
    assert timeline.seconds == pytest.approx(one.time.total, rel=0.05)


@pytest.mark.parametrize(
    ("layout", "batch"),
    [
        (Layout(2, stages, chunks), batch)
        for stages in (2, 4, 8)
        for chunks in (2, 4)
        for batch in (32, 256)
    ],
    ids=str,
)
def test_messages_of_several_chunks_are_waited_for_by_the_first_and_the_last_pass(
    layout: Layout, batch: int
) -> None:
    """However many micro-batches there are: the others' are sent beside work."""
    run = run_of(global_batch_size=batch)
    choice = chosen(layout, 64)
    one = planned(run, choice, DEVICE)
    assert simulate(run, choice, DEVICE, one.time).seconds == pytest.approx(
        one.time.total, rel=2e-3
    )
    message = student_stages(run, choice, DEVICE)[0].message
    assert 0 < 2 * (layout.stages - 1) * message <= one.time.pipeline


def with_teacher(layout: Layout, ranks: int, **changes: object) -> Planned:
    run = run_of(teacher=TEACHER)
    own = changes.pop("teacher_layout", layout.without_virtual_stages())
    choice = chosen(
        layout,
        ranks,
        teacher_layout=own,
        teacher_layers=(TEACHER.num_layers // own.pipeline,) * own.pipeline,
        **{"place": "shared", **changes},
    )
    return planned(run, choice, EVEN)


@pytest.mark.parametrize("layout", [Layout(8), Layout(8, 4), Layout(8, 4, 2)])
def test_a_teacher_on_shared_ranks_adds_its_pass(layout: Layout) -> None:
    one = with_teacher(layout, 64)
    timeline = simulate(run_of(teacher=TEACHER), one.choice, EVEN, one.time)
    assert timeline.seconds == pytest.approx(one.time.total, rel=0.02)
    assert any(done.operation.kind == "teacher" for done in timeline.done)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("own", [Layout(8), Layout(8, 2)])
def test_a_teacher_ahead_on_its_own_ranks_hides_the_shorter_side(ahead: int, own: Layout) -> None:
    run = run_of(teacher=TEACHER, steps_ahead=ahead)
    base = with_teacher(Layout(8), 64, place="own ranks", teacher_layout=own, teacher_ranks=128)
    one = planned(run, base.choice, EVEN)
    timeline = simulate(run, one.choice, EVEN, one.time)
    assert timeline.seconds == pytest.approx(one.time.total, rel=0.05)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_deep_teacher_with_few_answers_is_waited_for_once_in_so_many_steps(ahead: int) -> None:
    """Eight stages with one micro-batch: it answers `ahead` + 1 steps, then waits for the student.

    So steps are of unequal length, and their mean is the one that is planned.
    """
    run = run_of(teacher=TEACHER, steps_ahead=ahead, global_batch_size=8)
    base = with_teacher(
        Layout(8), 64, place="own ranks", teacher_layout=Layout(1, 8), teacher_ranks=64
    )
    one = planned(run, base.choice, EVEN)
    timeline = simulate(run, one.choice, EVEN, one.time)
    assert timeline.steps == ahead + 1
    assert timeline.seconds == pytest.approx(one.time.total, rel=0.02)
    pace = max(end.end - end.start for end in timeline.done if end.operation.kind == "teacher")
    assert one.time.total > 1.5 * pace


@pytest.mark.parametrize("own", [Layout(8), Layout(8, 4)], ids=str)
def test_a_teacher_in_its_own_layout_has_its_bubble(own: Layout) -> None:
    one = with_teacher(Layout(8, 2), 64, teacher_layout=own)
    timeline = simulate(run_of(teacher=TEACHER), one.choice, EVEN, one.time)
    assert timeline.seconds == pytest.approx(one.time.total, rel=1e-3)


# Every layer has a loss, so that all stages are equal; the first with the teacher's last ones.
EACH = tuple(LayerPair(layer, 81 - 5 * layer // 2) for layer in range(1, 33))


@pytest.mark.parametrize(
    "layout", [Layout(8), Layout(8, 4), Layout(8, 4, 2, sequence=True)], ids=str
)
def test_equal_losses_between_layers_keep_the_walk_and_the_formula_together(
    layout: Layout,
) -> None:
    """A stage waits for layers of the teacher's last stage, so that no passes overlap."""
    link = EVEN.network.model_copy(update={"gb_per_s": 20.0})
    device = EVEN.model_copy(update={"network": link, "node": link})
    choice = replace(with_teacher(layout, 64).choice, recompute="none")
    times = []
    for pairs in ((), EACH):
        run = run_of(teacher=TEACHER, paired_layers=pairs, projector=(4096, 8192))
        one = planned(run, choice, device)
        timeline = simulate(run, choice, device, one.time)
        # Hidden states between stages are an approximation, and so is the teacher's bubble alone.
        rel = 1e-6 if layout.pipeline == 1 else 0.02 if pairs else 0.05
        assert timeline.seconds == pytest.approx(one.time.total, rel=rel)
        times.append(one.time)
    before, after = times
    assert after.features > 0.1 * after.forward
    moved = after.teacher - before.teacher
    assert moved == 0.0 if layout.pipeline == 1 else moved > 0.005 * after.total


@pytest.mark.parametrize("own", [Layout(8), Layout(8, 2)], ids=str)
@pytest.mark.parametrize("pipeline", [1, 4])
def test_a_stage_with_a_pair_waits_for_its_layer(own: Layout, pipeline: int) -> None:
    """Without a step ahead the student's first stage waits, which waited for no answer before."""
    base = with_teacher(
        Layout(8, pipeline), 64, place="own ranks", teacher_layout=own, teacher_ranks=128
    )
    waits, walks = [], []
    for pairs in ((), (LayerPair(1, 2),)):
        run = run_of(teacher=TEACHER, paired_layers=pairs, steps_ahead=0, global_batch_size=16)
        one = planned(run, base.choice, EVEN)
        waits.append(one.time.waiting)
        walks.append(simulate(run, one.choice, EVEN, one.time).seconds)
    longer = waits[1] - waits[0]
    assert walks[1] - walks[0] == pytest.approx(longer, rel=0.05, abs=1e-6)
    assert (longer > 0.01 * walks[0]) == (pipeline > 1), waits


@pytest.mark.parametrize("place", ["none", "shared", "own ranks"])
def test_slow_reading_is_a_lane_that_every_step_waits_for(place: str) -> None:
    run = run_of(global_batch_size=64, teacher=None if place == "none" else TEACHER)
    layout, own = Layout(8, 2), Layout(8, 4)
    more: dict[str, object] = {}
    if place != "none":
        ranks = 64 if place == "own ranks" else 0
        kept = own if ranks else layout
        layers = (TEACHER.num_layers // kept.pipeline,) * kept.pipeline
        more = {"teacher_layout": kept, "teacher_layers": layers, "teacher_ranks": ranks}
    choice = chosen(layout, 64, place=place, **more)
    quick = planned(run, choice, EVEN)
    slow = replace(run, reading_seconds=1.5 * quick.time.total / run.tokens)
    one = planned(slow, choice, EVEN)
    assert one.time.data == pytest.approx(0.5 * quick.time.total)
    assert "reading" not in simulate(run, choice, EVEN, quick.time).names
    timeline = simulate(slow, choice, EVEN, one.time)
    assert timeline.seconds == pytest.approx(one.time.total, rel=1e-6)
    assert timeline.names[-1] == "reading"
    reading = len(timeline.names) - 1
    assert timeline.idle_share(reading) == pytest.approx(0, abs=1e-6)
    assert timeline.lane_ranks(reading) == "beside a rank"
    # Stages wait for the samples, and in their bubble.
    assert timeline.idle_share(0) >= 0.999 * one.time.data / one.time.total
    assert sum(timeline.ranks) == choice.devices


def test_an_order_has_every_pass_once_and_no_backward_before_its_forward() -> None:
    for rank in range(4):
        for order in (one_forward_one_backward(rank, 4, 8), interleaved_order(rank, 4, 3, 8)):
            assert len(set(order)) == len(order) == 2 * 8 * (3 if len(order) > 16 else 1)
            for index, (kind, micro_batch, chunk) in enumerate(order):
                if kind == "backward":
                    assert ("forward", micro_batch, chunk) in order[:index]


def test_lanes_that_wait_for_each_other_are_an_error() -> None:
    first, second = Operation("forward", 0, 0, 0), Operation("forward", 0, 0, 1)
    lanes = [[TimedTask(first, 1.0, ((second, 0.0),))], [TimedTask(second, 1.0, ((first, 0.0),))]]
    with pytest.raises(ValueError, match="wait for one another"):
        walk(lanes)


def test_a_trace_has_a_thread_per_stage_and_all_operations_in_microseconds() -> None:
    one = planned(run_of(), chosen(Layout(8, 4), 64), EVEN)
    timeline = simulate(run_of(), one.choice, EVEN, one.time)
    events = chrome_trace(timeline)["traceEvents"]
    assert sum(event["ph"] == "M" for event in events) == 4
    passes = [event for event in events if event["ph"] == "X"]
    assert len(passes) == 4 * (2 * one.choice.micro_batches(run_of()) + 1)
    assert max(event["ts"] + event["dur"] for event in passes) == pytest.approx(
        timeline.seconds * 1e6
    )


def test_the_first_stage_waits_for_its_share_of_the_bubble() -> None:
    run = run_of()
    one = planned(run, replace(chosen(Layout(8, 4), 64), layers=(8, 8, 8, 8)), EVEN)
    timeline = simulate(run, one.choice, EVEN, one.time)
    micro_batches = one.choice.micro_batches(run)
    busy = timeline.seconds - one.time.optimizer - one.time.data_parallel
    expected = 3 / (micro_batches + 3) * busy / timeline.seconds
    assert timeline.idle_share(0) == pytest.approx(expected, rel=1e-3)


def test_stages_on_several_nodes_send_over_the_network() -> None:
    inside, between = (
        student_stages(run_of(), chosen(Layout(1, 2), ranks), DEVICE)[0].message
        for ranks in (8, 16)
    )
    assert between > 5 * inside


@pytest.mark.parametrize("slow", [1.0, 1.3])
@pytest.mark.parametrize("layout", [Layout(8, 4), Layout(8, 4, 2)], ids=str)
@pytest.mark.parametrize("samples", [16, pytest.param(320, marks=pytest.mark.slow)])
def test_a_row_is_white_for_the_share_in_which_its_stage_waits(
    samples: int, layout: Layout, slow: float, tmp_path: Path
) -> None:
    """Of many passes bars are narrow. slow: reading over the rest of the step; above 1 a row."""
    run = run_of(global_batch_size=samples)
    seconds = planned(run, chosen(layout, 64), EVEN).time.total
    run = replace(run, reading_seconds=slow * seconds / run.tokens if slow > 1 else 0.0)
    one = planned(run, chosen(layout, 64), EVEN)
    timeline = simulate(run, one.choice, EVEN, one.time)
    picture = draw_timeline(timeline, tmp_path / "timeline.png", title="a step")
    colours = imread(picture)[..., :3]
    height, width, _ = colours.shape
    inches, rows = height / 150, len(timeline.names)
    below, tall = 0.62 * height / inches, height * (1 - 1.42 / inches)
    for lane in range(rows):
        # Above the numbers on the passes; the axis is from rows - 0.4 at the bottom to -0.6.
        from_below = below + tall * (rows - 0.4 - (lane - 0.35)) / (rows + 0.2)
        row = colours[round(height - from_below), round(0.11 * width) + 2 : round(0.91 * width) - 2]
        white = (row > 0.99).all(axis=1).mean()
        assert white == pytest.approx(timeline.idle_share(lane), abs=0.04)
        pale = (row > 0.8).all(axis=1).mean()  # with the edges of bars
        assert pale == pytest.approx(timeline.idle_share(lane), abs=0.1)
        kinds = {tuple((10 * colour).round()) for colour in row}
        if not timeline.ranks[lane]:
            assert slow > 1
            assert kinds >= {(8.0, 5.0, 7.0)}  # the colour of reading
            continue
        assert white > (0.1 if samples == 16 else 0.0)
        assert len(kinds) >= 3  # waiting, forward and backward

"""Parts of a rank's memory that no recorded step shows, and several teachers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_distill.planning.activations import activation_bytes, forward_bytes
from megatron_distill.planning.device import DeviceProfile, load_device
from megatron_distill.planning.memory import MemoryNeed, memory_need
from megatron_distill.planning.parameters import fullest_state, stage_numbers
from megatron_distill.planning.run import Choice, LayerPair, PlannedRun, SharedTeacher
from megatron_distill.planning.schedule import interleaved_order
from megatron_distill.planning.step_time import step_time, teacher_seconds
from megatron_distill.runtime.groups import Layout
from tests.unit.planning.shapes import choice_of, llama, run_of

DEVICE = load_device("h100-80gb")


def test_the_forward_pass_of_a_wide_teacher_is_in_the_peak() -> None:
    student = llama(2, 256, 512, 4, 4, vocab_size=4096)
    teacher = llama(8, 8192, 28_672, 64, 8, vocab_size=4096)
    run, layout = run_of(student, teacher=teacher), Layout()
    alone = Choice(layout=layout, ranks=1, micro_batch_size=1, layers=(2,), recompute="full")
    shared = replace(alone, place="shared", teacher_layout=layout, teacher_layers=(8,))
    numbers = stage_numbers(student, layout, (2,))
    without, need = (memory_need(run, choice, DEVICE, numbers) for choice in (alone, shared))
    alive = 8192 * forward_bytes(teacher, layout, 2, is_fused=True)
    answers = 8192 * 8192 * 2
    assert without.transient < alive / 2
    assert need.transient == pytest.approx(1.05 * (alive + answers))
    assert need.activations == without.activations


def test_every_rank_has_the_projectors_with_gradients_and_two_moments() -> None:
    layout, pairs = Layout(2, 2), (LayerPair(1, 2), LayerPair(4, 8), LayerPair(4, 8, "cosine"))
    run = run_of(SMALL, teacher=MATH, paired_layers=pairs, sequence_length=128)
    choice = choice_of((2, 2), (4, 4), layout)
    numbers = stage_numbers(SMALL, layout, (2, 2))
    before, after = (
        memory_need(replace(run, projector=sizes), choice, DEVICE, numbers)
        for sizes in ((), (256, 1024))
    )
    count = 2 * (256 * 1024 + 1024) * 4
    more = {name: after.parts[name] - before.parts[name] for name in after.parts}
    assert {name: value for name, value in more.items() if value} == {
        "weights": count, "gradients": count, "optimizer": 2 * count
    }  # fmt: skip


def test_tensor_ranks_divide_a_forward_pass_but_for_the_input_of_a_layer() -> None:
    shape = llama(8, 1024, 4096, 16, 16)
    one, two, split = (
        forward_bytes(shape, layout, 2, is_fused=True)
        for layout in (Layout(), Layout(2), Layout(2, sequence=True))
    )
    hidden, inner = 2 * 1024, 2 * 3 * 4096
    assert one == 4 * hidden + inner
    assert two == one - inner / 2
    assert split == two - hidden  # half of four, and the gathered input


MATH, CODE = llama(8, 1024, 4096, 16, 16), llama(4, 512, 2048, 8, 8)
SMALL = llama(4, 256, 512, 4, 4)
TWO = Layout(pipeline=2)
STAGED = choice_of((2, 2), (4, 4), TWO, ranks=4)


def both(share: float, key: str = "rests", *values: bool) -> list[SharedTeacher]:
    """Two teachers with these values of a key, false if none are given."""
    shapes = zip(("math", "code"), (MATH, CODE), values or (False, False), strict=True)
    return [SharedTeacher(name, shape, share, **{key: value}) for name, shape, value in shapes]


def taught(*several: SharedTeacher, **changes: object) -> PlannedRun:
    return run_of(SMALL, teacher=MATH, several=several, **changes)


@pytest.mark.parametrize(("size", "math", "code"), [(1, 0.75, 0.25), (2, 0.9375, 0.4375)])
def test_several_teachers_add_their_weights_and_the_time_of_their_samples(
    size: int, math: float, code: float
) -> None:
    numbers = stage_numbers(SMALL, TWO, (2, 2))
    both = taught(SharedTeacher("math", MATH, 0.75), SharedTeacher("code", CODE, 0.25))
    runs = (run_of(SMALL, teacher=MATH), run_of(SMALL, teacher=CODE), both)
    choices = [
        choice_of((2, 2), layers, TWO, ranks=4, micro_batch_size=size)
        for layers in ((4, 4), (2, 2), (4, 4))
    ]
    pairs = list(zip(runs, choices, strict=True))
    needs = [memory_need(run, choice, DEVICE, numbers) for run, choice in pairs]
    assert needs[2].teacher == needs[0].teacher + needs[1].teacher
    answers = math * needs[0].hidden_states + code * needs[1].hidden_states
    assert needs[2].hidden_states == pytest.approx(answers)
    works = [teacher_seconds(run, choice, DEVICE)[0] for run, choice in pairs]
    assert works[2] == pytest.approx(math * works[0] + code * works[1])
    heads = [step_time(run, choice, DEVICE, numbers).heads for run, choice in pairs]
    assert min(heads[:2]) < heads[2] < sum(heads[:2])


def test_weights_that_rest_in_host_memory_need_it_in_the_forward_passes_alone() -> None:
    layout = Layout()
    numbers = stage_numbers(SMALL, layout, (4,))
    choice = choice_of((4,), (8,))
    bytes_of = {
        shape: 2 * stage_numbers(shape, layout, (shape.num_layers,))[0].total
        for shape in (MATH, CODE)
    }
    heads = {shape: 2 * shape.vocab_size * shape.hidden_size for shape in bytes_of}

    def need(*rests: bool, device: DeviceProfile = DEVICE) -> MemoryNeed:
        return memory_need(taught(*both(1.0, "rests", *rests)), choice, device, numbers)

    stays, one, rest = need(False, False), need(True, False), need(True, True)
    assert stays.teacher == sum(bytes_of.values())
    assert one.teacher == heads[MATH] + bytes_of[CODE]
    assert rest.teacher == sum(heads.values())
    # In a forward pass the copies of a teacher and of the next are there, and no activations.
    alive = 8192 * forward_bytes(MATH, layout, 2, is_fused=True)
    for found in (one, rest):
        copies = stays.teacher - found.teacher
        assert found.buffers + found.activations + found.loss_chunk >= alive + copies
        assert found.hidden_states > stays.hidden_states  # those of a step wait
    cpu = DEVICE.model_copy(update={"kind": "cpu"})
    assert need(True, True, device=cpu) == need(False, False, device=cpu)


def test_replicas_that_run_teachers_together_run_them_where_one_needs_them() -> None:
    def seconds(*shards: bool) -> float:
        return teacher_seconds(taught(*both(0.5, "shards", *shards)), STAGED, DEVICE)[0]

    alone, one, joint = seconds(False, False), seconds(False, True), seconds(True, True)
    # Two replicas: three of four micro-batches need each teacher that they run together.
    assert joint == pytest.approx(1.5 * alone)
    assert alone < one < joint


def test_each_of_several_teachers_has_whole_or_divided_weights() -> None:
    layout = Layout()
    numbers = stage_numbers(SMALL, layout, (4,))
    choice = choice_of((4,), (8,), ranks=8)

    def weights(*shards: bool) -> float:
        return memory_need(taught(*both(0.5, "shards", *shards)), choice, DEVICE, numbers).teacher

    spared = [weights(False, False) - weights(*shards) for shards in ((True, False), (False, True))]
    assert min(spared) > 0
    assert weights(True, True) == pytest.approx(weights(False, False) - sum(spared))


def test_a_mean_of_teachers_has_the_logits_of_all() -> None:
    numbers = stage_numbers(SMALL, TWO, (2, 2))
    one, mean = (
        memory_need(taught(*both(1.0), mixed=mixed), STAGED, DEVICE, numbers) for mixed in (1, 2)
    )
    assert one.loss_chunk < mean.loss_chunk < 2 * one.loss_chunk


@pytest.mark.parametrize(("offloads", "held"), [(False, 8), (True, 2)])
def test_signals_that_the_student_reads_twice_wait_for_every_micro_batch(
    offloads: bool, held: int
) -> None:
    layout = Layout()
    choice = choice_of((4,), (8,))
    within, kept = (
        memory_need(
            run_of(
                SMALL, teacher=MATH, global_batch_size=8,
                keeps_signals=twice, offloads_hidden=offloads,
            ),
            choice, DEVICE, stage_numbers(SMALL, layout, (4,)),
        ).hidden_states
        for twice in (False, True)
    )  # fmt: skip
    assert kept == held * within > 0


@pytest.mark.parametrize(
    ("layout", "changes", "held"),
    [
        (Layout(2), {}, 2),  # two replicas of two stages each run a unit for two of the student
        (Layout(2), {"global_batch_size": 2}, 1),
        (Layout(2), {"keeps_signals": True}, 8),
        (Layout(2, 2), {"global_batch_size": 8}, 8),
    ],
)
@pytest.mark.parametrize(("sent_ids", "bytes_of_token"), [(None, 2 * 1024), (64, 8 * 64 + 16)])
def test_answers_from_another_layout_wait_for_a_wave_where_they_are_taken_in_the_step(
    layout: Layout, changes: dict[str, Any], held: int, sent_ids: int | None, bytes_of_token: int
) -> None:
    run = run_of(
        SMALL, **{"teacher": MATH, "global_batch_size": 16, "sent_ids": sent_ids, **changes}
    )
    layers = (4 // layout.pipeline,) * layout.pipeline
    choice = choice_of(layers, (4, 4), layout, TWO, ranks=4)
    need = memory_need(run, choice, DEVICE, stage_numbers(SMALL, layout, layers))
    assert need.hidden_states == held * 8192 * bytes_of_token


def test_a_wave_counts_whole_for_each_of_several_teachers() -> None:
    both = SharedTeacher("math", MATH, 0.5), SharedTeacher("code", CODE, 0.25)
    choice = choice_of((4,), (4, 4), Layout(2), TWO, ranks=4)
    run = taught(*both, global_batch_size=16)
    need = memory_need(run, choice, DEVICE, stage_numbers(SMALL, Layout(2), (4,)))
    assert need.hidden_states == 2 * 8192 * 2 * (1024 + 512)


def test_fp8_keeps_copies_of_the_layers_weights_also_of_those_at_rest() -> None:
    numbers = stage_numbers(SMALL, TWO, (2, 2))
    layers = {
        shape: 2 * stage_numbers(shape, TWO, own)[0].largest_layer
        for shape, own in ((SMALL, (2, 2)), (MATH, (4, 4)))
    }
    layers[MATH] *= 2

    def need(**changes: object) -> MemoryNeed:
        return memory_need(run_of(SMALL, teacher=MATH, **changes), STAGED, DEVICE, numbers)

    without, student, teacher = need(), need(student_fp8=True), need(teacher_fp8=True)
    assert student.weights - without.weights == 2 * layers[SMALL]
    assert teacher.teacher - without.teacher == layers[MATH]
    resting = need(teacher_fp8=True, rests=True)
    assert resting.teacher - need(rests=True).teacher == layers[MATH]


@pytest.mark.parametrize(("hidden", "layout"), [(64, Layout(2)), (72, Layout(2)), (72, TWO)])
def test_the_fullest_state_of_the_optimizer_has_the_most_of_equal_parts(
    hidden: int, layout: Layout
) -> None:
    """Against a list with an entry for each number of a buffer."""
    shape = llama(2, hidden, 3 * hidden, 4, 4, vocab_size=384)
    ranks = 6 * layout.model_ranks
    numbers = stage_numbers(shape, layout, (2 // layout.pipeline,) * layout.pipeline)[0]
    buffer: list[int] = []  # the tensor of each number, or 0
    for tensor, size in enumerate(reversed(numbers.buckets[0][0].sizes), start=1):
        buffer += [0] * (-len(buffer) % 64) + [tensor] * size
    buffer += [0] * (-len(buffer) % 384)  # of 128 numbers and six ranks
    share = len(buffer) // 6
    parts = [buffer[begin : begin + share] for begin in range(0, len(buffer), share)]
    states = [8 * sum(map(bool, part)) + 4 * len(set(part) - {0}) for part in parts]
    assert numbers.buckets[0][0].held(6) == len(buffer)
    found = fullest_state(numbers, layout, ranks=ranks, state=8, is_distributed=True)
    assert found == max(states) > 8 * numbers.total // 6


@pytest.mark.parametrize("virtual", [2, 3, 4])
@pytest.mark.parametrize("stage", range(4))
def test_chunks_that_wait_for_their_backward_pass_are_those_of_the_order(
    virtual: int, stage: int
) -> None:
    layers = (24 // (4 * virtual),) * (4 * virtual)
    run = run_of(llama(24, 256, 512, 4, 4), global_batch_size=8)
    choice = Choice(layout=Layout(1, 4, virtual), ranks=4, micro_batch_size=1, layers=layers)
    # The first stage holds the embeddings with its first chunk; of these one may be missing.
    first, other = (activation_bytes(run, choice, one, is_fused=True).one for one in (stage, 3))
    alive = most = 0.0
    for kind, _, chunk in interleaved_order(stage, 4, virtual, 8):
        size = other if chunk else first
        alive += size if kind == "forward" else -size
        most = max(most, alive)
    found = activation_bytes(run, choice, stage, is_fused=True)
    assert found.in_flight == pytest.approx(most, rel=0.0 if stage else 0.01)

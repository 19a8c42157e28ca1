"""Bytes of a plan's messages: the answers of a teacher against the run's own routes, and the rest
against counts by hand."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from megatron_distill.models.architecture import MixtureOfExperts
from megatron_distill.planning.answers import answer_seconds, exchange_seconds
from megatron_distill.planning.device import load_device
from megatron_distill.planning.links import Link
from megatron_distill.planning.losses.layer_messages import moved_layers
from megatron_distill.planning.parameters import stage_numbers
from megatron_distill.planning.run import Choice, LayerPair
from megatron_distill.planning.traffic import StepBytes, stage_bytes, step_bytes
from megatron_distill.runtime.layout import Layout
from megatron_distill.runtime.roles import Role, Roles
from megatron_distill.train.assemble.answers.plan import answer_plan, sent_records
from megatron_distill.train.reports.planned_run import configured_choice, open_shapes, planned_run
from tests.support.sample_configs import TAUGHT, load_tree
from tests.unit.planning.shapes import llama, run_of

LINK = Link(devices=64, gb_per_s=1.0, efficiency=1.0, latency_us=0.0)
BYTES_PER_NS = load_device("h100-80gb").model_copy(update={"node": LINK, "network": LINK})
SENT = ("teacher.transfer={what: top_k, k: 8}", "objective.terms=[{top_k: 4}]")


# Two losses of one layer of the teacher, maps, and on one layer of the student states beside maps.
FEATURES = (
    "objective.features=[{student: 1, teacher: 2}, {student: 2, teacher: 2, loss: cosine}, "
    "{student: 2, teacher: 1, loss: attention}, {match: last, loss: attention}]",
)


@pytest.mark.parametrize(
    "what",
    [(), SENT, FEATURES, (*SENT, *FEATURES)],
    ids=["hidden states", "top-k", "with layers", "top-k and layers"],
)
@pytest.mark.parametrize(
    ("students", "teachers", "changes"),
    [
        (1, 1, ()),
        (2, 3, ()),
        (2, 1, ("parallel.tensor=2", "teacher.parallel={tensor: 1}")),
        (2, 1, ("parallel.tensor=2", "parallel.sequence=true", "teacher.parallel={tensor: 1}")),
        (4, 2, ("parallel.pipeline=2", "parallel.context=2", "teacher.parallel={tensor: 2}")),
        # On the student's ranks, in a layout of its own; rows that stay count as well.
        (2, 0, ("parallel.tensor=2", "parallel.sequence=true", "teacher.parallel={tensor: 1}")),
        (4, 0, ("parallel.pipeline=2", "parallel.context=2", "teacher.parallel={tensor: 2}")),
    ],
)
def test_answers_have_the_bytes_of_the_routes(
    what: tuple[str, ...], students: int, teachers: int, changes: tuple[str, ...], tmp_path: Path
) -> None:
    import torch

    own = f"teacher.ranks={teachers or 'null'}"
    given = (own, "train.global_batch_size=12", *changes, *what)
    config = load_tree(tmp_path, TAUGHT, "train.precision=bf16", *given)
    shapes = open_shapes(config)
    run = planned_run(config, shapes)
    ranks = students + teachers
    choice = configured_choice(config, run, ranks=ranks, teachers=teachers)
    roles = Roles(ranks, (("teacher", teachers),) if teachers else ())
    (role,) = roles.teachers or [Role("teacher", 0, ranks)]
    plan = answer_plan(
        config, role, roles, shapes["teacher"], shapes["student"], torch.bfloat16,
        sent_records(config, "teacher"),
    )  # fmt: skip
    numbers = stage_numbers(run.student, choice.layout, choice.layers)
    most = 0
    for stage in range(choice.layout.pipeline):
        rank = plan.student.rank(stage=stage)
        received = sum(count for (_, to), count in plan.step_bytes().items() if to == rank)
        assert stage_bytes(run, choice, numbers[stage], stage).answers == received
        has_loss = stage == choice.layout.pipeline - 1 or what[-1:] == FEATURES
        assert (received > 0) == has_loss
        # Messages of both places take the time of these bytes.
        micro_batches = choice.micro_batches(run)
        if teachers:
            message = answer_seconds(run, choice, BYTES_PER_NS, stage)
            assert message * micro_batches * 1e9 == pytest.approx(received)
        most = max(most, received)
    if not teachers:
        assert exchange_seconds(run, choice, BYTES_PER_NS) * 1e9 == pytest.approx(most)


@pytest.mark.parametrize("layout", [Layout(2, 2, sequence=True), Layout(2, 4, context=2)], ids=str)
def test_layers_from_other_stages_have_the_bytes_of_the_routes(layout: Layout) -> None:
    from megatron_distill.losses import FeaturePair
    from megatron_distill.models.pipeline_stages import ranks_of_layers
    from megatron_distill.train.teachers.attention_heads import sizes_per_position
    from megatron_distill.train.teachers.live import routes

    teacher = llama(8, 512, 1024, 8, 4, vocab_size=1024)
    pairs = [(1, 1, "mse"), (1, 8, "cosine"), (2, 8, "mse"), (4, 2, "attention"), (3, 5, "mse")]
    run = replace(RUN, teacher=teacher, paired_layers=tuple(LayerPair(*one) for one in pairs))
    of_teacher = (8 // layout.pipeline,) * layout.pipeline
    choice = choice_of(
        layout, layout.model_ranks, place="shared", teacher_layout=layout, teacher_layers=of_teacher
    )
    sizes = sizes_per_position(teacher, layout.tensor)
    local = 1024 // layout.context
    tokens = {"output": local // (2 if layout.sequence else 1), "query": local, "key": 1024}
    expected = [0] * layout.pipeline
    for way in routes(
        [FeaturePair(*one, 1.0) for one in pairs],
        of_student=ranks_of_layers(choice.layers, layout.pipeline),
        of_teacher=ranks_of_layers(of_teacher, layout.pipeline),
    ):
        kind, _ = way.feature
        if way.source != way.destination:
            expected[way.destination] += 2 * tokens[kind] * prod(sizes[kind])
    assert moved_layers(run, choice) == tuple(expected)
    assert sum(count > 0 for count in expected) > 1
    numbers = stage_numbers(SHAPE, layout, choice.layers)
    for stage, count in enumerate(expected):
        before, after = (
            stage_bytes(one, choice, numbers[stage], stage).teacher
            for one in (replace(run, paired_layers=()), run)
        )
        assert after - before == 8 * count


def test_every_rank_sums_the_gradients_of_the_projectors() -> None:
    pairs = (
        LayerPair(1, 1),
        LayerPair(1, 1, "cosine"),
        LayerPair(4, 2),
        LayerPair(2, 2, "attention"),
    )
    run = replace(RUN, teacher=SHAPE, paired_layers=pairs)
    numbers = 256 * 512 + 512 + 512 * 256 + 256
    layout = Layout(2, 2)
    choice = choice_of(layout, 8, place="shared", teacher_layout=layout, teacher_layers=(2, 2))
    before, apart, shared = (
        step_bytes(replace(run, projector=sizes, shares_projector=are_shared), choice)
        for sizes, are_shared in (((), False), ((256, 512, 256), False), ((256, 512, 256), True))
    )
    # Two projectors, in three groups of two ranks.
    assert apart.data_parallel - before.data_parallel == 3 * 2 * numbers * 4
    assert shared.data_parallel - before.data_parallel == 3 * numbers * 4
    assert replace(apart, data_parallel=0.0) == replace(before, data_parallel=0.0)


SHAPE = llama(4, 256, 512, 4, 2, vocab_size=1024)
RUN = run_of(SHAPE, sequence_length=1024, global_batch_size=8)
STATES = 1024 * 256 * 2  # of a micro-batch, in bf16


def choice_of(layout: Layout, ranks: int, **changes: object) -> Choice:
    layers = (SHAPE.num_layers // layout.stages,) * layout.stages
    choice = Choice(layout=layout, ranks=ranks, micro_batch_size=1, layers=layers)
    return replace(choice, **changes)  # type: ignore[arg-type]


def test_one_rank_receives_nothing() -> None:
    assert step_bytes(RUN, choice_of(Layout(), 1)) == StepBytes()


def test_replicas_exchange_gradients_in_fp32_and_weights_in_bf16() -> None:
    (numbers,) = stage_numbers(SHAPE, Layout(), (4,))
    found = step_bytes(RUN, choice_of(Layout(), 4))
    assert found == StepBytes(data_parallel=numbers.total * 6 * 3 / 4)
    plain = step_bytes(replace(RUN, is_distributed=False), choice_of(Layout(), 4))
    assert plain == StepBytes(data_parallel=numbers.total * 8 * 3 / 4)


def test_tensor_ranks_exchange_the_hidden_states_of_every_layer() -> None:
    half, statistics = STATES / 2, 80 * 1024
    # Four sums forward and backward are eight halves twice; the heads add one sum's half, and the
    # embedding's sum, or its scatter and the gather of its gradient, two.
    whole = step_bytes(RUN, choice_of(Layout(2), 2))
    assert whole == StepBytes(tensor=8 * (4 * 8 * half + 3 * half + statistics))
    split = step_bytes(RUN, choice_of(Layout(2, sequence=True), 2))
    assert split == StepBytes(tensor=8 * (4 * 10 * half + 4 * half + statistics))
    full = step_bytes(RUN, choice_of(Layout(2), 2, recompute="full"))
    assert full == StepBytes(tensor=8 * (4 * 12 * half + 3 * half + statistics))


def test_context_ranks_exchange_keys_and_values() -> None:
    keys = 2 * 128 * 2 * 512  # of half the sequence, as many as the other half has
    (numbers,) = stage_numbers(SHAPE, Layout(context=2), (4,))
    found = step_bytes(RUN, choice_of(Layout(context=2), 2))
    assert found == StepBytes(context=8 * 4 * 3 * keys, data_parallel=numbers.total * 6 / 2)


def test_expert_ranks_exchange_the_rows_of_their_experts() -> None:
    """Of layers with experts alone, there and back in each pass; half goes to the other rank."""
    shape = replace(SHAPE, moe=MixtureOfExperts(4, 2, 128, dense_layers=(0,)))
    run, rows = replace(RUN, student=shape), 2 * STATES
    (numbers,) = stage_numbers(shape, Layout(expert=2), (4,))
    found = step_bytes(run, choice_of(Layout(expert=2), 2))
    # Each rank has experts of its own, so that the replicas exchange the rest alone.
    assert found == StepBytes(expert=4 * 3 * 2 * 2 * rows / 2, data_parallel=numbers.dense * 6 / 2)
    full = step_bytes(run, choice_of(Layout(expert=2), 2, recompute="full"))
    assert full.expert == 1.5 * found.expert
    # Tensor ranks divide the tokens, and two ranks have the same experts.
    split = Layout(2, expert=2, sequence=True)
    (numbers,) = stage_numbers(shape, split, (4,))
    divided = step_bytes(run, choice_of(split, 4))
    assert divided.expert == found.expert / 2
    assert divided.data_parallel == numbers.total * 6 / 2
    assert numbers.experts > 0


@pytest.mark.parametrize(
    ("layout", "messages"),
    [(Layout(pipeline=2), 1), (Layout(pipeline=4), 2), (Layout(1, 2, 2), 3)],
    ids=str,
)
def test_stages_send_hidden_states_and_their_gradients(layout: Layout, messages: int) -> None:
    found = step_bytes(RUN, choice_of(layout, layout.pipeline))
    assert found == StepBytes(pipeline=8 * messages * STATES)


def test_a_teacher_on_the_same_ranks_has_the_messages_of_its_forward_pass() -> None:
    teacher = llama(2, 512, 1024, 4, 2, vocab_size=1024)
    layout = Layout(2)
    run = replace(RUN, teacher=teacher)
    choice = choice_of(layout, 2, place="shared", teacher_layout=layout, teacher_layers=(2,))
    found = step_bytes(run, choice)
    assert found.teacher == 8 * (2 * 4 + 2) * STATES  # of two layers, and of the embedding
    assert found.answers == 0
    assert replace(found, teacher=0.0) == step_bytes(RUN, choice_of(layout, 2))

"""The times of distillation against counted work, on a device whose rates have no loss.

A product takes its FLOPs over the peak there, and nothing else takes time.
"""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from megatron_distill.models.flops import forward_flops_per_token, head_flops_per_token
from megatron_distill.planning.batches import batch_seconds, reading_limit
from megatron_distill.planning.device import DeviceProfile, load_device, reading_seconds
from megatron_distill.planning.links import Link
from megatron_distill.planning.losses.layer_passes import pair_work
from megatron_distill.planning.parameters import stage_numbers
from megatron_distill.planning.run import Choice, ChunkLoss, LayerPair, LossTerm, PlannedRun
from megatron_distill.planning.search import Search
from megatron_distill.planning.step_time import (
    StepTime,
    phase_seconds,
    step_time,
    teacher_seconds,
    teacher_stages,
)
from megatron_distill.runtime.layout import Layout
from tests.guards.source_tree import ROOT
from tests.unit.planning.shapes import choice_of, llama, run_of

PEAK = 1e12
FAST = Link(devices=64, gb_per_s=1e15, efficiency=1.0, latency_us=0.0)
DEVICE = load_device("h100-80gb").model_copy(
    update={
        "peak_tflops": {"bf16": PEAK / 1e12, "fp32": PEAK / 1e12},
        "product_efficiency": ((1.0, 1.0),),
        "attention_efficiency": (1.0, 1.0),
        "memory_gb_per_s": 1e15,
        "memory_efficiency": ((1.0, 1.0),),
        "kernel_us": 0.0,
        "node": FAST,
        "network": FAST,
    }
)
STUDENT = llama(4, 512, 1408, 8, 4, vocab_size=32_768)
TEACHER = llama(8, 1024, 2816, 16, 8, vocab_size=32_768)
LENGTH, BATCH = 1024, 8
SHARED = choice_of((STUDENT.num_layers,), (TEACHER.num_layers,))
APART = replace(SHARED, place="own ranks", teacher_ranks=1)
ALONE = replace(SHARED, place="none", teacher_layout=None)
NUMBERS = stage_numbers(STUDENT, Layout(), SHARED.layers)
RUN = run_of(STUDENT, teacher=TEACHER, sequence_length=LENGTH, global_batch_size=BATCH)


def work(run: PlannedRun, **changes: object) -> StepTime:
    """The FLOPs of one rank, in the fields of a step's times."""
    return step_time(run, replace(SHARED, **changes), DEVICE, NUMBERS)  # type: ignore[arg-type]


def answer_seconds(run: PlannedRun, device: DeviceProfile, choice: Choice = APART) -> float:
    """A step of a teacher on ranks of its own."""
    return sum(teacher_seconds(run, choice, device))


def layer_flops(shape: object) -> float:
    whole = forward_flops_per_token(shape, sequence_length=LENGTH)  # type: ignore[arg-type]
    return whole - head_flops_per_token(shape)  # type: ignore[arg-type]


def test_the_teacher_takes_the_flops_of_its_layers() -> None:
    found = work(RUN)
    assert found.teacher * PEAK == pytest.approx(BATCH * LENGTH * layer_flops(TEACHER), rel=1e-6)
    assert found.forward * PEAK == pytest.approx(BATCH * LENGTH * layer_flops(STUDENT), rel=1e-6)


def test_the_softmax_of_a_cpu_takes_its_time_per_score_whatever_a_head_s_width() -> None:
    cpu = DEVICE.model_copy(update={"score_ns": (1.0, 3.0)})
    scores = BATCH * LENGTH * (LENGTH + 1) / 2 * STUDENT.num_attention_heads * STUDENT.num_layers
    run = replace(RUN, teacher=None)
    found, plain = (step_time(run, ALONE, one, NUMBERS) for one in (cpu, DEVICE))
    assert found.forward - plain.forward == pytest.approx(scores * 1e-9, rel=1e-6)
    assert found.backward - plain.backward == pytest.approx(3 * scores * 1e-9, rel=1e-6)


@pytest.mark.parametrize(
    ("length", "document", "keys"),
    [
        (512, None, 512),
        (1024, None, 768),  # a half of the queries reads one block of keys, the other half two
        (2048, None, 1280),
        (1024, 512, 512),
        (1024, 256, 256),
        (1024, 640, (512 * 512 + 128 * 640) / 640),
    ],
)
def test_a_cpu_computes_whole_blocks_of_keys(
    length: int, document: int | None, keys: float
) -> None:
    """Over the causal scores of documents; the rate is of those that 512 tokens need."""
    cpu = DEVICE.model_copy(update={"kind": "cpu", "score_ns": (1e3, 2e3)})
    choice = replace(SHARED, place="none")
    run = replace(RUN, teacher=None, sequence_length=length, document_length=document)
    numbers = stage_numbers(STUDENT, Layout(), choice.layers)
    found, none = (
        step_time(run, choice, one, numbers)
        for one in (cpu, cpu.model_copy(update={"score_ns": (0.0, 0.0)}))
    )
    scores = BATCH * length * STUDENT.num_attention_heads * STUDENT.num_layers
    seen = scores * keys * 513 / (2 * 512) * 1e-6
    assert found.forward - none.forward == pytest.approx(seen, rel=1e-3)
    assert found.backward - none.backward == pytest.approx(2 * seen, rel=1e-3)


def test_logits_whose_rows_share_cache_sets_have_a_measured_cost_of_their_own() -> None:
    cpu = DEVICE.model_copy(
        update={"logit_ns": {"bf16": 1.0}, "aliased_logit_ns": {"bf16": 3.0}, "kind": "cpu"}
    )

    def nanoseconds(columns: int, device: DeviceProfile) -> float:
        student = llama(4, 512, 1408, 8, 4, vocab_size=columns)
        run = replace(RUN, student=student, teacher=None)
        numbers = stage_numbers(student, Layout(), ALONE.layers)
        products = 3 * 2 * BATCH * LENGTH * 512 * columns / PEAK
        heads = step_time(run, ALONE, device, numbers).heads
        return 1e9 * (heads - products) / (BATCH * LENGTH * columns)

    assert nanoseconds(65_536, cpu) == pytest.approx(3.0, rel=1e-6)
    assert nanoseconds(128_256, cpu) == pytest.approx(1.0, rel=1e-6)
    older = cpu.model_copy(update={"aliased_logit_ns": {}})
    assert nanoseconds(65_536, older) == pytest.approx(1.0, rel=1e-6)


def test_a_teacher_that_sends_its_top_ids_takes_the_time_of_their_choice() -> None:
    cpu = DEVICE.model_copy(update={"logit_ns": {"bf16": 1.0}, "choice_ns": {"bf16": 5.0}})
    logits = BATCH * LENGTH * TEACHER.vocab_size
    plain = cpu.model_copy(update={"choice_ns": {}})
    longer, shorter = (answer_seconds(replace(RUN, sent_ids=64), one) for one in (cpu, plain))
    assert longer - shorter == pytest.approx(4e-9 * logits, rel=1e-6)
    assert answer_seconds(RUN, cpu) == answer_seconds(RUN, plain)


@pytest.mark.parametrize(("sequence", "after"), [(False, 2.0), (True, 1.0)])
def test_tensor_ranks_of_a_teacher_sum_its_embedding_and_gather_the_chosen_ids(
    sequence: bool, after: float
) -> None:
    """On a link of one byte per nanosecond, where nothing else takes time."""
    link = FAST.model_copy(update={"gb_per_s": 1.0})
    fast = {"bf16": 1e9, "fp32": 1e9}
    device = DEVICE.model_copy(update={"node": link, "network": link, "peak_tflops": fast})
    choice = replace(APART, teacher_layout=Layout(2, sequence=sequence), teacher_ranks=2)
    hidden, ids = (answer_seconds(run, device, choice) for run in (RUN, replace(RUN, sent_ids=64)))
    # A gather or a scatter over two ranks moves half, a sum all.
    half = BATCH * LENGTH * TEACHER.hidden_size * 2 / 2
    assert hidden * 1e9 == pytest.approx((4 * TEACHER.num_layers + after) * half, rel=1e-3)
    numbers = 80 + 8 * 64 + 8  # statistics, and ids with their logits and the rest's two sums
    states = half if sequence else 0.0  # whole ones for the head
    assert (ids - hidden) * 1e9 == pytest.approx(BATCH * LENGTH * numbers + states, rel=1e-2)


def test_a_choice_on_a_gpu_takes_the_bytes_of_its_passes() -> None:
    """Five passes over the logits, and the sort of maxima and candidates, at 10^15 bytes/s."""
    gpu = DEVICE.model_copy(update={"memory_gb_per_s": 1e6})
    tokens, columns = BATCH * LENGTH, TEACHER.vocab_size
    few, many = (answer_seconds(replace(RUN, sent_ids=count), gpu) for count in (16, 64))
    assert many - few == pytest.approx(1e-15 * tokens * (64 - 16) * 32 * 128, rel=1e-6)
    without = answer_seconds(RUN, gpu)
    products = tokens * head_flops_per_token(TEACHER) / PEAK
    numbers = columns * (5 * 2 + 128 / 32) + 16 * 32 * 128
    assert few - without - products == pytest.approx(1e-15 * tokens * numbers, rel=1e-3)


def test_ids_of_another_layout_take_the_teachers_head_out_of_the_losses() -> None:
    """Its two tensor ranks run it in the teacher's pass, beside two replicas of the student."""
    own = {"ranks": 2, "teacher_layout": Layout(2)}
    hidden, ids = work(RUN, **own), work(replace(RUN, sent_ids=64), **own)
    half = BATCH * LENGTH * head_flops_per_token(TEACHER) / 2
    assert (hidden.heads - ids.heads) * PEAK == pytest.approx(half, rel=1e-6)
    assert (ids.teacher - hidden.teacher) * PEAK == pytest.approx(half, rel=1e-6)
    assert replace(hidden, heads=0.0, teacher=0.0) == replace(ids, heads=0.0, teacher=0.0)
    # In the student's layout hidden states stay.
    assert work(replace(RUN, sent_ids=64)) == work(RUN)


def test_the_heads_take_three_products_of_the_student_and_one_of_the_teacher() -> None:
    student, teacher = map(head_flops_per_token, (STUDENT, TEACHER))
    heads = BATCH * LENGTH * (3 * student + teacher)
    assert work(RUN).heads * PEAK == pytest.approx(heads, rel=1e-6)
    alone = work(replace(RUN, teacher=None), place="none", teacher_layout=None)
    assert alone.heads * PEAK == pytest.approx(BATCH * LENGTH * 3 * student, rel=1e-6)


def test_the_balance_takes_a_forward_pass_and_the_products_of_its_heads() -> None:
    """Losses take one product of each head; gradients two of the student's, and two back."""
    student, teacher = head_flops_per_token(STUDENT), head_flops_per_token(TEACHER)
    layers, plain = layer_flops(STUDENT), work(RUN)
    for measures, heads in (("losses", student + teacher), ("gradients", 4 * student + teacher)):
        found = work(replace(RUN, keeps_signals=True, measures=measures))  # type: ignore[arg-type]
        assert found.balance * PEAK == pytest.approx(BATCH * LENGTH * (layers + heads), rel=1e-6)
        assert replace(found, balance=0.0) == plain


PAIRS = (LayerPair(1, 2), LayerPair(1, 2, "cosine"), LayerPair(4, 8, "attention"))
COMPARED = replace(RUN, paired_layers=PAIRS, projector=(512, 768, 1024))


def pair_flops(run: PlannedRun, *, gradient: bool) -> float:
    """FLOPs of all pairs in one pass over a step."""
    works = [pair_work(run, SHARED, pair.loss) for pair in run.paired_layers]
    return BATCH * sum((one.gradient if gradient else one.value).flops for one in works)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_losses_between_layers_take_their_products_once_forward_and_once_back(
    recompute: str,
) -> None:
    """A projector four times as many as one pass over it; maps of causal scores likewise."""
    projections = 2 * 2 * BATCH * LENGTH * (512 * 768 + 768 * 1024)
    scores = 2 * BATCH * LENGTH * LENGTH * 512, 2 * BATCH * LENGTH * LENGTH * 1024
    ahead, back = (pair_flops(COMPARED, gradient=gradient) for gradient in (False, True))
    assert ahead == pytest.approx(projections + sum(scores), rel=1e-9)
    assert back == pytest.approx(3 * projections + 3 * scores[0] + scores[1], rel=1e-9)
    found, plain = (work(run, recompute=recompute) for run in (COMPARED, RUN))
    assert found.features * PEAK == pytest.approx(ahead + back, rel=1e-6)
    parts = replace(found, features=0.0, optimizer=plain.optimizer)
    assert parts.parts == pytest.approx(plain.parts, rel=1e-9)
    phases = [phase_seconds(run, SHARED, DEVICE, NUMBERS) for run in (COMPARED, RUN)]
    for phase, flops in (("forward", ahead), ("backward", back)):
        more, less = (one[phase] for one in phases)  # type: ignore[index]
        assert (more - less) * PEAK == pytest.approx(flops, rel=1e-3)


@pytest.mark.parametrize("measures", ["losses", "gradients"])
def test_the_balance_measures_losses_between_layers_too(measures: str) -> None:
    run = replace(COMPARED, keeps_signals=True, measures=measures)  # type: ignore[arg-type]
    found, plain = (work(one).balance for one in (run, replace(run, paired_layers=())))
    flops = pair_flops(COMPARED, gradient=measures == "gradients")
    assert (found - plain) * PEAK == pytest.approx(flops, rel=1e-6)


def test_a_teacher_on_its_own_rank_hides_behind_the_student_or_is_waited_for() -> None:
    shared = work(RUN)
    own = work(RUN, place="own ranks", teacher_ranks=1)
    longer = max(shared.teacher, shared.total - shared.teacher)
    assert own.total == pytest.approx(longer, rel=1e-6)
    # Without a step ahead: the first or all but the last micro-batches of the longer side.
    behind = work(replace(RUN, steps_ahead=0), place="own ranks", teacher_ranks=1)
    student = shared.total - shared.teacher
    teacher, each = shared.teacher / BATCH, (student - shared.optimizer) / BATCH
    waiting = max(teacher, BATCH * teacher - (BATCH - 1) * each)
    assert behind.total == pytest.approx(student + waiting, rel=1e-4)


@pytest.mark.parametrize("ids", [64, 128, 256])
def test_a_step_from_a_store_takes_its_reading_where_that_is_longer(ids: int) -> None:
    """At the rate of a core that the record has for so many ids per token, with u8."""
    text = (ROOT / "benchmarks" / "results" / "store.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    (recorded,) = (float(row[3]) for row in rows if row[:3] == ["ours, u8", str(ids), "read"])
    tiny = llama(1, 64, 64, 1, 1, vocab_size=128)
    numbers = stage_numbers(tiny, Layout(), (1,))
    run = replace(RUN, student=tiny, store_ids=ids)
    choice = replace(ALONE, layers=(1,), place="store")
    fast = DEVICE.model_copy(update={"peak_tflops": {"bf16": 1e6, "fp32": 1e6}})
    found = step_time(run, choice, fast, numbers)
    assert found.total == pytest.approx(run.tokens / (recorded * 1e6), rel=0.05)
    assert work(RUN, place="store", teacher_layout=None).waiting == 0.0


IDS, RECORDED = 16, 64
# Of the losses alone: 1 ns per logit, 5 in a choice; bytes and calls take nothing.
LOGITS = DEVICE.model_copy(
    update={"kind": "cpu", "logit_ns": {"bf16": 1.0}, "choice_ns": {"bf16": 5.0}}
)


@pytest.mark.parametrize(
    ("place", "terms", "student", "whole", "chosen"),
    [
        ("shared", (LossTerm(),), 1, 1, 0),
        ("shared", (LossTerm(IDS, has_tail=False),), 1, 0, 1),
        ("shared", (LossTerm(IDS), LossTerm(2 * IDS)), 1 + 2 / 3, 0, 1),
        ("shared", (LossTerm(IDS, has_tail=False), LossTerm()), 1, 1, 1),
        ("store", (LossTerm(),), 1 + 1 / 3, 0, 0),
        ("store", (LossTerm(IDS, has_tail=False),), 1, 0, 0),
        ("own ranks", (LossTerm(),), 1 + 1 / 3, 0, 0),
    ],
)
def test_terms_on_few_ids_read_the_logits_that_they_need(
    place: str, terms: tuple[LossTerm, ...], student: float, whole: int, chosen: int
) -> None:
    """A tail reads the student's a third more; ids are chosen among a live teacher's alone."""
    sent = RECORDED if place == "own ranks" else None
    run = replace(RUN, terms=terms, sent_ids=sent, store_ids=RECORDED)
    choice = replace(SHARED, place=place, teacher_ranks=int(place == "own ranks"))  # type: ignore[arg-type]
    found, plain = (step_time(run, choice, one, NUMBERS).heads for one in (LOGITS, DEVICE))
    logits = BATCH * LENGTH * STUDENT.vocab_size
    assert found - plain == pytest.approx(logits * (student + whole + 5 * chosen) * 1e-9, rel=1e-4)


@pytest.mark.parametrize(
    ("term", "measures", "whole", "shard"),
    [
        (LossTerm(), None, 2, 2 * 4 / 3),
        (LossTerm(IDS, has_tail=False), None, 1 + 5, 4 / 3 + 5),
        (LossTerm(), "losses", 2 * 0.85, 2 * 0.85),
        (LossTerm(), "gradients", 3, 3 * 4 / 3),
    ],
)
def test_shards_of_a_vocabulary_are_read_again_for_the_gradient(
    term: LossTerm, measures: Any, whole: float, shard: float
) -> None:
    """A chunk of shards exchanges statistics first; a choice and a measured loss have one pass."""
    run = replace(RUN, terms=(term,), keeps_signals=measures is not None, measures=measures)
    free = LOGITS.model_copy(update={"logit_ns": {"bf16": 1e-9}, "choice_ns": {"bf16": 1e-9}})

    def added(split: int) -> float:
        layout = Layout(split)
        choice = replace(SHARED, layout=layout, teacher_layout=layout, ranks=split)
        numbers = stage_numbers(STUDENT, layout, SHARED.layers)
        found, rest = (step_time(run, choice, one, numbers) for one in (LOGITS, free))
        return found.heads - rest.heads if measures is None else found.balance - rest.balance

    logits = BATCH * LENGTH * STUDENT.vocab_size * 1e-9
    assert added(1) == pytest.approx(logits * whole, rel=1e-4)
    assert added(2) == pytest.approx(logits * shard / 2, rel=1e-4)


@pytest.mark.parametrize(
    ("measures", "place", "term", "student", "whole", "chosen"),
    [
        ("losses", "shared", LossTerm(), 0.85, 0.85, 0),
        ("losses", "shared", LossTerm(IDS, has_tail=False), 0.85, 0, 1),
        ("losses", "store", LossTerm(), 0.85 + 1 / 3, 0, 0),
        ("gradients", "shared", LossTerm(IDS, has_tail=False), 2, 0, 1),
        ("gradients", "store", LossTerm(), 2 + 1 / 3, 0, 0),
    ],
)
def test_the_balance_measures_terms_on_few_ids_as_the_losses_take_them(
    measures: Any, place: Any, term: LossTerm, student: float, whole: float, chosen: int
) -> None:
    """Values take most of a logit, gradients the student's twice; chosen ids are counted once."""
    run = replace(RUN, terms=(term,), store_ids=RECORDED, keeps_signals=True, measures=measures)
    choice = replace(SHARED, place=place)
    free = LOGITS.model_copy(update={"logit_ns": {"bf16": 1e-9}, "choice_ns": {"bf16": 1e-9}})
    found, rest = (step_time(run, choice, one, NUMBERS).balance for one in (LOGITS, free))
    logits = BATCH * LENGTH * STUDENT.vocab_size
    assert found - rest == pytest.approx(logits * (student + whole + 5 * chosen) * 1e-9, rel=1e-4)
    calling = free.model_copy(update={"kernel_us": 1.0})
    one, four = (
        step_time(replace(run, chunk_tokens=LENGTH // chunks), choice, calling, NUMBERS).balance
        for chunks in (1, 4)
    )
    calls = 300 + (350 if place == "store" else 200 + 350 if chosen else 370)
    # A few more calls are those of the products.
    assert four - one == pytest.approx(3 * BATCH * calls * 1e-6, rel=0.02)


@pytest.mark.parametrize(("term", "ns"), [(LossTerm(IDS, has_tail=False), 27), (LossTerm(), 55)])
def test_terms_on_few_ids_take_time_per_id_per_chunk_and_per_message(
    term: LossTerm, ns: float
) -> None:
    """As measured on one core, which moves 22 GB/s; the logits take nothing."""
    core = LOGITS.model_copy(update={"memory_gb_per_s": 22.0, "logit_ns": {"bf16": 1e-9}})
    stored = replace(RUN, terms=(term,), store_ids=RECORDED, chunk_tokens=LENGTH // 4)

    def more(device: DeviceProfile, layout: Layout, ranks: int) -> float:
        choice = replace(SHARED, place="store", layout=layout, ranks=ranks)
        numbers = stage_numbers(STUDENT, layout, SHARED.layers)
        found, labels = (
            step_time(replace(stored, terms=terms), choice, device, numbers)
            for terms in ((term,), ())
        )
        return found.heads + found.tensor - labels.heads - labels.tensor

    ids = BATCH * LENGTH * (term.top_k or RECORDED)
    assert more(core, Layout(), 1) == pytest.approx(ids * ns * 1e-9, rel=0.05)
    calling = core.model_copy(update={"memory_gb_per_s": 1e15, "kernel_us": 1.0})
    assert more(calling, Layout(), 1) == pytest.approx(4 * BATCH * 350e-6, rel=1e-3)
    slow = Link(devices=64, gb_per_s=1e15, efficiency=1.0, latency_us=1e6)
    linked = core.model_copy(update={"memory_gb_per_s": 1e15, "node": slow})
    assert more(linked, Layout(tensor=2), 2) == pytest.approx(4 * BATCH, rel=1e-3)


def test_a_cpu_divides_its_gradients_by_the_tokens() -> None:
    """A part of the time that the optimizer takes for a parameter, on one rank too."""
    cpu = DEVICE.model_copy(update={"kind": "cpu", "update_ns": 6.0})
    found, plain = (step_time(RUN, SHARED, one, NUMBERS) for one in (cpu, DEVICE))
    (parameters,) = (one.total for one in NUMBERS)
    assert found.data_parallel - plain.data_parallel == pytest.approx(0.8e-9 * parameters)
    assert found.optimizer == pytest.approx(6e-9 * parameters)


def test_calls_of_the_next_batch_delay_those_of_a_cpu_that_does_not_wait() -> None:
    """900 of a micro-batch and 350 of a step, of 1 us; those of a GPU run ahead of its kernels."""
    cpu = DEVICE.model_copy(update={"kind": "cpu", "kernel_us": 1.0})
    beside = BATCH * 900e-6
    assert step_time(RUN, SHARED, cpu, NUMBERS).data == pytest.approx(beside + 350e-6)
    for waits, left in ((0.0, beside), (0.4 * beside, 0.6 * beside), (2 * beside, 0.0)):
        found = batch_seconds(RUN, SHARED, cpu, waits=waits)
        assert found == pytest.approx(left + 350e-6)
        assert batch_seconds(RUN, SHARED, DEVICE, waits=waits) == 0.0
    two = replace(RUN, chunk_losses=(ChunkLoss("likelihood"),))
    more = batch_seconds(two, SHARED, cpu, waits=0.0) - batch_seconds(RUN, SHARED, cpu, waits=0.0)
    assert more == pytest.approx(BATCH * 1600e-6)
    shared = cpu.model_copy(update={"core_share": 0.5, "kernel_us": 2.0})
    assert batch_seconds(RUN, SHARED, shared, waits=1.0) == pytest.approx(350e-6)


def test_a_plan_says_where_reading_limits_it_and_what_helps() -> None:
    """A step of 1 s whose samples take 4 s, and one that hides all but a hundredth of its own."""
    read = replace(RUN, reading_seconds=4 / RUN.tokens)
    rate = f"in 4 s, {RUN.tokens / 4e6:,.2f} million tokens/s, where the rest of the step takes 1 s"
    assert rate in reading_limit(read, SHARED, step=1.0)
    assert reading_limit(read, SHARED, step=3.96) == ""
    assert reading_limit(RUN, SHARED, step=1.0) == ""
    prepared = "do not help. Texts that `megatron-distill data tokenize` has prepared do."
    for texts, advice in ((1.0, prepared), (0.0, "do not help.")):
        run = replace(RUN, reading_seconds=reading_seconds(texts=texts, aligned_by=None))
        assert reading_limit(run, SHARED, step=1e-3).endswith(advice)
    two = replace(read, chunk_losses=(ChunkLoss("likelihood"),))
    advice = "More `data.workers` do, on as many cores."
    assert reading_limit(two, SHARED, step=1.0).endswith(advice)


def test_calls_of_losses_are_evicted_as_those_of_layers() -> None:
    """A layer has 340 calls, so that one of a loss takes as much of its time."""
    cpu = DEVICE.model_copy(update={"kind": "cpu", "kernel_us": 1.0, "logit_ns": {"fp32": 1.0}})
    cold = cpu.model_copy(update={"layer_us": {"one rank": {"forward": 680.0, "backward": 1.0}}})
    run = replace(RUN, precision="fp32")
    heads = [step_time(run, SHARED, device, NUMBERS).heads for device in (cpu, cold)]
    calls = (heads[1] - heads[0]) / 2e-6
    assert calls == pytest.approx(BATCH * (300 + 370), rel=0.02)


def test_a_step_shorter_than_its_reading_takes_as_long_as_it() -> None:
    """At the rates of the records: data is the part that the other parts do not hide."""
    cases = json.loads((ROOT / "benchmarks" / "results" / "data.json").read_text())["cases"]
    rates = {one["task"]: median(one["rates"]["ours"]) * one["cores"] for one in cases}
    texts, loaded = (reading_seconds(texts=share, aligned_by=None) for share in (1.0, 0.0))
    assert rates["stream"] * texts == pytest.approx(1.0, rel=0.05)
    assert rates["load"] * loaded == pytest.approx(1.0, rel=0.05)
    assert reading_seconds(texts=0.25, aligned_by=None) == pytest.approx(texts / 4 + loaded * 3 / 4)
    three, one, none = (reading_seconds(texts=1.0, aligned_by=n) for n in (3, 1, 0))
    assert three == pytest.approx(one / 3)
    assert none == one > texts

    alone = work(RUN)
    assert alone.data == 0.0
    slow = work(replace(RUN, reading_seconds=2 * alone.total / RUN.tokens))
    assert slow.total == pytest.approx(2 * alone.total)
    assert slow.data == pytest.approx(alone.total)
    assert work(replace(RUN, reading_seconds=alone.total / RUN.tokens / 2)) == alone
    own = replace(RUN, reading_seconds=1.0)
    assert work(own, place="store", teacher_layout=None).data == 0.0
    assert work(replace(own, teacher=None), place="store", teacher_layout=None).data > 0.0


def test_a_capture_takes_the_flops_of_the_teacher_and_its_head() -> None:
    search = Search(RUN, DEVICE, 1, lambda role, layout: None, ("shared",))
    found = search.capture()
    whole = forward_flops_per_token(TEACHER, sequence_length=LENGTH)
    assert found.seconds_per_step * PEAK == pytest.approx(BATCH * LENGTH * whole, rel=1e-6)


def test_the_head_of_a_capture_has_the_factor_of_the_losses() -> None:
    """A live run has the same products and choices in its phase `loss`."""

    def seconds(**factors: float) -> float:
        device = DEVICE.model_copy(update={"factors": factors})
        search = Search(RUN, device, 1, lambda role, layout: None, ("shared",))
        return search.capture().seconds_per_step

    heads = seconds(loss=2.0) - seconds()
    layers = seconds(teacher=2.0) - seconds()
    product = BATCH * LENGTH * head_flops_per_token(TEACHER) / PEAK
    assert heads == pytest.approx(product, rel=1e-6)
    assert layers + heads == pytest.approx(seconds(), rel=1e-6)


def test_the_head_of_a_teacher_that_sends_ids_has_the_factor_of_its_phase() -> None:
    """The run's log has the choice of ids in the phase `teacher`, and refines it as a whole."""
    run = replace(RUN, sent_ids=64)

    def seconds(**factors: float) -> float:
        device = DEVICE.model_copy(update={"factors": factors})
        return teacher_stages(run, APART, device)[0].forward

    assert seconds(teacher=2.0) == pytest.approx(2 * seconds())
    assert seconds(loss=2.0) == seconds()

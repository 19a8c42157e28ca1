"""Losses between two tokenizers: plans beside the recorded steps, and against counted work."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from statistics import median
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from benchmarks.cross_tokenizers.planned import LOSSES, planned_row
from megatron_distill.losses import ChunkTerm
from megatron_distill.models.flops import head_flops_per_token
from megatron_distill.planning.device import DeviceProfile, load_device
from megatron_distill.planning.losses.aligned import aligned_bytes, aligned_calls
from megatron_distill.planning.memory import memory_need
from megatron_distill.planning.parameters import stage_numbers
from megatron_distill.planning.run import ChunkLoss, LayerPair, PlannedRun
from megatron_distill.planning.step_time import step_time
from megatron_distill.planning.traffic import step_bytes
from megatron_distill.runtime.layout import Layout
from tests.guards.source_tree import ROOT
from tests.support.aligned_losses import aligned_step
from tests.unit.planning.shapes import choice_of, llama, run_of
from tests.unit.planning.test_work import DEVICE, PEAK

RESULTS = ROOT / "benchmarks" / "results"
CPU = load_device("a100-80gb").model_copy(update={"kind": "cpu", "cores": 2, "reserved_gib": 0.0})


def recorded(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


STEP = recorded("cross_tokenizer")["step"]


@pytest.mark.parametrize("name", LOSSES)
def test_the_recorded_steps_between_tokenizers_need_the_planned_memory(name: str) -> None:
    need = planned_row(name, CPU).memory
    assert 0.95 * STEP["rows"][name]["peak"] <= need.transient <= 1.10 * STEP["rows"][name]["peak"]


def test_the_recorded_steps_between_tokenizers_take_about_the_planned_time() -> None:
    """In the right order; where the record has a calibration, within fifteen per cent."""
    devices = STEP.get("devices") or recorded("planning")["devices"]
    profiles = [DeviceProfile.model_validate(one) for one in devices]
    rows = [
        (
            STEP["rows"][name]["median"],
            median(planned_row(name, device).time.total for device in profiles),
        )
        for name in LOSSES
    ]
    for (one, planned), (other, also) in combinations(sorted(rows), 2):
        assert planned < also or other < 1.1 * one, (one, other, planned, also)
    if "devices" in STEP:
        assert all(0.85 < planned / seconds < 1.15 for seconds, planned in rows), rows


STUDENT, TEACHER = (
    llama(2, 256, 512, 4, 2, vocab_size=1024),
    llama(2, 512, 1024, 4, 2, vocab_size=4096),
)
LENGTH, LONGER, BATCH = 128, 160, 4
CHOICE = choice_of((2,), (2,))


def aligned(*losses: ChunkLoss, **changes: Any) -> PlannedRun:
    return run_of(
        STUDENT,
        teacher=TEACHER,
        sequence_length=LENGTH,
        teacher_length=LONGER,
        global_batch_size=BATCH,
        chunk_losses=losses,
        **changes,
    )


def heads_of(device: DeviceProfile, *losses: ChunkLoss) -> float:
    numbers = stage_numbers(STUDENT, Layout(), (2,))
    return step_time(aligned(*losses), CHOICE, device, numbers).heads


def test_each_head_reads_the_tokens_of_its_own_tokenizer() -> None:
    flops = BATCH * 3 * LENGTH * head_flops_per_token(STUDENT)
    flops += BATCH * LONGER * head_flops_per_token(TEACHER)
    assert heads_of(DEVICE, ChunkLoss("likelihood")) * PEAK == pytest.approx(flops, rel=1e-6)


# Passes over the student's and the teacher's logits, a pass half of a logit in the objective.
PASSES = {
    "likelihood": (2, 1),
    # Three over the chunk means of both models: of common tokens, or of all.
    "common": (2 + 2 + 3 * 2 * 0.75, 2),
    "uld": (2 + 3 + 3, 2 + 3 * LENGTH / LONGER),
    "gold": (2 + 3 + 2 * 12 * 0.75, 2),  # over the common tokens, three quarters of the student's
    "projection": (2 + 3 + 3 + 2, 2 + (3 + 2) * LENGTH / LONGER),
}


@pytest.mark.parametrize("alignment", PASSES)
def test_a_loss_takes_its_passes_over_the_logits(alignment: Any) -> None:
    rates = {"logit_ns": {"bf16": 2e3}, "choice_ns": {"bf16": 1e-9}, "memory_gb_per_s": 1e15}
    device = DEVICE.model_copy(update={**rates, "peak_tflops": {"bf16": 1e9, "fp32": 1e9}})
    own, theirs = PASSES[alignment]
    logits = own * LENGTH * 1024 + theirs * LONGER * 4096
    assert heads_of(device, ChunkLoss(alignment)) == pytest.approx(BATCH * logits * 1e-6, rel=1e-4)


@pytest.mark.parametrize(
    "alignment",
    [
        pytest.param(name, marks=[] if name in ("common", "likelihood") else pytest.mark.slow)
        for name in PASSES
    ],
)
def test_the_calls_of_a_loss_are_those_of_torch_beyond_its_row_blocks(
    alignment: Any, one_thread: None
) -> None:
    """As of the objective and of one to four tiles; more blocks of rows show what each takes."""

    def calls(chunks: int, tile_tokens: int) -> int:
        work, _ = aligned_step(
            (1200, 2048), ChunkTerm(alignment), chunks=chunks, tile_tokens=tile_tokens
        )
        with profile(activities=[ProfilerActivity.CPU]) as record:
            work()
        return sum(one.count for one in record.key_averages() if one.key.startswith("aten::"))

    few, many = calls(144, 4096), calls(576, 4096)
    # One thread takes blocks of 218 and 128 rows of the two vocabularies: of 259 and 240 rows, then
    # of 979 and 961.
    per_block = (many - few) / ((5 + 8) - (2 + 2))
    # 496 and 486 rows.
    for tile_tokens, tiles, blocks in ((4096, 1, 3 + 4), (256, 2, 4 + 4), (128, 4, 4 + 4)):
        planned = aligned_calls(aligned(ChunkLoss(alignment)), tiles=tiles)
        assert planned == pytest.approx(calls(288, tile_tokens) - blocks * per_block, rel=0.1)


def test_choices_take_the_rate_of_their_rows() -> None:
    rates = {"choice_ns": {"bf16": 1e3}, "narrow_choice_ns": {"bf16": 3e3}}
    device = DEVICE.model_copy(update={"logit_ns": {"bf16": 1e-9}, **rates})
    rows, common = BATCH * LENGTH, 768
    plain = heads_of(device, ChunkLoss("common"))
    # Each chosen number is sorted, in the time of five others.
    for loss, chosen in {
        ChunkLoss("common"): 0,
        ChunkLoss("common", 64): 3 * (common + 5 * 64),  # few columns per id
        ChunkLoss("common", 4): common + 5 * 4,
        ChunkLoss("uld", None, 8): 3 * (1024 + 40) + 4096 + 40,
        ChunkLoss("gold", None, 8): 3 * (1024 - common + 40) + (4096 - common + 40),
        ChunkLoss("projection", 16): 4096 + 5 * 16,
    }.items():
        expected = rows * chosen * 1e-6
        assert heads_of(device, loss) - plain == pytest.approx(expected, abs=1e-4), loss


def test_a_choice_whose_precision_was_not_measured_reads_and_writes_its_numbers() -> None:
    """Not at the rate of the losses, nor at that of the other precision."""
    loss = ChunkLoss("common", 4)
    rates = {"logit_ns": {"bf16": 1e3}, "memory_gb_per_s": 1e9}
    seconds = {
        name: heads_of(DEVICE.model_copy(update={**rates, "choice_ns": choice}), loss)
        for name, choice in {"none": {}, "other": {"fp32": 1e3}, "own": {"bf16": 1e3}}.items()
    }
    assert seconds["other"] == seconds["none"] < seconds["own"]


# Passes over the student's logits beside a teacher without any.
ALONE = {"likelihood": 2, "common": 2 + 2, "gold": 2 + 3, "uld": 2 + 3 + 3, "projection": 2 + 3 + 5}


@pytest.mark.parametrize("alignment", ALONE)
def test_without_the_teacher_s_head_its_columns_take_no_time_and_no_memory(alignment: Any) -> None:
    rates = {"logit_ns": {"bf16": 2e3}, "aliased_logit_ns": {"bf16": 9e3}}
    rates |= {"choice_ns": {"bf16": 1e-9}, "peak_tflops": {"bf16": 1e9, "fp32": 1e9}}
    device = DEVICE.model_copy(update={**rates, "memory_gb_per_s": 1e15})
    choice = choice_of((2,), (2,), own=Layout(2), ranks=2)
    run, numbers = (
        aligned(ChunkLoss(alignment), sent_ids=64),
        stage_numbers(STUDENT, Layout(), (2,)),
    )
    assert not choice.keeps_head(run)
    logits = BATCH / 2 * LENGTH * 1024 * ALONE[alignment]
    found = step_time(run, choice, device, numbers).heads
    assert found == pytest.approx(logits * 1e-6, rel=1e-4)
    small = replace(run, teacher=replace(TEACHER, vocab_size=1024))
    taken, few = (
        aligned_bytes(one, CPU.shared_by(1), tokens=128, teacher_tokens=0, split=1)
        for one in (run, small)
    )
    assert taken == few


def test_the_pass_that_measures_has_the_products_of_its_own_tokens() -> None:
    numbers = stage_numbers(STUDENT, Layout(), (2,))
    plain = aligned(ChunkLoss("likelihood"))
    student, teacher = (
        BATCH * length * head_flops_per_token(shape)
        for length, shape in ((LENGTH, STUDENT), (LONGER, TEACHER))
    )
    with_head, without = (
        replace(plain, student=replace(STUDENT, vocab_size=size)) for size in (1024, 512)
    )
    measures: Any
    for measures, products in (("losses", 1), ("gradients", 4)):
        one, other = (
            step_time(replace(run, measures=measures), CHOICE, DEVICE, numbers).balance
            for run in (with_head, without)
        )
        assert (one - other) * PEAK == pytest.approx(products * student / 2, rel=1e-6)
    run, small = (
        replace(plain, measures="losses", teacher=replace(TEACHER, vocab_size=size))
        for size in (4096, 2048)
    )
    one, other = (step_time(each, CHOICE, DEVICE, numbers).balance for each in (run, small))
    assert (one - other) * PEAK == pytest.approx(teacher / 2, rel=1e-6)


def test_a_band_has_the_logits_of_both_and_a_tile_the_numbers_of_the_largest_term() -> None:
    device = CPU.shared_by(1)

    def bytes_of(*losses: ChunkLoss) -> float:
        run = aligned(*losses, precision="fp32", chunk_tokens=80)
        return aligned_bytes(run, device, tokens=128, teacher_tokens=160, split=1)

    label, uld, gold = (ChunkLoss(name) for name in ("likelihood", "uld", "gold"))
    tile = 80 * 4  # two bands of eighty rows, in tiles as large
    blocks = 4 * 128 * 1024 * 4 + 3 * 128 * 4096 * 4  # rows of a block: 2 threads, at most these
    assert bytes_of(label) == pytest.approx(64 * 1024 * 4 + 80 * 4096 * 4 + blocks, rel=0.1)
    assert bytes_of(uld) - bytes_of(label) == tile * (1024 + 2 * 4096)
    assert bytes_of(label, uld, gold) - bytes_of(label) == tile * (1024 + 3 * 4096 - 768)


def test_gathered_layers_are_in_the_time_the_bytes_and_the_peak_of_a_plan() -> None:
    layout = Layout(2, sequence=True, context=2)
    choice = choice_of((2,), (2,), layout, ranks=4)
    numbers = stage_numbers(STUDENT, layout, (2,))
    plain = aligned(ChunkLoss("likelihood"), measures="losses")
    paired = replace(plain, paired_layers=(LayerPair(1, 2), LayerPair(2, 2)))
    part, whole = (LONGER * share * 512 * 2 for share in (0.5, 1.0))
    before, after = (step_bytes(run, choice) for run in (plain, paired))
    # Two pairs, forward, backward, and in the pass that measures.
    assert after.tensor - before.tensor == BATCH * 6 * part / 2
    assert after.context - before.context == BATCH * 6 * whole / 2
    slow = DEVICE.model_copy(update={"node": load_device("l40s").node})
    early, late = (step_time(run, choice, slow, numbers) for run in (plain, paired))
    link = slow.node
    assert late.tensor - early.tensor == pytest.approx(BATCH * 4 * link.gathered(part, ranks=2))
    assert late.context - early.context == pytest.approx(BATCH * 4 * link.gathered(whole, ranks=2))
    once = link.gathered(part, ranks=2) + link.gathered(whole, ranks=2)
    assert late.balance - early.balance == pytest.approx(BATCH * 2 * once)


def test_a_gathered_layer_may_be_the_peak_of_a_rank() -> None:
    layout = Layout(2, sequence=True, context=8)
    choice, numbers = choice_of((2,), (2,), layout), stage_numbers(STUDENT, layout, (2,))
    without = replace(aligned(ChunkLoss("likelihood")), teacher_length=2**19)
    paired = replace(without, paired_layers=(LayerPair(1, 2),))
    before, after = (memory_need(run, choice, CPU, numbers) for run in (without, paired))
    gathered = 2**19 * 512 * 2 * (1 + 1 / 8)
    assert before.activations + before.loss_chunk + before.buffers < gathered
    found = after.activations + after.loss_chunk + after.buffers
    assert found == pytest.approx(after.activations + gathered)

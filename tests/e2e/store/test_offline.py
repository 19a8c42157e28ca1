"""Training from a store is training from the teacher that it was captured from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_distill.store import UNKNOWN, Identity, convert_maxtext
from tests.distributed.pool import Pool
from tests.e2e.captures import KnownStores, write_capture
from tests.e2e.runs import (
    Course,
    Inputs,
    KnownRuns,
    assembled,
    evaluate_here,
    failure,
    layout,
    records,
    run,
    validations,
)
from tests.support.store_maxtext_files import example, sequence, write

STEPS, ROWS = 8, 8
SHORT = (f"train.steps={STEPS}", "schedule.warmup_steps=2")
K = 12
FIRST, LAST = 1e-6, 1e-4
# Seconds, bytes and what a live teacher costs are not what a course is compared by.
MEASURED = {
    *("step_seconds", "teacher_seconds", "timers", "tokens_per_second", "peak_memory_bytes"),
    *("model_flops_per_second", "tflops_per_device", "mfu", "device"),
}
ALL_TERMS = f"""objective.terms=[
    {{divergence: forward_kl, weight: 1.0, top_k: {K}}},
    {{divergence: reverse_kl, weight: 0.5, top_k: 5}},
    {{divergence: js_divergence, weight: 0.5, top_k: {K}, beta: 0.3}},
    {{divergence: skewed_forward_kl, weight: 0.3, top_k: {K}}},
    {{divergence: skewed_reverse_kl, weight: 0.3, top_k: {K}, support: raw}},
    {{divergence: adaptive_kl, weight: 0.3, top_k: {K}}},
    {{divergence: total_variation, weight: 0.2, top_k: 3, support: raw}},
    {{divergence: squared_hellinger, weight: 0.2, top_k: {K}, support: renormalized}}]"""
WARM = f"""objective.terms=[
    {{divergence: forward_kl, temperature: 2.0, top_k: {K}, scale_by_temperature_squared: true}},
    {{divergence: reverse_kl, temperature: 0.5, top_k: 4}},
    {{divergence: forward_kl, temperature: 3.0, top_k: 6, support: renormalized}}]"""
ONE_TERM = f"objective.terms=[{{divergence: forward_kl, top_k: {K}}}]"


@pytest.fixture(scope="module")
def capture(pool: Pool, inputs: Inputs) -> Callable[..., Path]:
    """Stores of the runs' teacher on their own samples."""
    config = write_capture(inputs, "offline", samples=STEPS * ROWS)
    return KnownStores(pool, inputs, "store", config)


@pytest.fixture(scope="module")
def train(pool: Pool, inputs: Inputs) -> Callable[..., Course]:
    """Train the small dense student."""
    return partial(KnownRuns(pool, inputs, "offline", *SHORT), "dense")


def figures(course: Course) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in MEASURED} for record in course]


def assert_same_course(found: Course, expected: Course, *, first: float, last: float) -> None:
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    for ours, other in zip(figures(found), figures(expected), strict=True):
        tolerance = first if ours["step"] == 1 else last
        assert ours.keys() == other.keys()
        for name, value in other.items():
            assert ours[name] == pytest.approx(value, rel=tolerance, abs=1e-7), (ours["step"], name)


@pytest.mark.slow
def test_in_the_same_layout_every_figure_has_the_same_bits(
    capture: Callable[..., Path], train: Callable[..., Course]
) -> None:
    online = train(1, ALL_TERMS)
    offline = train(1, ALL_TERMS, f"teacher.store={capture()}")
    losses = ("total_loss", "ce_loss", "kd_loss", "grad_norm", "topk_mass", "top1_agreement")
    for ours, other in zip(offline, online, strict=True):
        for name in losses:
            assert ours[name] == other[name], (ours["step"], name)
    # The teacher's own figures too, which the store has in fp32.
    assert_same_course(offline, online, first=1e-6, last=1e-6)
    assert {"teacher_ce_loss", "teacher_entropy", "student_entropy"} <= offline[0].keys()


@pytest.mark.slow
def test_temperatures_that_were_captured_are_exact(
    capture: Callable[..., Path], train: Callable[..., Course]
) -> None:
    offline = train(1, WARM, f"teacher.store={capture()}")
    assert_same_course(offline, train(1, WARM), first=1e-5, last=LAST)


# Reader, writer: what each of them gives by itself is in test_capture_layouts.py beside this file
# and in tests/distributed/teachers/test_stored_teacher.py.
@pytest.mark.slow
@pytest.mark.parametrize(("reader", "writer"), [("TP2xPP2", "CP2"), ("CP2", "TP2"), ("DP2", "DP2")])
def test_no_layout_of_reader_or_writer_changes_a_loss(
    reader: str, writer: str, capture: Callable[..., Path], train: Callable[..., Course]
) -> None:
    (world, reading), (writing, own) = layout(reader), layout(writer)
    store = f"teacher.store={capture(*own, world=writing)}"
    offline = train(world, ALL_TERMS, store, *reading)
    assert_same_course(offline, train(1, ALL_TERMS), first=5 * FIRST, last=LAST)


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "tolerance"), [("f16", 1e-4), ("u8", 1e-2)])
def test_a_lossy_codec_changes_a_loss_as_little_as_it_promises(
    codec: str, tolerance: float, capture: Callable[..., Path], train: Callable[..., Course]
) -> None:
    offline = train(1, ONE_TERM, f"teacher.store={capture(f'store.codec={codec}')}")
    online = train(1, ONE_TERM)
    for ours, other in zip(offline, online, strict=True):
        for name in ("total_loss", "ce_loss", "kd_loss"):
            assert ours[name] == pytest.approx(other[name], rel=tolerance), (ours["step"], name)
    assert offline[0]["kd_loss"] != online[0]["kd_loss"]


@pytest.mark.slow
def test_a_smaller_k_and_a_cut_are_part_of_the_same_store(
    capture: Callable[..., Path], train: Callable[..., Course]
) -> None:
    """Every id of a nucleus of 0.9: the mass kept is at least that, with fewer ids than k."""
    cut = train(1, "objective.terms=[{divergence: forward_kl}]",
                f"teacher.store={capture('store.top_p=0.5', 'store.k=301')}")  # fmt: skip
    assert all(0.5 <= record["topk_mass"] < 0.95 for record in cut)
    term = "objective.terms=[{divergence: forward_kl, top_k: 4}]"
    smaller = train(1, term, f"teacher.store={capture()}")
    assert_same_course(smaller, train(1, term), first=FIRST, last=LAST)


@pytest.mark.slow
def test_drawn_ids_train_and_report_the_known_metrics(
    capture: Callable[..., Path], train: Callable[..., Course]
) -> None:
    term = "objective.terms=[{divergence: forward_kl}]"
    store = capture("store.mode=sampled", "store.k=200", "store.temperatures=[]")
    drawn, dense = train(1, term, f"teacher.store={store}"), train(1, term)
    for ours, other in zip(drawn, dense, strict=True):
        assert not {"topk_mass", "top1_agreement"} & ours.keys()
        assert ours["teacher_entropy"] == pytest.approx(other["teacher_entropy"], rel=1e-5)
        # Samples give the cross-entropy of the student under the teacher: KL and entropy.
        expected = other["kd_loss"] + other["teacher_entropy"]
        assert ours["kd_loss"] == pytest.approx(expected, rel=0.03)


ALONE = ("data.sources=[]", "train.steps=20")


def test_the_store_is_a_corpus_of_its_own(
    capture: Callable[..., Path], train: Callable[..., Course]
) -> None:
    """20 steps of 8 go through 64 samples in two and a half epochs."""
    one = train(1, ONE_TERM, f"teacher.store={capture()}", *ALONE)
    assert one[-1]["step"] == 20
    assert one[-1]["ce_loss"] < one[0]["ce_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("own_corpus", [False, True], ids=["joined", "own"])
def test_a_stopped_run_goes_on_bit_by_bit(
    own_corpus: bool,
    pool: Pool,
    dense: Path,
    capture: Callable[..., Path],
    train: Callable[..., Course],
    tmp_path: Path,
) -> None:
    arguments = [ONE_TERM, f"teacher.store={capture()}", *(ALONE if own_corpus else ())]
    whole = train(1, *arguments)
    saved = (*SHORT, *arguments, "checkpoint.save=true")
    run(pool, 1, dense, tmp_path, *saved, stop_after=3)
    run(pool, 2, dense, tmp_path, *saved, stop_after=2)
    again = run(pool, 1, dense, tmp_path, *saved)
    assert_same_course(again, whole, first=FIRST, last=LAST)
    assert figures(again)[:3] == figures(whole)[:3]
    same = tmp_path / "same-layout"
    run(pool, 1, dense, same, *saved, stop_after=3)
    assert figures(run(pool, 1, dense, same, *saved)) == figures(whole)


@pytest.mark.slow
def test_held_out_samples_of_the_store_are_measured_beside_the_teacher(
    pool: Pool, dense: Path, capture: Callable[..., Path], tmp_path: Path
) -> None:
    held_out = ("validation.samples=11", "validation.interval=10", "train.micro_batch_size=4")
    arguments = [ONE_TERM, f"teacher.store={capture()}", *ALONE, *held_out]
    saved = (*SHORT, *arguments, "checkpoint.save=true")
    run(pool, 2, dense, tmp_path, *saved)
    found = [one["validation"] for one in validations(tmp_path)]
    assert len(found) == 2
    assert {"ce_loss", "kd_loss", "teacher_ce_loss", "top1_agreement"} <= found[0].keys()
    assert found[1]["ce_loss"] < found[0]["ce_loss"]
    assert found[1]["teacher_ce_loss"] == found[0]["teacher_ce_loss"]
    (evaluated,) = pool.run(1, evaluate_here, tmp_path)
    compared = evaluated["comparison"]
    assert compared["top1_agreement"] == pytest.approx(found[1]["top1_agreement"], rel=2e-6)
    least, most = compared["acceptance"]
    assert 0.0 < least < most <= 1.0, "a store of few ids bounds it"
    assert compared["tokens_per_verification"]["1"] == pytest.approx([1 + least, 1 + most])
    ends = compared["tokens_per_verification_stderr"]["1"]
    assert compared["acceptance_stderr"] == pytest.approx(ends), "one for each end"
    assert compared["blocks"]["1"] == compared["tokens"] > 11, "a block begins at every label"
    least, most = compared["js_divergence"]
    assert 0.0 < least < most < 0.7
    assert not {"forward_kl", "expected_speedup"} & compared.keys()
    # Joined with a corpus, the store has no records of held-out text.
    joined = [ONE_TERM, f"teacher.store={capture()}", "validation.samples=8"]
    run(pool, 1, dense, tmp_path / "joined", *SHORT, *joined)
    (last,) = [one["validation"] for one in validations(tmp_path / "joined")]
    assert "ce_loss" in last
    assert not {"kd_loss", "teacher_ce_loss"} & last.keys()


@pytest.mark.slow
def test_several_stores_share_the_steps_by_weight(
    pool: Pool, dense: Path, capture: Callable[..., Path], tmp_path: Path
) -> None:
    first, second = capture(), capture(world=2)
    stores = f"teacher.store=[{{path: {first}, weight: 3}}, {{path: {second}, name: other}}]"
    arguments = [*SHORT, ONE_TERM, "data.sources=[]", stores]
    text = pool.run(
        1, _sample_numbers, dense, [*arguments, f"output={tmp_path}"],
    )[0]  # fmt: skip
    of_first = [number for number in text if number < STEPS * ROWS]
    assert len(of_first) == 3 * (len(text) - len(of_first))
    # Each store is a source of its own in the log.
    held_out = ("validation.samples=9", "train.steps=2", "schedule.warmup_steps=0")
    run(pool, 1, dense, tmp_path / "log", *arguments, *held_out)
    *steps, last = records(tmp_path / "log")
    for record in (*steps, last["validation"]):
        sources = record["sources"]
        assert list(sources) == [first.name, "other"]
        tokens = [one["kd_tokens"] for one in sources.values()]
        losses = [one["kd_loss"] for one in sources.values()]
        merged = sum(n * loss for n, loss in zip(tokens, losses, strict=True)) / sum(tokens)
        assert merged == pytest.approx(record["kd_loss"], rel=2e-6)


def _sample_numbers(rank: int, world: int, config: Path, overrides: list[str]) -> list[int]:
    """The samples of four steps; also shows that nothing but the store is the teacher."""
    from megatron_distill.train.teachers.stored import StoredTeacher

    with assembled(rank, world, config, overrides) as (_, parts):
        assert isinstance(parts.teacher, StoredTeacher)
        steps = [parts.loader.take(step) for step in range(1, 5)]
        return [
            number
            for step in steps
            for batch in step.micro_batches
            for number in batch.sample_ids_b.tolist()
        ]


@pytest.mark.slow
def test_maxtexts_files_train_as_far_as_they_know(
    pool: Pool, dense: Path, train: Callable[..., Course], tmp_path: Path
) -> None:
    """k logits and nothing else: renormalised terms, no tail, and no word of the teacher's own."""
    contents = [
        example(sequence(number, length=33, k=5, vocab_size=301)) for number in range(STEPS * ROWS)
    ]
    identity = Identity(teacher=UNKNOWN, tokenizer=UNKNOWN, dataset=UNKNOWN)
    file = write(tmp_path / "part.array_record", contents)
    convert_maxtext([file], tmp_path / "store", vocab_size=301, identity=identity)
    own = ("data.sources=[]", f"teacher.store={tmp_path / 'store'}", "teacher.architecture=null")
    term = "{divergence: forward_kl, support: renormalized, temperature: 2.0}"
    course = train(1, *own, f"objective.terms=[{term}]", "train.steps=12")
    assert course[-1]["kd_loss"] < course[0]["kd_loss"]
    assert not {"teacher_ce_loss", "teacher_entropy"} & course[0].keys()
    assert {"top1_agreement", "student_entropy"} <= course[0].keys()
    text = failure(pool, 2, dense, tmp_path / "tail", *SHORT, *own)
    assert "cannot serve support tail (it lacks log_tail, log_sum_exp" in text
    assert "it serves renormalized" in text

"""A teacher with its own layout: losses and gradient norms are those of the shared layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.distributed.pool import Pool
from tests.e2e.runs import (
    CONTEXT,
    MEANS_NAMES,
    MEANS_TERMS,
    PIPELINE,
    SEQUENCE,
    TENSOR,
    VIRTUAL,
    Course,
    Inputs,
    KnownRuns,
    assembled,
    assert_same_course,
    quick_and_slow,
    records,
    run,
)
from tests.e2e.teachers.test_teacher_ranks import OF_MAPS, SENT, TOP_K
from tests.e2e.training.test_features import MAPS
from tests.e2e.training.test_layouts import TERMS
from tests.support.peaks import least_peak

STEPS = ("train.steps=5", "schedule.warmup_steps=1")
VALIDATED = ("validation.interval=5", "validation.samples=8")
EXPERTS = "teacher.architecture.moe={num_experts: 4, top_k: 2, ffn_hidden_size: 24}"
# The order of the last stage's layers reversed, from both stages of either model.
FEATURES = (
    "objective.features=[{student: 1, teacher: 2, loss: cosine}, "
    "{student: 4, teacher: 1, loss: mse}]"
)
SCHEDULED = (
    "objective.balance={mode: magnitude, raw_losses: previous, ema: 0.5, "
    "alpha_schedule: {to: 2.0, steps: 4}}"
)
EACH = "objective.balance={mode: magnitude, per_microbatch: true}"
NAMES = ("ce_loss", "kd_loss", "grad_norm", "top1_agreement")


@pytest.fixture(scope="module")
def train(pool: Pool, inputs: Inputs) -> Callable[..., Course]:
    return KnownRuns(pool, inputs, "teacher-layout", *STEPS, validations=True)


# Ranks, the student's layout and loss, the teacher's layout, and whether all kernels see the same
# shapes as in the shared layout.
CASES: dict[str, tuple[int, Sequence[str], str, bool]] = {
    "t2 with a split sequence to t1": (2, (), "tensor: 2, sequence: true", False),
    "t1 to t2 with a split sequence": (2, (TENSOR, SEQUENCE), "tensor: 1", False),
    "p1 to p2, virtual": (2, (PIPELINE, VIRTUAL), "pipeline: 1", True),
    "c2 to c1": (2, (), "context: 2", False),
    "c1 to c2": (2, (CONTEXT,), "context: 1", False),
    "e2 to t2": (2, (TENSOR, SEQUENCE, EXPERTS), "expert: 2", False),
    "d4 to d1": (4, (TENSOR, SEQUENCE, PIPELINE), "tensor: 1", False),
    "c2 t2 to p2 d2": (4, (PIPELINE,), "context: 2, tensor: 2, sequence: true", False),
    "p2 to c2 t2": (4, (CONTEXT, TENSOR, SEQUENCE), "pipeline: 2", False),
    "six terms": (4, (TERMS, TENSOR, SEQUENCE, PIPELINE), "context: 2", False),
    "features, p2 to p1": (2, (FEATURES,), "pipeline: 2", True),
    "features, c2 p2 to t2 p2": (
        4, (FEATURES, TENSOR, SEQUENCE, PIPELINE), "context: 2, pipeline: 2", False,
    ),
    "balanced": (2, (PIPELINE, "objective.balance.mode=magnitude"), "pipeline: 1", True),
    "balanced in each micro-batch": (2, (PIPELINE, FEATURES, EACH), "pipeline: 1", True),
    "balanced by gradient norms": (
        2, (PIPELINE, FEATURES, "objective.balance.mode=gradient_norm"), "pipeline: 1", True,
    ),
    "balanced by the step before, in a schedule": (
        2, (PIPELINE, FEATURES, SCHEDULED), "pipeline: 1", True,
    ),
    "more rows in the teacher's vocabulary": (
        2, ("teacher.architecture.vocab_divisible_by=8", TENSOR), "tensor: 1", False,
    ),
}  # fmt: skip
QUICK = ("p1 to p2, virtual",)


@pytest.mark.parametrize("case", quick_and_slow(CASES, QUICK))
def test_five_steps_are_those_of_the_shared_layout(train: Callable[..., Course], case: str) -> None:
    world, common, layout, is_exact = CASES[case]
    expected = train("dense", world, *VALIDATED, *common)
    found = train("dense", world, *VALIDATED, *common, f"teacher.parallel={{{layout}}}")
    assert expected[0]["kd_loss"] > 0.3
    assert_same(found, expected, is_exact=is_exact)


@pytest.mark.slow
def test_replicas_of_both_need_not_divide_each_other(dense: Path, tmp_path: Path) -> None:
    """Three stages of two teacher replicas, two stages of three student replicas: six ranks."""
    common = (*STEPS, *VALIDATED, PIPELINE, FEATURES, "train.global_batch_size=12")
    common += ("teacher.architecture.num_layers=3",)
    own = "teacher.parallel={pipeline: 3}"
    layouts = {
        "shared": (), "own": (own,), "shared, ids": (TOP_K,), "own, ids": (TOP_K, SENT, own),
    }  # fmt: skip
    with closing(Pool(6)) as six_ranks:
        for name, further in layouts.items():
            run(six_ranks, 6, dense, tmp_path / name, *common, *further)
    shared, found, live, moved = (records(tmp_path / name) for name in layouts)
    assert shared[0]["features_loss"] > 0.1
    assert_same(found, shared, is_exact=True)
    for ours, other in zip(found, shared, strict=True):
        assert ours.get("features_loss") == other.get("features_loss")
    steps, _ = zip(*map(_divided, (moved, live)), strict=True)
    assert_same_course(*steps, ("kd_loss", "features_loss", "grad_norm"), last=2e-4)


def assert_same(found: Course, expected: Course, *, is_exact: bool) -> None:
    """Compare the records of steps, and those of the held-out losses at the end."""
    steps, held_out = zip(*map(_divided, (found, expected)), strict=True)
    (ours,), (other,) = held_out
    assert ours["validation"]["kd_loss"] == pytest.approx(other["validation"]["kd_loss"], rel=1e-4)
    if is_exact:
        names = ("step", *NAMES)
        ours, other = ([{n: record[n] for n in names} for record in some] for some in steps)
        assert ours == other
        assert held_out[0][0]["validation"] == held_out[1][0]["validation"]
    else:
        assert_same_course(*steps)


def _divided(records: Course) -> tuple[Course, Course]:
    return (
        [record for record in records if "validation" not in record],
        [record for record in records if "validation" in record],
    )


OFFLOADED = "teacher.offload_hidden=true"
# Ranks, the student's layout, and the teacher's, whose last stage chooses the ids.
OF_TOP_K: dict[str, tuple[int, Sequence[str], str]] = {
    "p1 to p2, virtual": (2, (PIPELINE, VIRTUAL), "pipeline: 1"),
    "t2 with a split sequence to t1": (2, (), "tensor: 2, sequence: true"),
    "t1 to t2 with a split sequence": (2, (TENSOR, SEQUENCE), "tensor: 1"),
    "p2 to c2": (2, (CONTEXT,), "pipeline: 2"),
    "p2 to p1": (2, (), "pipeline: 2"),
    "c2 to c1": (2, (), "context: 2"),
    "c2 to p2, host memory": (2, (PIPELINE, OFFLOADED), "context: 2"),
    "e2 to t2": (2, (TENSOR, SEQUENCE, EXPERTS), "expert: 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", quick_and_slow(OF_TOP_K, []))
def test_a_moved_top_k_gives_the_losses_of_hidden_states(
    train: Callable[..., Course], case: str
) -> None:
    world, common, layout = OF_TOP_K[case]
    live = (EXPERTS,) if EXPERTS in common else ()
    expected = train("dense", 2, *VALIDATED, TOP_K, *live)
    found = train(
        "dense", world, *VALIDATED, TOP_K, *common, SENT, f"teacher.parallel={{{layout}}}"
    )
    steps, held_out = zip(*map(_divided, (found, expected)), strict=True)
    assert_same_course(*steps, ("ce_loss", "kd_loss", "grad_norm"), last=2e-4)
    (ours,), (other,) = held_out
    assert ours["validation"]["kd_loss"] == pytest.approx(other["validation"]["kd_loss"], rel=2e-4)
    assert found[0]["teacher_entropy"] == pytest.approx(expected[0]["teacher_entropy"], rel=1e-5)


KEY_HEADS = "teacher.architecture.num_kv_heads=1"
RECOMPUTED = "train.recompute=full"
# As `CASES`.
WITH_MAPS: dict[str, tuple[int, Sequence[str], str, bool]] = {
    "t1 to t2 with a split sequence": (2, (TENSOR, SEQUENCE), "tensor: 1", False),
    "t2 to c2": (2, (CONTEXT,), "tensor: 2", False),
    "c2 to t2, shared key heads": (2, (TENSOR, KEY_HEADS), "context: 2", False),
    "p1 to p2, virtual, recomputed": (2, (PIPELINE, VIRTUAL, RECOMPUTED), "pipeline: 1", True),
    "host memory": (2, (PIPELINE, "teacher.offload_hidden=true"), "pipeline: 1", True),
    "c2 t2 to p2 d2": (4, (PIPELINE,), "context: 2, tensor: 2, sequence: true", False),
}  # fmt: skip


@pytest.mark.parametrize("case", quick_and_slow(WITH_MAPS, []))
def test_attention_maps_are_those_of_the_shared_layout(
    train: Callable[..., Course], case: str
) -> None:
    world, common, layout, is_exact = WITH_MAPS[case]
    given = (*VALIDATED, MAPS, *common)
    expected = train("dense", world, *given)
    found = train("dense", world, *given, f"teacher.parallel={{{layout}}}")
    assert_same(found, expected, is_exact=is_exact)
    for ours, other in zip(found, expected, strict=True):
        ours, other = ours.get("validation", ours), other.get("validation", other)
        for name in OF_MAPS:
            tolerance = 0.0 if is_exact else 1e-6 if ours.get("step") == 1 else 2e-4
            assert ours[name] == pytest.approx(other[name], rel=tolerance), (ours, name)
            assert ours[name] > 1e-3, name


ALIGNED: dict[str, tuple[int, Sequence[str], str]] = {
    "t2 to c2": (2, (CONTEXT,), "tensor: 2, sequence: true"),
    "p2 to t2": (2, (TENSOR, SEQUENCE), "pipeline: 2"),
    "c2 to p2": (2, (PIPELINE,), "context: 2"),
    "t2 to c2, chunk means": (2, (CONTEXT, MEANS_TERMS), "tensor: 2, sequence: true"),
    "c2 to p2, chunk means": (2, (PIPELINE, MEANS_TERMS), "context: 2"),
}


@pytest.mark.parametrize("case", quick_and_slow(ALIGNED, []))
def test_terms_between_two_tokenizers_are_those_of_the_shared_layout(
    train: Callable[..., Course], case: str
) -> None:
    world, common, layout = ALIGNED[case]
    given = (*VALIDATED, *common, FEATURES)
    expected = train("aligned", world, *given)
    found = train("aligned", world, *given, f"teacher.parallel={{{layout}}}")
    assert_same(found, expected, is_exact=False)
    assert expected[0]["features_loss"] > 0.01
    names = ("features_loss", "feature_mse_4_1")
    names += MEANS_NAMES if MEANS_TERMS in common else ("likelihood_js_divergence_t6",)
    assert_same_course(found[:1], expected[:1], names)


def bytes_and_peak(
    rank: int, world: int, config_path: Path, overrides: Sequence[str]
) -> tuple[int, int, int]:
    """Bytes that this rank sends in a step, those of all ranks by formula, and the peak memory."""
    with assembled(rank, world, config_path, overrides) as (config, parts):
        from megatron_distill.train.teachers.own_layout import OwnLayout

        teacher, batches = parts.teacher, parts.loader.take(1).micro_batches
        assert isinstance(teacher, OwnLayout)

        def take() -> None:
            for _ in teacher.signals(batches):
                pass

        take()  # what is allocated once exists after this
        sent: list[int] = []

        def counted(operations: Sequence[dist.P2POp]) -> list[dist.Work]:
            sent.extend(x.tensor.nbytes for x in operations if x.op is dist.isend)
            return started(operations)

        started = dist.batch_isend_irecv
        with patch.object(dist, "batch_isend_irecv", counted):
            take()
        size = config.train.micro_batch_size
        return sum(sent), teacher.moved_bytes(len(batches), size), least_peak(take)


# The student's layout, the teacher's, and rows of a sequence of 32 that move for each unit. Each
# tensor rank of the student needs the ids of all its positions.
MOVED: dict[str, tuple[Sequence[str], str, int]] = {
    "each rank has its half": ((), "tensor: 2, sequence: true", 16),
    "both ranks have all": ((), "tensor: 2", 0),
    "pieces of context ranks": ((), "context: 2", 16),
    "every other unit is whole elsewhere": ((TENSOR,), "tensor: 1", 32),
    "one of two parts is elsewhere": ((TENSOR, SEQUENCE), "tensor: 1", 16),
    "ids, both ranks have all": ((), "tensor: 2, sequence: true", 0),
    "ids, pieces of context ranks": ((), "context: 2", 16),
    "ids, every other unit is whole elsewhere": ((TENSOR, SEQUENCE), "tensor: 1", 32),
}
QUICK_MOVED = ("one of two parts is elsewhere", "ids, pieces of context ranks")


@pytest.mark.parametrize("case", quick_and_slow(MOVED, QUICK_MOVED))
def test_a_step_sends_the_bytes_of_the_formula(pool: Pool, inputs: Inputs, case: str) -> None:
    common, layout, rows = MOVED[case]
    # A hidden state; or k ids, k log-probabilities, two sums for each of two temperatures, two of
    # the whole.
    kept, numbers = ((TOP_K, SENT), 8 + 8 + 2 * 2 + 2) if case.startswith("ids") else ((), 40)
    overrides = [*STEPS, *kept, *common, f"teacher.parallel={{{layout}}}"]
    overrides.append(f"output={inputs.folder}/moved")
    found = pool.run(2, bytes_and_peak, inputs.folder / "dense.yaml", overrides)
    units, size = 4, 2
    expected = units * rows * size * 4 * numbers
    assert sum(sent for sent, _, _ in found) == expected
    assert {formula for _, formula, _ in found} == {expected}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor: 2, sequence: true", "pipeline: 2"])
def test_with_one_stage_a_steps_memory_does_not_grow_with_its_micro_batches(
    pool: Pool, inputs: Inputs, layout: str
) -> None:
    peaks = []
    for batch in (8, 32):
        overrides = [
            *STEPS,
            f"train.global_batch_size={batch}",
            f"teacher.parallel={{{layout}}}",
            f"output={inputs.folder}/peak",
        ]
        found = pool.run(2, bytes_and_peak, inputs.folder / "dense.yaml", overrides)
        peaks.append([peak for _, _, peak in found])
    few, many = peaks
    assert all(b <= 1.05 * a for a, b in zip(few, many, strict=True)), peaks


@pytest.mark.slow
def test_a_resumed_run_may_change_the_teachers_layout(pool: Pool, inputs: Inputs) -> None:
    shared, config = (
        ("schedule.warmup_steps=1", "checkpoint.save=true"),
        inputs.folder / "dense.yaml",
    )
    whole = run(pool, 2, config, inputs.folder / "unbroken", *shared, "train.steps=4", PIPELINE)
    folder = inputs.folder / "resumed"
    layouts = (PIPELINE, "teacher.parallel={pipeline: 1}"), (PIPELINE, "teacher.parallel=null")
    for number, overrides in enumerate(layouts):
        stop = 2 if number == 0 else None
        run(pool, 2, config, folder, *shared, "train.steps=4", *overrides, stop_after=stop)
    found = [record for record in records(folder) if "validation" not in record]
    assert [[record[n] for n in NAMES] for record in found] == [
        [record[n] for n in NAMES] for record in whole
    ]

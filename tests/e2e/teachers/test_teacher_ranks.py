"""A teacher on ranks of its own gives the course of the same run on shared ranks."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_distill.config import load_config
from megatron_distill.train.reports.planned_run import (
    configured_choice,
    open_shapes,
    planned_run,
)
from tests.distributed.pool import Pool
from tests.e2e.runs import (
    SECONDS,
    VIRTUAL,
    Course,
    Inputs,
    KnownRuns,
    layout,
    quick_and_slow,
    records,
    run,
)
from tests.e2e.teachers.roles import log_in_roles, passes_in_roles, run_apart, train_in_roles
from tests.e2e.training.test_features import MAPS
from tests.e2e.training.test_layouts import TERMS

GLOO = "teacher.transfer.backend=gloo"
TOP_K = (
    "objective.terms=[{top_k: 8}, {top_k: 6, temperature: 2.0, divergence: reverse_kl}, "
    "{top_k: 8, temperature: 3.0, support: renormalized}]"
)
SENT = "teacher.transfer={what: top_k, k: 8}"
SHORT = ("train.steps=6", "validation.samples=16", "validation.interval=3")
QUANTITIES = ("ce_loss", "kd_loss", "total_loss", "grad_norm")


def assert_same(
    found: Course,
    expected: Course,
    *,
    first: float = 1e-6,
    later: float = 2e-4,
    names: Sequence[str] = QUANTITIES,
) -> None:
    """Compare losses and gradients of steps and validations, within relative distances."""
    assert len(found) == len(expected)
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        ours, theirs = ours.get("validation", ours), theirs.get("validation", theirs)
        for name in names:
            if name in theirs:
                tolerance = first if index == 0 else later
                assert ours[name] == pytest.approx(theirs[name], rel=tolerance), (index, name)


def shared(pool: Pool, world: int, config: Path, output: Path, *overrides: str) -> Course:
    """Return every record of the run on shared ranks."""
    run(pool, world, config, output, *overrides)
    return records(output)


def of_roles(case: str) -> tuple[int, int, tuple[str, ...]]:
    """Ranks of the student and of the teacher, and overrides, of "TP2+sequence and PP2, remark".

    With the remark "gloo" answers go by the network, else by memory that both sides have mapped.
    """
    layouts = [layout(one) for one in case.partition(",")[0].split(" and ")]
    (students, own), (teachers, others) = layouts
    own = (*own, GLOO) if case.endswith(", gloo") else own
    if set(others) == {one for one in own if one != VIRTUAL}:
        return students, teachers, own  # the student's layout is the default
    values = [one.removeprefix("parallel.").replace("=", ": ") for one in others]
    return students, teachers, (*own, f"teacher.parallel={{{', '.join(values) or 'tensor: 1'}}}")


@pytest.fixture(scope="module")
def shared_ranks(pool: Pool, inputs: Inputs) -> KnownRuns:
    """Every record of runs whose models are on the same ranks."""
    return KnownRuns(pool, inputs, "shared-ranks", *SHORT, validations=True)


def runs_of_roles(
    pool: Pool, inputs: Inputs, known: KnownRuns, folder: Path, case: str, *both: str,
    own: Sequence[str] = (), name: str = "dense", ranks: int = 1,
) -> tuple[Course, Course]:  # fmt: skip
    """The run with a teacher on ranks of its own, and the same on shared ranks.

    These are one, or as many as the student's in its layout.
    """
    students, teachers, layouts = of_roles(case)
    given = (*SHORT, *both, *layouts, *own)
    config = inputs.folder / f"{name}.yaml"
    found = run_apart(pool, students, teachers, config, folder / "apart", *given)
    same = () if ranks == 1 else layout(case.partition(" and ")[0])[1]
    return found, known(name, ranks, *both, *same)


EXACT = {"first": 0.0, "later": 0.0}
# The ranks of both models in the run in which all kernels see the same shapes; None: in none.
LAYOUTS: dict[str, int | None] = {
    "1 and 1": 1, "TP2+sequence and 1, gloo": None, "1 and TP2+sequence": None, "DP2 and 1": 2,
    "DP2 and DP2, gloo": 2, "1 and DP3": 1, "PP2+virtual and 1": 2, "CP2 and 1, gloo": None,
    "1 and CP2": None, "TP2+sequence and TP2+sequence": 2, "1 and PP2": 1,
}  # fmt: skip


@pytest.mark.parametrize("case", quick_and_slow(LAYOUTS, ["1 and DP3"]))
def test_the_course_is_that_of_shared_ranks(
    pool: Pool, inputs: Inputs, shared_ranks: KnownRuns, tmp_path: Path, case: str
) -> None:
    ranks = LAYOUTS[case]
    found, expected = runs_of_roles(
        pool, inputs, shared_ranks, tmp_path, case, ranks=1 if ranks is None else ranks
    )
    assert_same(found, expected, **({} if ranks is None else EXACT))


AHEAD = "teacher.steps_ahead=2"
# Settings of both runs, and of the second alone.
WAYS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "0 ahead": ((), ("teacher.steps_ahead=0",)),
    "network, 2 ahead": ((), (AHEAD, GLOO)),
    "top-k, network, 2 ahead": ((SENT, TOP_K), (AHEAD, GLOO)),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_neither_steps_ahead_nor_the_way_change_a_bit(
    pool: Pool, inputs: Inputs, tmp_path: Path, way: str
) -> None:
    (common, other), config = WAYS[way], inputs.folder / "dense.yaml"
    given = (*SHORT, *of_roles("TP2+sequence and 1")[2], *common)
    usual = inputs.folder / f"usual-{len(common)}"
    if not usual.exists():  # it is there after the first case
        run_apart(pool, 2, 1, config, usual, *given)
    expected = records(usual)
    found = run_apart(pool, 2, 1, config, tmp_path / "other", *given, *other)
    assert_same(found, expected, **EXACT)


OF_TOP_K = (
    "TP2+sequence and PP2", "PP2+virtual and TP2+sequence, gloo", "1 and CP2", "DP2 and 1",
    "1 and PP2", "1 and TP2+sequence", "TP2+sequence and 1, gloo", "PP2+virtual and 1",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_TOP_K)
def test_a_sent_top_k_gives_the_losses_of_a_live_one(
    pool: Pool, inputs: Inputs, shared_ranks: KnownRuns, tmp_path: Path, case: str
) -> None:
    found, expected = runs_of_roles(pool, inputs, shared_ranks, tmp_path, case, TOP_K, own=[SENT])
    assert_same(found, expected)
    assert found[0]["teacher_entropy"] == pytest.approx(expected[0]["teacher_entropy"], rel=1e-5)


FEATURES = (
    "objective.features=[{student: 1, teacher: 2, weight: 0.5}, "
    "{student: 3, teacher: 1, loss: cosine}, {match: uniform, loss: cosine, weight: 0.7}]"
)
OF_FEATURES = ("features_loss", "feature_mse_1_2", "feature_cosine_4_2", "projector_grad_norm")
SCHEDULED = "objective.balance.mode=schedule"
# Losses whose weights, temperatures or numbers of passes change with the steps.
CHANGING: dict[str, Sequence[str]] = {
    "magnitude": ("objective.balance.mode=magnitude",),
    "gradient norms": ("objective.balance.mode=gradient_norm", "{features}"),
    "magnitude of each micro-batch": (
        "objective.balance={mode: magnitude, per_microbatch: true}", "{features}",
    ),
    "magnitude of the step before": (
        "objective.balance={mode: magnitude, raw_losses: previous, ema: 0.5}", "{features}",
    ),
    "schedules": (
        "objective.balance={mode: schedule, alpha_schedule: {to: 2.0, steps: 4}}",
        "objective.ce_weight_schedule={to: 0.5, steps: 4}",
        "objective.terms=[{temperature: 3.0, temperature_schedule: {to: 1.0, steps: 4}}, "
        "{divergence: adaptive_kl, weight_schedule: {to: 0.2, steps: 3, kind: cosine}}]",
    ),
    "every other divergence and support": (
        f"{TERMS[:-1]}, {{divergence: squared_hellinger}}, {{divergence: reverse_kl}}]",
    ),
    "top-k in schedules": (
        SCHEDULED, SENT,
        "objective.terms=[{top_k: 8, weight_schedule: {to: 0.2, steps: 3}}, {top_k: 6, "
        "support: renormalized, temperature: 3.0, temperature_schedule: {to: 1.0, steps: 4}}]",
    ),
    "top-k by gradient norms": (
        "objective.balance.mode=gradient_norm", SENT, "objective.terms=[{top_k: 8, support: raw}]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", quick_and_slow(CHANGING, []))
def test_losses_that_change_with_the_steps_are_those_of_shared_ranks(
    pool: Pool, inputs: Inputs, shared_ranks: KnownRuns, tmp_path: Path, case: str
) -> None:
    given = [FEATURES if one == "{features}" else one for one in CHANGING[case]]
    sent, live = ([one for one in given if (one == SENT) == is_sent] for is_sent in (True, False))
    found, expected = runs_of_roles(
        pool, inputs, shared_ranks, tmp_path, "1 and 1", *live, own=sent
    )
    names = (*QUANTITIES, *OF_FEATURES, "balance")
    assert_same(found, expected, **({} if sent else EXACT), names=names)


EXPERTS = "teacher.parallel={expert: 2}"
SPREAD = {
    "experts": (EXPERTS,), "gloo": (EXPERTS, GLOO), "top-k": (EXPERTS, SENT),
    "top-k, gloo": (EXPERTS, SENT, GLOO), "shards": ("teacher.shard_weights=true",),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("spread", SPREAD)
def test_weights_of_a_teacher_are_spread_over_its_replicas(
    pool: Pool, inputs: Inputs, shared_ranks: KnownRuns, tmp_path: Path, spread: str
) -> None:
    # Three units of the student's step on two replicas: one runs a unit again.
    experts = "teacher.architecture.moe={num_experts: 4, top_k: 2, ffn_hidden_size: 24}"
    odd = (experts, "train.global_batch_size=6", TOP_K)
    own = SPREAD[spread]
    assert_same(*runs_of_roles(pool, inputs, shared_ranks, tmp_path, "1 and DP2", *odd, own=own))


@dataclass(frozen=True)
class Held:
    """Counts of a process: Python's blocks of memory, living tensors, threads and open files."""

    blocks: int
    tensors: int
    threads: int
    files: int

    @classmethod
    def now(cls) -> Held:
        """Count, after a collection."""
        gc.collect()
        is_tensor = [issubclass(type(one), torch.Tensor) for one in gc.get_objects()]
        files = len(list(Path("/proc/self/fd").iterdir()))
        return cls(sys.getallocatedblocks(), sum(is_tensor), threading.active_count(), files)


def held_in_roles(
    rank: int, world: int, config: Path, overrides: Sequence[str], steps: Sequence[int]
) -> list[Held]:
    """Run one training; returns what this rank holds after some steps."""
    from megatron_distill.train.loop import StepGarbage
    from megatron_distill.train.teachers.serving import TeacherServer

    found: list[Held] = []
    turns = count(1)

    def noting(usual: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            result = usual(*given)
            if next(turns) in steps:
                found.append(Held.now())
            return result

        return noted

    with (
        patch.object(StepGarbage, "after_step", noting(StepGarbage.after_step)),
        patch.object(TeacherServer, "_run", noting(TeacherServer._run)),
    ):
        train_in_roles(rank, world, config, overrides, None)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", ["1 and 1, fast", "PP2 and 1, slow"])
def test_memory_does_not_grow(pool: Pool, dense: Path, tmp_path: Path, case: str) -> None:
    (students, teachers, own), layers = of_roles(case), 24 if case.endswith("slow") else 1
    given = [f"output={tmp_path}", "teacher.ranks=1", "train.steps=200", *own]
    given += [f"teacher.architecture.num_layers={layers}", "logging.timers_interval=100"]
    looks = (120, 190)
    held = pool.run(students + teachers, held_in_roles, dense, given, looks, timeout=SECONDS)
    for before, after in held:
        grown = after.blocks - before.blocks
        assert grown < 5 * (looks[1] - looks[0]), (before, after)
        assert after.tensors - before.tensors < 20, (before, after)  # of units under way
        assert after.threads == before.threads
        assert abs(after.files - before.files) < 4  # the corpus, while it is read
    found = records(tmp_path)
    assert len(found) == 200
    peaks = [record["peak_memory_bytes"] for record in found]
    assert peaks[-1] - peaks[40] < 4e6, peaks[::20]
    # A slow teacher computes for most of its time, a fast one waits for the student.
    timers = [record["teacher_timers"]["teacher"] for record in found[100:]]
    computed, waited = (median(one[phase] for one in timers) for phase in ("forward", "waiting"))
    assert (computed > waited) == (layers == 24), (computed, waited)


@pytest.mark.slow
def test_it_resumes_on_shared_ranks_and_back(pool: Pool, dense: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    saved = ("train.steps=12", "checkpoint.save=true")
    run_apart(pool, 1, 1, dense, output, *saved, stop_after=4)
    run(pool, 1, dense, output, *saved, stop_after=4)
    after = run_apart(pool, 2, 2, dense, output, *saved)
    expected = shared(pool, 1, dense, tmp_path / "shared", *saved)
    assert [record["step"] for record in after] == list(range(1, 13))
    assert_same(after, expected, first=0.0, later=2e-5)


@pytest.fixture(scope="module")
def five_ranks() -> Iterator[Pool]:
    """Five gloo workers, for two and three replicas."""
    with closing(Pool(5)) as workers:
        yield workers


# Replicas of the student and of the teacher, and what is sent.
REPLICAS: dict[str, tuple[int, int, Sequence[str]]] = {
    "d3 to d2": (2, 3, (GLOO,)), "d2 to d3": (3, 2, ()), "d2 to d3, top-k": (3, 2, (SENT,)),
    "d2 to d3, gloo": (3, 2, (GLOO,)), "d2 to d3, top-k, gloo": (3, 2, (SENT, GLOO)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", REPLICAS)
def test_numbers_of_replicas_need_not_divide_each_other(
    pool: Pool, five_ranks: Pool, dense: Path, tmp_path: Path, case: str
) -> None:
    students, teachers, sent = REPLICAS[case]
    output = tmp_path / "apart"
    common = (*SHORT, "train.global_batch_size=12", *([TOP_K] if SENT in sent else []))
    found = run_apart(five_ranks, students, teachers, dense, output, *common, *sent)
    expected = shared(pool, students, dense, tmp_path / "shared", *common)
    assert_same(found, expected, **({} if SENT in sent else EXACT))


# Settings of this run, and of both.
AT_ONCE = ("teacher.steps_ahead=0",)
WITH_FEATURES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "1 and 1, 0 ahead": (AT_ONCE, ()),
    "PP2+virtual and DP2, recomputed": (("train.recompute=full",), ()),
    "TP2+sequence and PP2, gloo": ((), ()),
    "CP2 and TP2+sequence": ((), ()),
    "PP2 and PP2, uneven stages": (
        ("parallel.layers_per_stage={student: [1, 3], teacher: [3, 1]}",),
        ("teacher.architecture.num_layers=4",),
    ),
    "PP2 and PP2, top-k": ((SENT,), ("objective.terms=[{top_k: 8}]",)),
    "PP2 and PP2, without terms": ((), ("objective.terms=[]",)),
}


OF_MAPS = ("features_loss", "feature_attention_2_1", "feature_mse_1_2", "feature_attention_4_2")
WITH_MAPS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "1 and 1, gloo": ((), ()),
    "TP2 and TP2, shared key heads": ((), ("teacher.architecture.num_kv_heads=1",)),
    "CP2 and TP2": ((), ()),
    "TP2 and CP2": ((), ()),
    "PP2 and PP2, top-k": ((SENT,), ("objective.terms=[{top_k: 8}]",)),
}


# Losses, their names in the log, and the least of one; maps are made of sent queries and keys.
OF_LAYERS = {
    "states": (WITH_FEATURES, FEATURES, OF_FEATURES, ("features_loss", 0.1)),
    "maps": (WITH_MAPS, MAPS, OF_MAPS, (OF_MAPS[1], 1e-3)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for kind, (cases, *_) in OF_LAYERS.items() for case in cases]
)
def test_feature_losses_get_their_layers_from_the_stage_that_has_them(
    pool: Pool, inputs: Inputs, shared_ranks: KnownRuns, tmp_path: Path, kind: str, case: str
) -> None:
    cases, losses, names, (one, least) = OF_LAYERS[kind]
    own, both = cases[case]
    found, expected = runs_of_roles(
        pool, inputs, shared_ranks, tmp_path, case, losses, *both, own=own
    )
    exact = EXACT if case.startswith("1 and 1") else {}
    assert_same(found, expected, **exact, names=(*QUANTITIES, *names))
    assert all(record[one] > least for record in found if "validation" not in record)


@pytest.mark.slow
def test_a_stage_of_several_chunks_decodes_an_answer_once(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    given = [f"output={tmp_path}", "teacher.ranks=1", *of_roles("PP2+virtual and 1")[2]]
    given += [SENT, TOP_K, "train.steps=3"]
    found = pool.run(3, passes_in_roles, dense, given, timeout=SECONDS)
    assert [read for _, _, read in found] == [0, 3 * 4, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "layers"), [((), (3, 1)), ((SENT, TOP_K), (2, 2))])
def test_the_stages_of_a_run_are_those_of_its_plan(
    pool: Pool, inputs: Inputs, tmp_path: Path, sent: tuple[str, ...], layers: tuple[int, ...]
) -> None:
    """The teacher's head counts where hidden states are sent: the student's losses run it."""
    sizes = ("student.architecture.ffn_hidden_size=96", "teacher.architecture.hidden_size=80")
    given = [f"output={tmp_path}", "teacher.ranks=1", *of_roles("PP2 and 1")[2], *sizes, *sent]
    path = inputs.folder / "dense.yaml"
    config, rows = load_config(path, given), 301  # of the tokenizer of `inputs`
    planned = planned_run(config, open_shapes(config, rows={"student": rows, "teacher": rows}))
    assert configured_choice(config, planned, ranks=2, teachers=1).layers == layers
    text = pool.run(3, log_in_roles, path, [*given, "train.steps=1"], timeout=SECONDS)[0]
    assert ("student: 3, 1 layers per pipeline stage" in text) == (layers == (3, 1)), text
    assert len(records(tmp_path)) == 1

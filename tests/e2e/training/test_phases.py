"""The phases of real runs: they add up to the step, a trace shows them, a slow rank is named."""

from __future__ import annotations

import gzip
import json
import re
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_distill.launching.status.read import read_status
from megatron_distill.train.phase_timers import TEACHER_PHASES, PhaseTimers
from tests.distributed.pool import Pool
from tests.e2e.runs import SECONDS, course, logged, quick_and_slow, run, step_records
from tests.e2e.teachers.roles import log_in_roles

STEPS, MICRO_BATCHES = 6, 4
SHORT = (f"train.steps={STEPS}", "schedule.warmup_steps=1")
WATCHED = (
    "logging.timers_interval=2", "logging.straggler_interval=3",
    "profile={steps: [2, 4, 5], ranks: [0, 7]}",
)  # fmt: skip
PIPELINE = ("parallel.pipeline=2", "parallel.virtual_pipeline=2")
# World, overrides, and the ranges of a step on rank 0.
CASES: dict[str, tuple[int, Sequence[str], dict[str, int]]] = {
    "one rank": (
        1,
        (),
        {"teacher": 1 + MICRO_BATCHES, "forward": MICRO_BATCHES, "loss": MICRO_BATCHES},
    ),
    # The teacher has run all of its micro-batches; taking a signal takes no time.
    "virtual stages": (
        2,
        PIPELINE,
        {"teacher": 1 + MICRO_BATCHES, "forward": 2 * MICRO_BATCHES, "loss": 0},
    ),
}
SLOW_RANK, SLOW_SECONDS = 1, 0.05


def trace_events(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace."""
    with gzip.open(path, "rt") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


@pytest.mark.parametrize("case", quick_and_slow(CASES, []))
def test_phases_add_up_and_watching_changes_no_loss(
    pool: Pool, dense: Path, tmp_path: Path, case: str
) -> None:
    world, overrides, expected = CASES[case]
    plain = run(pool, world, dense, tmp_path / "plain", *SHORT, *overrides)
    watched = run(pool, world, dense, tmp_path / "watched", *SHORT, *overrides, *WATCHED)
    assert course(watched) == course(plain)
    outside = []
    for record in watched:
        phases, milliseconds = record["timers"], 1000.0 * record["step_seconds"]
        assert all(value >= 0.0 for value in phases.values())
        assert sum(phases.values()) <= milliseconds
        outside.append(milliseconds - sum(phases.values()) + phases["other"])
        assert record["teacher_seconds"] == pytest.approx(phases["teacher"] / 1000.0)
    assert min(outside) < 0.1 * milliseconds
    shown = [phase for phase, value in watched[-1]["timers"].items() if value > 0.0]
    silent = [] if expected["loss"] else ["loss"]
    assert [phase for phase in watched[-1]["timers"] if phase not in shown] == silent
    assert [record["step"] for record in watched if "timers_min" in record] == [2, 4, 6]
    for phase, least in watched[1]["timers_min"].items():
        own = (watched[0]["timers"][phase] + watched[1]["timers"][phase]) / 2
        most = watched[1]["timers_max"][phase]
        assert least - 1e-6 <= own <= most + 1e-6
        assert world > 1 or least == most
    files = {"step_0000002": 1, "step_0000004-0000005": 2}
    traces = sorted(path.name for path in (tmp_path / "watched" / "profile").iterdir())
    assert traces == [f"{name}_rank_0000.json.gz" for name in files]
    once = {"data": 1, "optimizer": 2, "backward": expected["forward"]}
    for name, steps in files.items():
        events = trace_events(tmp_path / "watched" / "profile" / f"{name}_rank_0000.json.gz")
        ranges = Counter(e["name"] for e in events if e.get("cat") == "user_annotation")
        for phase, count in {**expected, **once}.items():
            assert ranges[phase] == steps * count, (name, phase)
        assert any(event["name"] == "aten::mm" for event in events)


def slow_in(module: Any) -> Any:
    """Let the forward passes of a module take longer."""
    run_model = module.run_model

    def slow(*given: Any, **named: Any) -> Any:
        time.sleep(SLOW_SECONDS)
        return run_model(*given, **named)

    return patch.object(module, "run_model", slow)


def train_unevenly(rank: int, world: int, config: Path, overrides: Sequence[str]) -> str:
    """Train with one slow rank; returns the log of this rank."""
    from megatron_distill.train import step

    with slow_in(step) if rank == SLOW_RANK else nullcontext():
        return logged(rank, world, config, overrides)


def test_the_log_names_a_slow_rank(pool: Pool, dense: Path, tmp_path: Path) -> None:
    overrides = [f"output={tmp_path / 'run'}", *SHORT, "logging.straggler_interval=3"]
    first, second = pool.run(2, train_unevenly, dense, overrides, timeout=SECONDS)
    assert "slowest" not in second
    lines = re.findall(r"step (\d+): slowest ranks, mean of 3 steps: (.*)", first)
    assert [step for step, _ in lines] == ["3", "6"]
    for _, line in lines:
        found = re.search(r"forward rank (\d) on (\S+) ([\d.]+) ms \(([\d.]+)x the median\)", line)
        assert found is not None, line
        rank, host, milliseconds, ratio = found.groups()
        assert (int(rank), host != "") == (SLOW_RANK, True)
        slept = 1000.0 * SLOW_SECONDS * MICRO_BATCHES / 2  # two data-parallel ranks
        assert slept <= float(milliseconds)
        assert float(ratio) > 1.3
        assert "communication" not in line
    records = step_records(tmp_path / "run")
    waited = sorted(record["timers"]["communication"] for record in records)[len(records) // 2]
    assert waited > 0.5 * slept  # rank 0, for its peer


def serve_unevenly(rank: int, world: int, config: Path, overrides: Sequence[str]) -> str:
    """Train with a teacher on two ranks, the last one slow; returns the log of this rank."""
    from megatron_distill.train.teachers import serving

    with slow_in(serving) if rank == world - 1 else nullcontext():
        return log_in_roles(rank, world, config, overrides)


@pytest.mark.slow
def test_the_ranks_of_a_teacher_are_timed_traced_and_compared(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    own = (
        "teacher.ranks=2", "logging.timers_interval=2", "logging.straggler_interval=2",
        "profile={steps: [3, 4], ranks: [0, 2]}",
    )  # fmt: skip
    overrides = [f"output={output}", *SHORT, *own, "validation.samples=16", "validation.interval=3"]
    began = time.perf_counter()
    first, *others = pool.run(3, serve_unevenly, dense, overrides, timeout=SECONDS)
    milliseconds = 1000.0 * (time.perf_counter() - began)
    assert "this run has no ranks" not in first
    assert all("slowest" not in other for other in others)
    # Means may be a step late, and on a busy machine the next ones may overtake them.
    lines = re.findall(r"step (\d+), teacher: slowest ranks, mean of 2 steps: (.*)", first)
    told = [int(step) for step, _ in lines]
    assert told
    assert told == sorted(set(told))
    assert set(told) <= {2, 4, 6}
    slept = 1000.0 * SLOW_SECONDS * MICRO_BATCHES / 2
    for _, line in lines:
        found = re.search(r"forward teacher\.1 on \S+ ([\d.]+) ms", line)
        assert found is not None, line
        assert slept <= float(found.group(1))
        assert "waiting" not in line
    slowest = read_status(output).slowest_teacher_ranks["teacher"]
    assert slowest == f"mean of 2 steps: {lines[-1][1]}"
    timed = {one["step"]: one["teacher_timers"]["teacher"] for one in step_records(output)[1:]}
    by_step = {}
    for step, phases in timed.items():
        by_step[phases.pop("step")] = phases
        # The step before is done: the student has all answers of this one. One is done ahead.
        assert step - 1 <= max(by_step) <= min(step + 1, STEPS)
    for phases in by_step.values():
        sender = phases.pop("sender")
        assert tuple(phases) == TEACHER_PHASES
        assert sender["sending"] > 0.0
        assert min(phases["waiting"], phases["data"], phases["forward"], phases["answer"]) > 0.0
    assert sum(sum(phases.values()) for phases in by_step.values()) <= milliseconds
    traces = sorted(path.name for path in (output / "profile").iterdir())
    name = "step_0000003-0000004_rank_000"
    assert traces == [f"{name}{rank}.json.gz" for rank in (0, 2)]
    events = trace_events(output / "profile" / f"{name}2.json.gz")
    ranges = Counter(e["name"] for e in events if e.get("cat") == "user_annotation")
    # Held-out units between the two steps are in the trace, too.
    assert ranges["forward"] >= 2 * MICRO_BATCHES / 2
    assert any(event["name"] == "aten::mm" for event in events)


def test_a_profile_that_is_not_possible_is_a_warning(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    output.mkdir()
    (output / "profile").write_text("a file where the folder would be")
    wanted = "profile={steps: [1], ranks: [0, 3], memory_snapshot: true}"
    overrides = [f"output={output}", "train.steps=1", "schedule.warmup_steps=0", wanted]
    (log,) = pool.run(1, logged, dense, overrides, timeout=SECONDS)
    warnings = re.findall(r"WARNING rank 0 \S+: (.*)", log)
    path = output / "profile" / "step_0000001_rank_0000.json.gz"
    assert warnings == [
        "profile.ranks = [0, 3]: this run has no ranks [3]",
        "profile.memory_snapshot = true has no effect on a CPU: a snapshot is of CUDA's allocator",
        f"profile: cannot write {path}: File exists",
    ]


def profile_without_a_gpu(rank: int, world: int, folder: Path) -> list[str]:
    """Profile steps for a GPU; returns the calls of the allocator's recorder, and the steps.

    While a snapshot is written no rank looks for signs of this one.
    """
    from megatron_distill.train.profile import StepProfiler

    calls: list[str] = []
    store = dist.HashStore()
    bridge: Any = SimpleNamespace(rank=0, roles=SimpleNamespace(size=1), store=store)

    def recorded(enabled: str | None = "all", max_entries: int = 0) -> None:
        calls.append("off" if enabled is None else "on")

    def dumped(path: str) -> None:
        assert store.check(["busy/0"])
        calls.append(Path(path).name)

    memory = torch.cuda.memory
    with (
        warnings.catch_warnings(),
        patch.object(memory, "_record_memory_history", recorded),
        patch.object(memory, "_dump_snapshot", dumped),
    ):
        warnings.simplefilter("ignore")  # that there is no GPU
        profiler = StepProfiler(
            folder,
            steps=[2, 4, 5, 9],
            ranks=[0],
            memory_snapshot=True,
            shapes=True,
            stacks=False,
            timers=PhaseTimers(torch.device("cpu")),
            device=torch.device("cuda"),
            bridge=bridge,
        )
        for step in range(1, 9):
            calls.append(str(step))
            profiler.before_step(step)
            profiler.after_step(step)
        profiler.close()
    assert not store.check(["busy/0"])
    return calls


def test_memory_is_recorded_around_the_profiled_steps(pool: Pool, tmp_path: Path) -> None:
    (calls,) = pool.run(1, profile_without_a_gpu, tmp_path)
    two, five, nine = (
        f"step_{steps}_rank_0000.memory.pickle"
        for steps in ("0000002", "0000004-0000005", "0000009")
    )
    expected = ["1", "on", "2", two, "off", "3", "on", "4", "5", five, "off"]
    # The run ends in the warm-up of step 9.
    assert calls == [*expected, "6", "7", "8", "on", nine, "off"]

"""The log lines with the phases of all ranks."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist

from megatron_distill.config.schema.training import LoggingConfig
from megatron_distill.train.phase_report import (
    PhaseReports,
    RankPhases,
    straggler_text,
    timers_text,
)
from megatron_distill.train.phase_timers import (
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    LOSS,
    PHASES,
    TEACHER,
)

HOSTS = [f"node{rank // 2}" for rank in range(6)]


def rank(stage: int = 0, **milliseconds: float) -> RankPhases:
    return RankPhases(stage, {**dict.fromkeys(PHASES, 0.0), **milliseconds})


def test_the_slowest_rank_of_a_phase_is_named_with_its_host() -> None:
    usual = {FORWARD: 100.0, BACKWARD: 200.0, COMMUNICATION: 60.0}
    ranks = [rank(**usual) for _ in range(6)]
    ranks[3] = rank(**usual | {FORWARD: 150.0, COMMUNICATION: 0.0})
    ranks[4] = rank(**usual | {BACKWARD: 210.0})
    assert straggler_text(ranks, HOSTS, 10) == (
        "slowest ranks, mean of 10 steps: forward rank 3 on node1 150.0 ms (1.50x the median), "
        "backward rank 4 on node2 210.0 ms (1.05x the median)"
    )


def test_of_two_ranks_the_slower_one_is_compared_with_the_faster() -> None:
    ranks = [rank(**{FORWARD: 100.0}), rank(**{FORWARD: 300.0})]
    assert straggler_text(ranks, HOSTS, 1) == (
        "slowest ranks, of 1 step: forward rank 1 on node0 300.0 ms (3.00x the median)"
    )


def test_a_stage_with_more_work_is_not_a_straggler() -> None:
    ranks = [rank(stage, **{FORWARD: 100.0, LOSS: 80.0 * stage}) for stage in (0, 0, 0, 1, 1, 1)]
    none_slower = "no rank is slower than its peers by 1 % of a step, mean of 2 steps"
    assert straggler_text(ranks, HOSTS, 2) == none_slower
    ranks[4] = rank(1, **{FORWARD: 100.0, LOSS: 81.7})  # 0.9 % of a step
    assert straggler_text(ranks, HOSTS, 2) == none_slower
    ranks[4] = rank(1, **{FORWARD: 100.0, LOSS: 81.9})
    assert straggler_text(ranks, HOSTS, 2) == (
        "slowest ranks, mean of 2 steps: loss rank 4 on node2 81.9 ms (1.02x the median)"
    )


def test_a_phase_that_only_one_rank_has_is_named_without_a_ratio() -> None:
    ranks = [rank(**{FORWARD: 100.0}) for _ in range(3)]
    ranks[1] = rank(**{FORWARD: 100.0, TEACHER: 40.0})
    assert straggler_text(ranks, HOSTS, 2) == (
        "slowest ranks, mean of 2 steps: teacher rank 1 on node0 40.0 ms"
    )


def test_the_line_of_all_ranks_leaves_out_phases_without_time() -> None:
    ranks = [rank(**{FORWARD: 100.0 + number, LOSS: 5.25 * number}) for number in range(3)]
    assert timers_text(ranks, 5) == (
        "(min, max) ms over 3 ranks, mean of 5 steps: forward (100.0, 102.0), loss (0.0, 10.5)"
    )
    assert timers_text(ranks[:1], 1) == "ms, of 1 step: forward 100.0"


@pytest.mark.parametrize(("ranks", "due"), [(2, [100, 200]), (1, [])])
def test_a_run_of_several_ranks_names_slow_ones_by_itself(
    ranks: int, due: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gathered(_: PhaseReports, own: Mapping[str, float]) -> list[RankPhases]:
        return [RankPhases(0, own), rank(**{FORWARD: 300.0})]

    def gather_object(found: list[str], own: str) -> None:
        found[:] = [own] * len(found)

    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_gather_object", gather_object)
    monkeypatch.setattr(PhaseReports, "_gather", gathered)
    interval = LoggingConfig().straggler_interval
    reports = PhaseReports(
        timers_interval=0, straggler_interval=interval, stage=0, device=torch.device("cpu")
    )
    phases = rank(**{FORWARD: 100.0}).milliseconds
    found = {step: reports.after_step(step, phases) for step in range(1, 251)}
    assert [step for step, entries in found.items() if entries] == due
    place = f"forward rank 1 on {socket.gethostname()}"
    text = f"mean of 100 steps: {place} 300.0 ms (3.00x the median)"
    assert all(found[step] == {"slowest_ranks": text} for step in due)

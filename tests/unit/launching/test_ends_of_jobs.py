"""What follows a job, submitted and by hand, where scripts stand in for Slurm's programs.

Regimes: a save before the time limit and the launch after it, the end, errors in the settings and
of the ranks, failures, GPUs, and an nvidia-smi that is missing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.launching.records import Status
from tests.unit.launching.slurm_programs import BY_HAND, StandIn

NODES = ("n1", "n2")
# A submission writes the same script with its words.
every_way = pytest.mark.parametrize(
    "way", [pytest.param("submitted", marks=pytest.mark.slow), "by hand"]
)


UNCHECKED = ("--all-reduce-check", "never")  # these GPUs are listed, and not there


def prepared(stand_in: StandIn, way: str, *options: str) -> tuple[Path, list[str]]:
    """A batch script of two nodes, and its words. options: those that both ways have."""
    if way == "by hand":
        return BY_HAND, [*options, "--", stand_in.program]
    return stand_in.submit(*options, program=("--command", stand_in.program)), []


def requeues(stand_in: StandIn) -> list[list[str]]:
    return stand_in.called("scontrol", "requeue") + stand_in.called("scontrol", "update")


@every_way
def test_a_job_that_saves_before_its_time_limit_is_requeued(stand_in: StandIn, way: str) -> None:
    script, words = prepared(stand_in, way)
    with stand_in.job_of(script, *words, nodes=NODES, RANKS="unfinished") as job:
        log = stand_in.warn(job, nodes=2)
    assert job.returncode == 75, log
    assert "the end of the job's time is near (signal): saving" in log
    assert requeues(stand_in) == [["scontrol", "requeue", str(stand_in.job)]]
    (outcome,) = stand_in.outcomes
    assert outcome is not None
    assert (outcome.status, outcome.next) == (Status.UNFINISHED, "goes on from step 0")


@every_way
def test_the_launch_after_a_requeue_has_the_port_and_a_rendezvous_of_its_own(
    stand_in: StandIn, way: str
) -> None:
    script, words = prepared(stand_in, way)
    done = stand_in.run(script, *words, nodes=NODES, RANKS="done", SLURM_RESTART_COUNT="2")
    assert done.returncode == 0, done.stderr
    assert requeues(stand_in) == []
    own = {f"--rdzv-id={stand_in.job}-2", f"--rdzv-endpoint=127.0.0.1:{stand_in.port}"}
    assert [own <= {*call} for call in stand_in.called("torchrun")] == [True] * 2


@every_way
def test_an_error_in_the_settings_ends_the_job_before_checks_and_without_a_requeue(
    stand_in: StandIn, way: str
) -> None:
    script, words = prepared(stand_in, way)
    Path(stand_in.program).write_text("raise SystemExit('error: train.steps = -1: too few')\n")
    done = stand_in.run(script, *words, nodes=NODES, RANKS="done")
    assert done.returncode == 78, done.stderr
    assert "train.steps = -1: too few" in done.stderr
    assert len(stand_in.called("srun")) == 1
    assert requeues(stand_in) == []


@every_way
def test_an_error_of_the_ranks_that_a_user_repairs_is_not_requeued(
    stand_in: StandIn, way: str
) -> None:
    script, words = prepared(stand_in, way)
    done = stand_in.run(script, *words, nodes=NODES, RANKS="misconfigured")
    assert done.returncode == 78, done.stderr
    assert "error: of the ranks: no further launch" in done.stderr
    assert len(stand_in.called("torchrun")) == 2
    assert requeues(stand_in) == []


@every_way
@pytest.mark.parametrize(("starts", "requeued"), [("2", 1), ("1", 0)])
def test_a_failure_is_requeued_until_so_many_launches_bring_nothing(
    stand_in: StandIn, way: str, starts: str, requeued: int
) -> None:
    script, words = prepared(stand_in, way, "--max-starts", starts)
    done = stand_in.run(script, *words, nodes=NODES, RANKS="failed")
    assert done.returncode == 1, done.stderr
    assert len(requeues(stand_in)) == requeued
    useless = "no further launch: 1 launch since step 0 brought no new checkpoint"
    assert (useless in done.stderr) == (not requeued)


@every_way
@pytest.mark.parametrize(
    ("having", "excluded"), [((), None), (("n1",), "n2")], ids=["every node", "one node"]
)
def test_a_node_without_nvidia_smi_has_no_ranks_where_slurm_allots_gpus(
    stand_in: StandIn, way: str, having: tuple[str, ...], excluded: str | None
) -> None:
    """Where all of them lack it, none is excluded."""
    script, words = prepared(stand_in, way, *UNCHECKED)
    stand_in.give_gpus(*having)
    done = stand_in.run(script, *words, nodes=NODES, RANKS="done", SLURM_GPUS_ON_NODE="2")
    assert done.returncode == 1, done.stderr
    for node in set(NODES) - set(having):
        lacks = f"node {node}: has no nvidia-smi, and 2 GPUs per node must be checked"
        assert lacks in done.stderr
    assert stand_in.called("torchrun") == []
    (_, *updates) = requeues(stand_in)
    update = ["scontrol", "update", f"JobId={stand_in.job}", f"ExcNodeList={excluded}"]
    assert updates == ([] if excluded is None else [update])


@every_way
@pytest.mark.parametrize(("gpus", "ranks"), [("2", 2), ("", 1)], ids=["two GPUs", "no GPU"])
def test_a_node_has_a_rank_for_each_gpu_that_slurm_allots_else_one(
    stand_in: StandIn, way: str, gpus: str, ranks: int
) -> None:
    script, words = prepared(stand_in, way, *UNCHECKED)
    stand_in.give_gpus(*(NODES if gpus else ()))
    done = stand_in.run(script, *words, nodes=NODES, RANKS="done", SLURM_GPUS_ON_NODE=gpus)
    assert done.returncode == 0, done.stderr
    assert [f"--nproc-per-node={ranks}" in call for call in stand_in.called("torchrun")] == [
        True
    ] * 2
    assert done.stderr.count("no GPU on this node: 1 rank for each node") == (not gpus)

"""Jobs of a real Slurm that the tests start: two of four nodes, one rank on each.

Regimes: to the end without a node that fails its check, near the time limit, ranks that hang there,
a rank killed, a node lost, cancelled, an error in the configuration, too little memory, two jobs
side by side, a killed batch script.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_distill.launching.records import Status, bad_nodes
from megatron_distill.launching.status.read import read_status
from tests.distributed.pool import Pool
from tests.e2e.clusters.jobs import (
    ENDLESS,
    NEAR_END,
    SAVING,
    WARNED,
    held_up,
    launches_of,
    next_launch_steps,
    nodes_of,
    outcomes,
    steps_done,
    written_by,
)
from tests.e2e.runs import course, run, step_records
from tests.support.slurm_cluster import Cluster

pytestmark = pytest.mark.slow
WITH_CHECKPOINT = re.compile(r" s for models and data, \d+\.\d s for the checkpoint, ")


def test_a_job_trains_to_the_end_without_a_bad_node_and_the_next_ones_have_nothing_to_do(
    cluster: Cluster, pool: Pool, dense: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    settings = ("train.steps=4", *SAVING)
    check = ("--health-command", 'test "$SLURMD_NODENAME" != n2', "--health-seconds", "120")
    check = (*check, "--all-reduce-check", "always")
    words = (str(dense), f"output={output}", *settings)
    (job,) = cluster.submit_by_command((*words, *check), logs=output / "launches")
    script = (output / "launches" / "job.sbatch").read_text()
    assert "#SBATCH --exclude" not in script
    assert job.wait_for_end() == "COMPLETED 0:0", job.log
    assert outcomes(output) == [Status.FAILED, Status.DONE]
    assert "node n2: 'test" in job.log
    assert [one.node for one in bad_nodes(output / "launches")] == ["n2"]
    assert job.fields["ExcNodeList"] == "n2"

    expected = course(run(pool, 2, dense, tmp_path / "reference", *settings))
    assert course(step_records(output)) == expected
    launches = launches_of(output)
    _, launch = launches.all()
    assert launch.job == job.number
    assert launch.nodes in (["n1", "n3"], ["n1", "n4"], ["n3", "n4"])
    logs = sorted(path.name for path in launches.of(launch).glob("rank_*.err"))
    assert logs == ["rank_00000.err", "rank_00001.err"]
    assert "Traceback" not in job.log
    # The check of nodes is far below its limit.
    seconds = re.findall(r"2 nodes checked in (\d+) s", job.log)
    assert len(seconds) == 2
    assert max(map(int, seconds)) < 50
    (summed,) = re.findall(r"all-reduces took (\d+) s; \S+ GB/s between two nodes", job.log)
    assert int(summed) < 50
    # The time up to the first step, by part.
    assert re.search(r"waited \d+ s in the queue; settings read in \d+\.\d s", job.log), job.log
    parts = r"([\d.]+) s until the ranks met, ([\d.]+) s for models and data, ([\d.]+) s for the"
    (start,) = re.findall(rf"first step ([\d.]+) s after the start: {parts} step", job.log)
    whole, *own = map(float, start)
    assert min(own[:2]) > 0.0  # the step of so small a model may take 0.0 s
    assert sum(own) == pytest.approx(whole, abs=0.5)

    chain = cluster.submit_by_command((*words, "--chain", "2"), logs=output / "launches")
    assert "#SBATCH --exclude=n2" in (output / "launches" / "job.sbatch").read_text()
    for one in chain:
        assert one.wait_for_end() == "COMPLETED 0:0", one.log
        assert "nothing to do" in one.log
        assert one.fields["NodeList"] in ("n[1,3]", "n[1,4]", "n[3-4]")
    first, second = (one.fields for one in chain)
    assert first["EndTime"] <= second["StartTime"]
    assert len(launches.all()) == 2


def test_a_job_goes_on_bit_for_bit_after_its_time_limit_a_killed_rank_and_a_lost_node(
    cluster: Cluster, pool: Pool, dense: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    settings = (*ENDLESS, "checkpoint.interval=2")
    # The clock would tell the ranks a second before the end: Slurm's signal comes before.
    rules = ("--max-starts", "9", "--grace-seconds", "1")
    words = (*rules, "--", "train", str(dense), f"output={output}", *settings)
    job = cluster.submit(words, options=("--time=1", "--signal=B:USR1@1"))
    # A loaded machine may take a launch or two to its first steps.
    job.wait_for(lambda: steps_done(output) >= 2)
    limited = len(launches_of(output).all())
    with held_up(job):  # as by a long step: what is trained until then is trained once more below
        job.wait_for(lambda: job.log.count(NEAR_END) >= limited)
        cluster.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=UNLIMITED")
    next_launch_steps(job, output, limited + 1)
    assert outcomes(output)[:limited] == [Status.UNFINISHED] * limited
    assert job.log.count(WARNED) == job.log.count(NEAR_END) == limited
    step = launches_of(output).all()[limited].progress
    assert f"goes on from step {step}" in job.log
    # Slurm may bring a line into the job's log after the steps are in the run's.
    job.wait_for(lambda: WITH_CHECKPOINT.search(job.log) is not None)
    assert "Traceback" not in job.log

    job.rank(1).kill()
    next_launch_steps(job, output, limited + 2)
    assert outcomes(output)[limited] is Status.FAILED
    assert re.search(r"rank 1 on n[1-4] failed first", job.log)
    assert "rank 1 died of SIGKILL" in job.log

    lost = nodes_of(output, limited + 1)[1]
    begun = len(step_records(output))
    cluster.kill_node(lost)
    try:
        job.wait_for(lambda: outcomes(output)[limited + 1] is Status.FAILED)
        job.wait_for(lambda: job.fields["JobState"] != "RUNNING")  # it has asked for the next one
        cluster.give_up_node(lost)
        next_launch_steps(job, output, limited + 3)
        assert lost not in nodes_of(output, limited + 2)
        assert len(step_records(output)) >= begun - 2
        job.cancel()
    finally:
        cluster.start_node(lost)
    assert job.fields["JobState"] == "CANCELLED"
    assert int(job.fields["Restarts"]) == limited + 2

    found = step_records(output)
    assert [one["step"] for one in found] == list(range(1, len(found) + 1))
    reference = run(
        pool, 2, dense, tmp_path / "reference", *ENDLESS, "checkpoint.save=false",
        stop_after=len(found),
    )  # fmt: skip
    assert course(found) == course(reference)
    # The cancelled job has saved as well, and has not asked for another launch.
    newest = max(int(path.name[5:]) for path in (output / "checkpoints").glob("step_*[0-9]"))
    assert newest == len(found)
    assert "cancelled after step" in job.log


def test_ranks_that_hang_near_the_time_limit_are_killed_and_their_job_goes_on(
    cluster: Cluster, dense: Path, tmp_path: Path
) -> None:
    """Slurm would end the job with TIMEOUT, and never start it again."""
    output = tmp_path / "run"
    words = ("--max-starts", "9", "--", "train", str(dense), f"output={output}", *ENDLESS)
    job = cluster.submit(words, options=("--time=1",))
    job.wait_for(lambda: steps_done(output) >= 2)
    limited = len(launches_of(output).all())
    with held_up(job):
        job.wait_for(lambda: outcomes(output)[limited - 1] is not None)
    assert outcomes(output)[limited - 1] is Status.UNFINISHED
    assert NEAR_END in job.log
    assert "its ranks were killed, since they had not saved in time" in job.log
    assert "stopped before the end of the job's time: goes on from step" in job.log
    job.wait_for(lambda: len(launches_of(output).all()) > limited)
    assert int(job.fields["Restarts"]) == limited
    job.cancel()


def test_an_error_in_the_configuration_is_not_tried_again(
    cluster: Cluster, dense: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    before = cluster.submit((str(dense), f"output={output}", "train.steps=-1"))
    layout = cluster.submit((str(dense), f"output={output}", "parallel.tensor=4"))
    assert before.wait_for_end() == "FAILED 78:0", before.log
    assert "train.steps = -1: must be an integer" in before.log
    # Two ranks are known on the first node, which compares the layout before any of them starts.
    assert layout.wait_for_end() == "FAILED 78:0", layout.log
    assert layout.fields["Restarts"] == "0", layout.log
    assert "this configuration on 2 processes: 1 problem" in layout.log
    assert "parallel.tensor" in layout.log
    assert "Traceback" not in before.log + layout.log
    assert not output.exists()


def test_a_run_that_does_not_fit_the_memory_of_its_job_ends_before_its_ranks(
    cluster: Cluster, dense: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    sizes = {"num_layers": 64, "hidden_size": 64, "ffn_hidden_size": 1024, "tied_embeddings": True}
    large = [f"student.architecture.{key}={value}" for key, value in sizes.items()]
    words = (str(dense), f"output={output}", *large, "train.steps=1", "--sbatch=--mem=110M")
    (job,) = cluster.submit_by_command(words, logs=output / "launches", nodes=4)
    assert job.wait_for_end() == "FAILED 78:0", job.log
    assert job.fields["Restarts"] == "0", job.log
    assert job.log.count("memory: the fullest rank of this run needs ") == 1, job.log
    assert "this job (SLURM_MEM_PER_NODE=110) has 110.0 MiB" in job.log
    assert job.log.count("; set ") == 3
    # No check of a node and no rank has begun.
    assert launches_of(output).all() == []
    assert "checked in" not in job.log


def test_jobs_share_nodes_but_not_a_folder_until_the_batch_script_of_its_job_is_killed(
    cluster: Cluster, dense: Path, tmp_path: Path
) -> None:
    config = str(dense)
    outputs = [tmp_path / "first", tmp_path / "second"]
    on = ("--nodelist=n1,n2",)
    first, second = (
        cluster.submit((config, f"output={output}", *ENDLESS), options=on) for output in outputs
    )
    for job, output in zip((first, second), outputs, strict=True):
        job.wait_for(lambda output=output: steps_done(output) >= 2)
    # Files of ranks of different jobs, temporary files and sockets included, are never the same.
    own = [written_by(job.rank(rank)) for job in (first, second) for rank in (0, 1)]
    assert all(own)
    assert len(set().union(*own)) == sum(map(len, own)), own
    with held_up(first), held_up(second):
        third = cluster.submit((config, f"output={outputs[0]}", *ENDLESS), nodes=1)
        assert third.wait_for_end() == "FAILED 78:0", third.log
        assert f"another run (job {first.number} on n1) is writing there" in third.log
        assert [read_status(output).state for output in outputs] == ["running", "running"]
        done = [steps_done(output) for output in outputs]
    for job, output, before in zip((first, second), outputs, done, strict=True):
        job.wait_for(lambda output=output, before=before: steps_done(output) > before)
    assert [read_status(output).state for output in outputs] == ["running", "running"]
    second.cancel()
    assert outcomes(outputs[1]) == [Status.UNFINISHED], second.log
    assert read_status(outputs[1]).state == "stopped"
    for output in outputs:
        assert [one.nodes for one in launches_of(output).all()] == [["n1", "n2"]]

    first.batch_process().kill()
    first.wait_for(lambda: first.fields["JobState"] != "RUNNING")
    again = cluster.submit((config, f"output={outputs[0]}", *ENDLESS))
    next_launch_steps(again, outputs[0], 2)
    assert outcomes(outputs[0]) == [None, None]
    again.cancel()
    assert outcomes(outputs[0]) == [None, Status.UNFINISHED], again.log
    steps = [one["step"] for one in step_records(outputs[0])]
    assert steps == list(range(1, len(steps) + 1))

"""Jobs of a real Slurm that the tests start: two of three nodes, one rank on each.

Regimes: to the end, near the time limit, cancelled, a rank killed, a node lost, a node that fails
its check, an error in the configuration, a full disk, two jobs side by side, a capture.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_distill.launching.records import Launches, Status, bad_nodes
from megatron_distill.launching.run_status import read_status
from tests.distributed.pool import Pool
from tests.e2e.captures import contents, run_in, write_capture
from tests.e2e.clusters.jobs import (
    ENDLESS,
    SAVING,
    launches_of,
    next_launch_steps,
    nodes_of,
    outcomes,
    steps_done,
    written_by,
)
from tests.e2e.runs import Inputs, course, run, step_records
from tests.support.slurm_cluster import Cluster

pytestmark = pytest.mark.slow


def test_two_nodes_train_to_the_end_and_the_same_job_has_then_nothing_to_do(
    cluster: Cluster, pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    config, output = inputs.folder / "dense.yaml", tmp_path / "run"
    words = (str(config), f"output={output}", "train.steps=4", *SAVING)
    job = cluster.submit(words)
    assert job.wait_for_end() == "COMPLETED 0:0", job.log
    expected = course(run(pool, 2, config, tmp_path / "reference", "train.steps=4", *SAVING))
    assert course(step_records(output)) == expected
    launches = launches_of(output)
    (launch,) = launches.all()
    assert (launch.job, launch.nodes) == (job.number, ["n1", "n2"])
    assert outcomes(output) == [Status.DONE]
    logs = sorted(path.name for path in launches.of(launch).glob("rank_*.err"))
    assert logs == ["rank_00000.err", "rank_00001.err"]
    assert "Traceback" not in job.log
    # The check of healthy nodes is far below its limit.
    (seconds,) = re.findall(r"2 nodes checked in (\d+) s", job.log)
    assert int(seconds) < 50
    # The time up to the first step, by part.
    assert re.search(r"waited \d+ s in the queue; settings read in \d+\.\d s", job.log), job.log
    parts = r"([\d.]+) s until the ranks met, ([\d.]+) s for models and data, ([\d.]+) s for the"
    (start,) = re.findall(rf"first step ([\d.]+) s after the start: {parts} step", job.log)
    whole, *own = map(float, start)
    assert min(own) > 0.0
    assert sum(own) == pytest.approx(whole, abs=0.5)

    again = cluster.submit(words)
    assert again.wait_for_end() == "COMPLETED 0:0", again.log
    assert "nothing to do" in again.log
    assert len(launches.all()) == 1


def test_a_job_near_its_time_limit_saves_and_goes_on_bit_for_bit_until_it_is_cancelled(
    cluster: Cluster, pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    config, output = inputs.folder / "dense.yaml", tmp_path / "run"
    words = ("--max-starts", "9", "--", "train", str(config), f"output={output}", *ENDLESS)
    job = cluster.submit(words, options=("--time=1", "--signal=B:USR1@1"))
    launches = launches_of(output)
    # A loaded machine may take a launch or two to its first step.
    job.wait_for(lambda: any(launch.progress for launch in launches.all()))
    resumed = next(place for place, one in enumerate(launches.all()) if one.progress)
    step = launches.all()[resumed].progress
    next_launch_steps(job, output, resumed + 1, steps=3)
    job.cancel()
    assert job.fields["JobState"] == "CANCELLED"
    assert int(job.fields["Restarts"]) == resumed
    assert outcomes(output)[:resumed] == [Status.UNFINISHED] * resumed
    assert "the end of the job's time is near: saving" in job.log
    assert f"goes on from step {step}" in job.log
    assert re.search(r" s for models and data, \d+\.\d s for the checkpoint, ", job.log)
    assert "Traceback" not in job.log

    found = step_records(output)
    assert [one["step"] for one in found] == list(range(1, len(found) + 1))
    assert len(found) >= step + 3
    reference = run(
        pool, 2, config, tmp_path / "reference", *ENDLESS, "checkpoint.save=false",
        stop_after=step + 3,
    )  # fmt: skip
    assert course(found[: step + 3]) == course(reference)
    # The cancelled job has saved as well, and has not asked for another launch.
    newest = max(int(path.name[5:]) for path in (output / "checkpoints").glob("step_*[0-9]"))
    assert newest == len(found)
    assert "cancelled after step" in job.log


def test_a_killed_rank_and_then_a_lost_node_cost_a_launch_each(
    cluster: Cluster, inputs: Inputs, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    words = (str(inputs.folder / "dense.yaml"), f"output={output}", *ENDLESS,
             "checkpoint.interval=2")  # fmt: skip
    job = cluster.submit(words)
    job.wait_for(lambda: steps_done(output) >= 4)
    job.rank(1).kill()
    next_launch_steps(job, output, 2)
    assert outcomes(output)[0] is Status.FAILED
    assert re.search(r"rank 1 on n[12] failed first", job.log)
    assert "rank 1 died of SIGKILL" in job.log

    lost = next(node for node in nodes_of(output, 1) if node != "n1")
    begun = len(step_records(output))
    cluster.kill_node(lost)
    try:
        next_launch_steps(job, output, 3)
        assert lost not in nodes_of(output, 2)
        assert len(step_records(output)) >= begun - 2
        job.cancel()
    finally:
        cluster.start_node(lost)
    steps = [one["step"] for one in step_records(output)]
    assert steps == list(range(1, len(steps) + 1))


def test_a_node_that_fails_its_check_is_excluded_from_this_job_and_the_next(
    cluster: Cluster, inputs: Inputs, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    words = (str(inputs.folder / "dense.yaml"), f"output={output}", "train.steps=2", *SAVING)
    check = ("--health-command", 'test "$SLURMD_NODENAME" != n2')
    (job,) = cluster.submit_by_command((*words, *check), logs=output / "launches")
    assert job.wait_for_end() == "COMPLETED 0:0", job.log
    assert outcomes(output) == [Status.FAILED, Status.DONE]
    assert nodes_of(output, 1) == ["n1", "n3"]
    assert [one.node for one in bad_nodes(output / "launches")] == ["n2"]
    assert job.fields["ExcNodeList"] == "n2"
    assert "node n2: 'test" in job.log
    assert "#SBATCH --exclude" not in (output / "launches" / "job.sbatch").read_text()

    # A chain of jobs: the first goes on, the second has nothing to do.
    more = (*words[:-3], "train.steps=3", *SAVING, "--chain", "2")
    first, second = cluster.submit_by_command(more, logs=output / "launches")
    assert "#SBATCH --exclude=n2" in (output / "launches" / "job.sbatch").read_text()
    assert first.wait_for_end() == "COMPLETED 0:0", first.log
    assert second.wait_for_end() == "COMPLETED 0:0", second.log
    assert "nothing to do" in second.log
    assert [one["step"] for one in step_records(output)] == [1, 2, 3]
    assert nodes_of(output, 2) == ["n1", "n3"]


def test_an_error_in_the_configuration_is_not_tried_again(
    cluster: Cluster, inputs: Inputs, tmp_path: Path
) -> None:
    config, output = inputs.folder / "dense.yaml", tmp_path / "run"
    before = cluster.submit((str(config), f"output={output}", "train.steps=-1"))
    layout = cluster.submit((str(config), f"output={output}", "parallel.tensor=4"))
    assert before.wait_for_end() == "FAILED 78:0", before.log
    assert "train.steps = -1: must be an integer" in before.log
    # Two ranks are known on the first node, which compares the layout before any of them starts.
    assert layout.wait_for_end() == "FAILED 78:0", layout.log
    assert layout.fields["Restarts"] == "0", layout.log
    assert "this configuration on 2 processes: 1 problem" in layout.log
    assert "parallel.tensor" in layout.log
    assert "Traceback" not in before.log + layout.log
    assert not output.exists()


def test_a_full_disk_ends_the_job_with_its_name(
    cluster: Cluster, inputs: Inputs, small_disk: Callable[[str], Path]
) -> None:
    output = small_disk("512k") / "run"
    job = cluster.submit((str(inputs.folder / "dense.yaml"), f"output={output}", *ENDLESS,
                          "checkpoint.interval=2"))  # fmt: skip
    assert job.wait_for_end() == "FAILED 78:0", job.log
    assert job.fields["Restarts"] == "0"
    assert "no space left for a checkpoint" in job.log
    assert "Traceback" not in job.log


def test_jobs_share_nodes_but_not_a_folder(
    cluster: Cluster, inputs: Inputs, tmp_path: Path
) -> None:
    config = str(inputs.folder / "dense.yaml")
    outputs = [tmp_path / "first", tmp_path / "second"]
    on = ("--nodelist=n1,n2",)
    first, second = (
        cluster.submit((config, f"output={output}", *ENDLESS), options=on) for output in outputs
    )
    for job, output in zip((first, second), outputs, strict=True):
        job.wait_for(lambda output=output: steps_done(output) >= 2)
    # What ranks of different jobs write, temporary files and sockets included, is never the same.
    own = [written_by(job.rank(rank)) for job in (first, second) for rank in (0, 1)]
    assert all(own)
    assert len(set().union(*own)) == sum(map(len, own)), own
    third = cluster.submit((config, f"output={outputs[0]}", *ENDLESS), nodes=1)
    assert third.wait_for_end() == "FAILED 78:0", third.log
    assert f"another run (job {first.number} on n1) is writing there" in third.log
    done = [steps_done(output) for output in outputs]
    for job, output, before in zip((first, second), outputs, done, strict=True):
        job.wait_for(lambda output=output, before=before: steps_done(output) > before)
    assert [read_status(output).state for output in outputs] == ["running", "running"]
    first.cancel()
    second.cancel()
    for job, output in zip((first, second), outputs, strict=True):
        assert outcomes(output) == [Status.UNFINISHED], job.log
        assert read_status(output).state == "stopped"
        assert [one.nodes for one in launches_of(output).all()] == [["n1", "n2"]]


def test_a_capture_goes_on_without_a_bad_node_where_one_is_spare(
    cluster: Cluster, pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    config, store = write_capture(inputs, "slurm-capture"), tmp_path / "store"
    words = ("--wanted-nodes", "2", "--health-command", 'test "$SLURMD_NODENAME" != n2', "--",
             "capture", str(config), f"store.path={store}")  # fmt: skip
    job = cluster.submit(words, nodes=3)
    assert job.wait_for_end() == "COMPLETED 0:0", job.log
    run_in(pool, 1, config, tmp_path / "alone")
    assert contents(store) == contents(tmp_path / "alone")
    launches = Launches(tmp_path / "store.launches", store, "")
    (launch,) = launches.all()
    assert (launch.restart, launch.nodes) == (0, ["n1", "n3"])
    outcome = launches.outcome(launch)
    assert outcome is not None
    assert outcome.status is Status.DONE
    assert [one.node for one in bad_nodes(launches.folder)] == ["n2"]

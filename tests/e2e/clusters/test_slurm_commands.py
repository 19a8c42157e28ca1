"""Further jobs of a real Slurm: other commands, an array, and warnings outside of a step.

Regimes: an evaluation and a text, a script that raises, an array whose tasks go on from one
another, the warning of the time limit in warm-up, evaluation and capture, a killed batch script.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from megatron_distill.launching.records import Launches, Status
from megatron_distill.launching.run_status import read_status
from tests.distributed.pool import Pool
from tests.e2e.captures import contents, has_shards, partial_files, run_in, write_capture
from tests.e2e.clusters.jobs import (
    ENDLESS,
    SAVING,
    launches_of,
    next_launch_steps,
    nodes_of,
    outcomes,
    steps_done,
)
from tests.e2e.faults.test_kill import scoring_of_minutes
from tests.e2e.runs import Inputs, records, run, step_records
from tests.support.slurm_cluster import Cluster

pytestmark = pytest.mark.slow

# Rank 0 waits, and is ended by torchrun.
RAISING = """\
import os, time
rank = os.environ["RANK"]
print(f"rank {rank} says hello", flush=True)
if rank == "1":
    raise RuntimeError("the cause")
time.sleep(600)
"""


def test_a_run_is_evaluated_and_continues_a_text_on_the_nodes(
    cluster: Cluster, pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    output, figures, text = (tmp_path / name for name in ("run", "figures.json", "text"))
    run(pool, 1, inputs.folder / "dense.yaml", output, "train.steps=2", *SAVING)
    words = ("--command", "evaluate", str(output), "parallel.tensor=2", "validation.samples=4")
    words = (*words, "--", "--json", str(figures))
    (job,) = cluster.submit_by_command(words, logs=output / "launches_evaluate")
    assert job.wait_for_end() == "COMPLETED 0:0", job.log
    assert json.loads(figures.read_text())
    assert outcomes(output, "launches_evaluate") == [Status.DONE]
    (launch,) = launches_of(output, "launches_evaluate").all()
    assert launch.nodes == ["n1", "n2"]

    words = ("--command", "generate", str(output), "--", "--tokens", "4", "--text", str(text))
    (job,) = cluster.submit_by_command(words, logs=output / "launches_generate", nodes=1)
    assert job.wait_for_end() == "COMPLETED 0:0", job.log
    assert text.read_text()
    assert "Traceback" not in job.log


def test_a_script_that_raises_has_its_traceback_in_the_job_and_a_file_per_rank_and_launch(
    cluster: Cluster, tmp_path: Path
) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "50% of run #2"  # as Slurm reads no word
    script.write_text(RAISING)
    words = ("--command", str(script), "--folder", str(folder), "--max-starts", "2", "word")
    (job,) = cluster.submit_by_command(words, logs=folder / "launches", nodes=1, ranks=2)
    assert job.wait_for_end() == "FAILED 1:0", job.log
    assert job.fields["Restarts"] == "1"
    assert outcomes(folder) == [Status.FAILED, Status.FAILED]
    assert "2 launches since step 0 brought no new checkpoint" in job.log
    assert job.log.count("rank 1 on n1 failed first") == 2
    assert job.log.count("Traceback (most recent call last)") == 2
    assert job.log.count("RuntimeError: the cause") == 2
    # The console has rank 0 alone; each rank of each launch has its files.
    assert job.log.count("rank 0 says hello") == 2
    assert "rank 1 says hello" not in job.log
    for restart in (0, 1):
        launch = folder / "launches" / f"{job.number}-{restart}"
        for rank in (0, 1):
            assert (launch / f"rank_0000{rank}.out").read_text() == f"rank {rank} says hello\n"
        assert "RuntimeError: the cause" in (launch / "rank_00001.err").read_text()


def test_a_task_of_an_array_goes_on_where_the_one_before_was_warned(
    cluster: Cluster, inputs: Inputs, tmp_path: Path
) -> None:
    config, output = inputs.folder / "dense.yaml", tmp_path / "run"
    words = (str(config), f"output={output}", "train.steps=120", "teacher.ranks=1", *SAVING)
    (array,) = cluster.submit_by_command((*words, "--array", "3"), logs=output / "launches")
    first, second, third = map(array.task, (1, 2, 3))
    first.wait_for(lambda: bool(launches_of(output).all()))
    script = first.batch_process()  # found now, so that the warning comes right behind two steps
    first.wait_for(lambda: steps_done(output) >= 2)
    script.send_signal(signal.SIGUSR1)
    # Saved, but not finished: the scheduler has the status, the supervisor's record the outcome.
    assert first.wait_for_end() == "FAILED 75:0", first.log
    assert second.wait_for_end() == "COMPLETED 0:0", second.log
    assert third.wait_for_end() == "COMPLETED 0:0", third.log
    assert outcomes(output) == [Status.UNFINISHED, Status.DONE]
    assert "the next job goes on from step" in first.log
    assert "nothing to do" in third.log
    assert "Traceback" not in first.log + second.log
    assert [one["step"] for one in step_records(output)] == list(range(1, 121))
    assert len(nodes_of(output, 1)) == 2


def test_a_warning_in_the_warm_up_is_followed_by_the_next_launch(
    cluster: Cluster, inputs: Inputs, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    job = cluster.submit((str(inputs.folder / "dense.yaml"), f"output={output}", *ENDLESS))
    folder = output / "launches" / f"{job.number}-0"
    job.wait_for(lambda: (folder / "rank_00000.err").exists())
    job.warn()
    next_launch_steps(job, output, 2)
    assert outcomes(output)[:1] == [Status.UNFINISHED]
    # At most the first step is done, and then saved.
    assert launches_of(output).all()[1].progress in (0, 1)
    assert job.log.count("the end of the job's time is near: saving") == 1
    assert "Traceback" not in job.log
    job.cancel()


def test_a_warning_in_an_evaluation_saves_its_step_and_ends_it(
    cluster: Cluster, inputs: Inputs, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    words = (str(inputs.folder / "dense.yaml"), f"output={output}", *ENDLESS)
    job = cluster.submit((*words, *scoring_of_minutes(tmp_path, "score")))
    job.wait_for(lambda: steps_done(output) >= 1)
    job.warn()
    job.wait_for(lambda: len(launches_of(output).all()) == 2)
    assert outcomes(output)[:1] == [Status.UNFINISHED]
    assert launches_of(output).all()[1].progress == len(step_records(output)) == 1
    assert not any("evaluation" in record for record in records(output))
    assert "goes on from step 1" in job.log
    assert "Traceback" not in job.log
    job.cancel()


def test_a_warned_capture_goes_on_to_the_same_files(
    cluster: Cluster, pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    config = write_capture(inputs, "slurm-long-capture", samples=600, per_shard=24)
    store = tmp_path / "store"
    job = cluster.submit(("capture", str(config), f"store.path={store}"))
    found = has_shards(store, 3)
    job.wait_for(found)
    job.warn()
    assert job.wait_for_end() == "COMPLETED 0:0", job.log
    launches = Launches(tmp_path / "store.launches", store, "")
    first, second = launches.all()
    assert [launches.outcome(one).status for one in (first, second)] == [  # type: ignore[union-attr]
        Status.UNFINISHED, Status.DONE,
    ]  # fmt: skip
    assert 3 <= second.progress < 25
    assert "Traceback" not in job.log
    assert partial_files(store) == []
    status = read_status(store)
    assert (status.state, status.step, status.steps) == ("done", 25, 25)
    assert run_in(pool, 1, config, tmp_path / "alone") is True
    assert contents(store) == contents(tmp_path / "alone")


def test_the_lock_of_a_killed_batch_script_ends_with_it(
    cluster: Cluster, inputs: Inputs, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    words = (str(inputs.folder / "dense.yaml"), f"output={output}", *ENDLESS)
    first = cluster.submit(words)
    first.wait_for(lambda: steps_done(output) >= 2)
    first.batch_process().kill()
    first.wait_for(lambda: first.fields["JobState"] != "RUNNING")
    second = cluster.submit(words)
    next_launch_steps(second, output, 2)
    assert outcomes(output)[:2] == [None, None]
    steps = [one["step"] for one in step_records(output)]
    assert steps == list(range(1, len(steps) + 1))
    second.cancel()

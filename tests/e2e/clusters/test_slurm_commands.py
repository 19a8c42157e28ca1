"""Further jobs of a real Slurm: other commands, an array, and warnings outside of a step.

Regimes: an evaluation, rollouts, scripts that end well and raise, an array whose tasks go on from
one another, the warning of the time limit in warm-up, evaluation and capture, a spare node, a full
disk.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_distill.launching.grace import grace_seconds
from megatron_distill.launching.records import Launches, Status, bad_nodes
from megatron_distill.launching.status.read import read_status
from tests.distributed.pool import Pool
from tests.e2e.captures import has_shards, partial_files, run_in, write_capture
from tests.e2e.clusters.jobs import (
    ENDLESS,
    SAVING,
    WARNED,
    held_up,
    holding,
    launches_of,
    nodes_of,
    outcomes,
    steps_done,
)
from tests.e2e.failing import call_script
from tests.e2e.faults.test_kill import scoring_of_minutes
from tests.e2e.processes import ROOT
from tests.e2e.runs import SECONDS, Inputs, records, run, step_records
from tests.support.slurm_cluster import Cluster
from tests.support.store_samples import contents

pytestmark = pytest.mark.slow

# Rank 0 waits, and is ended by torchrun.
RAISING = """\
import os, time
rank = os.environ["RANK"]
print(f"rank {rank} says hello", flush=True)
said = __file__ + ".said"
if rank == "1":
    while not os.path.exists(said):
        time.sleep(0.1)
    os.remove(said)
    raise RuntimeError("the cause")
open(said, "w").close()
time.sleep(600)
"""
# The first layers of a state, as rank 0 keeps them.
PRUNING = """\
import os, sys
source, target, option, layers = sys.argv[1:]
if os.environ["RANK"] == "0":
    import torch
    state = torch.load(source)
    kept = {key: value for key, value in state.items() if int(key.split(".")[1]) < int(layers)}
    torch.save(kept, target)
    print(option, len(kept), os.environ["GIVEN"], flush=True)
"""


def test_a_run_is_evaluated_on_the_nodes(
    cluster: Cluster, pool: Pool, dense: Path, tmp_path: Path
) -> None:
    output, figures = tmp_path / "run", tmp_path / "figures.json"
    run(pool, 1, dense, output, "train.steps=1", *SAVING)
    words = ("--command", "evaluate", str(output), "parallel.tensor=2", "validation.samples=4")
    words = (*words, "--", "--json", str(figures))
    (job,) = cluster.submit_by_command(words, logs=output / "launches_evaluate")
    assert job.wait_for_end() == "COMPLETED 0:0", job.log
    assert json.loads(figures.read_text())
    assert outcomes(output, "launches_evaluate") == [Status.DONE]
    (launch,) = launches_of(output, "launches_evaluate").all()
    assert launch.nodes == ["n1", "n2"]


def test_a_run_is_exported_on_a_node_and_continues_a_text_on_two(
    cluster: Cluster, pool: Pool, dense: Path, tmp_path: Path
) -> None:
    output, exported = tmp_path / "run", tmp_path / "hf"
    run(pool, 1, dense, output, "train.steps=1", *SAVING)
    words = ("--command", "generate", str(output), "parallel.tensor=2", "--", "--prompt", "def f(",
             "--tokens", "8", "--temperature", "0", "--text", str(tmp_path / "text"))  # fmt: skip
    (writing,) = cluster.submit_by_command(words, logs=output / "launches_generate")
    own = tmp_path / "conversion"
    words = ("--command", "convert", "--folder", str(own), "--", "export", "--checkpoint",
             str(output), "--hf", str(exported))  # fmt: skip
    (converting,) = cluster.submit_by_command(words, logs=own / "launches", nodes=1, ranks=2)
    assert writing.wait_for_end() == "COMPLETED 0:0", writing.log
    assert converting.wait_for_end() == "COMPLETED 0:0", converting.log
    assert outcomes(output, "launches_generate") == outcomes(own) == [Status.DONE]
    alone = tmp_path / "alone"
    ranks = ["--hf", str(exported), "--prompt", "def f(", "--tokens", "8", "--temperature", "0"]
    script = ROOT / "launch" / "generate.py"
    pool.run(1, call_script, script, [*ranks, "--text", str(alone)], timeout=SECONDS)
    assert (tmp_path / "text").read_text() == alone.read_text()


def test_rollouts_that_were_warned_go_on_to_the_same_texts_and_are_then_done(
    cluster: Cluster, pool: Pool, dense: Path, tmp_path: Path
) -> None:
    trained, output, alone = tmp_path / "run", tmp_path / "rollouts", tmp_path / "alone"
    run(pool, 1, dense, trained, "train.steps=1", *SAVING)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "def f{number}("}}\n' for number in range(24)))
    model = (str(trained), "parallel.tensor=2")
    options = ("--prompts", str(prompts), "--samples", "8", "--tokens", "24", "--part-rows", "1")
    words = ("--command", "rollout", *model, "--", *options, "--output", str(output))
    with holding(cluster, tmp_path, output / "part-00012.jsonl"):
        (job,) = cluster.submit_by_command(words, logs=output / "launches")
    job.wait_for((output / "part-00001.jsonl").is_file)
    with held_up(job):
        job.warn()
    job.wait_for(lambda: outcomes(output)[0] is not None)
    (tmp_path / "go").touch()
    assert job.wait_for_end() == "COMPLETED 0:0", job.log
    assert outcomes(output) == [Status.UNFINISHED, Status.DONE]
    assert 2 <= launches_of(output).all()[1].progress < 24
    assert "goes on from part" in job.log
    assert "Traceback" not in job.log
    status = read_status(output)
    assert (status.state, status.step, status.steps) == ("done", 24, 24)
    # Measured by the ranks' looks at the signal, for the next job; a step of the run says nothing.
    assert 60.0 < (grace_seconds(output / "launches") or 0.0) < 300.0
    (again,) = cluster.submit_by_command(words, logs=output / "launches")
    assert again.wait_for_end() == "COMPLETED 0:0", again.log
    assert "nothing to do" in again.log
    ranks = [*model, *options, "--output", str(alone)]
    pool.run(2, call_script, ROOT / "launch" / "rollout.py", ranks, timeout=SECONDS)
    assert texts(output) == texts(alone)


def texts(rollouts: Path) -> list[str]:
    """The texts of all parts."""
    files = sorted(rollouts.glob("part-*.jsonl"))
    return [json.loads(line)["text"] for file in files for line in file.read_text().splitlines()]


def test_a_script_that_prunes_is_done_and_one_that_raises_has_its_traceback_in_the_job(
    cluster: Cluster, tmp_path: Path
) -> None:
    state = {f"layers.{layer}.weight": torch.full((2,), float(layer)) for layer in range(4)}
    torch.save(state, tmp_path / "state.pt")
    (tmp_path / "prune.py").write_text(PRUNING)
    pruned = tmp_path / "pruned"
    script, folder = tmp_path / "script.py", tmp_path / "50% of run #2"  # as Slurm reads no word
    script.write_text(RAISING)
    words = ("--command", str(script), "--folder", str(folder), "--max-starts", "2", "word")
    (job,) = cluster.submit_by_command(words, logs=folder / "launches", nodes=1, ranks=2)
    words = ("--command", str(tmp_path / "prune.py"), "--folder", str(pruned),
             "--variable", "GIVEN=eth 1", "--", str(tmp_path / "state.pt"),
             str(tmp_path / "pruned.pt"), "--layers", "2")  # fmt: skip
    # It runs beside the other one.
    (pruning,) = cluster.submit_by_command(words, logs=pruned / "launches", nodes=1, ranks=2)
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
    assert pruning.wait_for_end() == "COMPLETED 0:0", pruning.log
    assert outcomes(pruned) == [Status.DONE]
    assert "--layers 2 eth 1" in pruning.log
    assert re.search(r"node n\d: healthy: .*torch \S+, port \d+ free\n", pruning.log)
    assert torch.load(tmp_path / "pruned.pt").keys() == {"layers.0.weight", "layers.1.weight"}


def test_a_task_of_an_array_goes_on_where_the_one_before_was_warned_in_its_warm_up(
    cluster: Cluster, dense: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    words = (str(dense), f"output={output}", "train.steps=4", "teacher.nodes=1", *SAVING)
    (array,) = cluster.submit_by_command((*words, "--array", "3"), logs=output / "launches")
    first, second, third = map(array.task, (1, 2, 3))

    def has_ranks() -> bool:
        return any((output / "launches").glob("*/rank_00000.err"))

    first.wait_for(has_ranks)
    first.warn()
    # Saved, but not finished: the scheduler has the status, the supervisor's record the outcome.
    assert first.wait_for_end() == "FAILED 75:0", first.log
    assert second.wait_for_end() == "COMPLETED 0:0", second.log
    assert third.wait_for_end() == "COMPLETED 0:0", third.log
    assert outcomes(output) == [Status.UNFINISHED, Status.DONE]
    # At most the first step is done, and then saved.
    assert launches_of(output).all()[1].progress in (0, 1)
    assert first.log.count(WARNED) == 1
    assert "the next job goes on from step" in first.log
    assert "nothing to do" in third.log
    assert "Traceback" not in first.log + second.log
    assert [one["step"] for one in step_records(output)] == list(range(1, 5))
    assert len(nodes_of(output, 1)) == 2


def test_a_warning_in_an_evaluation_saves_its_step_and_a_disk_that_fills_up_then_ends_the_job(
    cluster: Cluster, dense: Path, tmp_path: Path, small_disk: Callable[[str], Path]
) -> None:
    disk = small_disk("16m")
    output = disk / "run"
    words = (str(dense), f"output={output}", *ENDLESS)
    scoring = (*scoring_of_minutes(tmp_path, "score"), "evaluation.interval=3")
    job = cluster.submit((*words, "checkpoint.interval=2", *scoring))
    job.wait_for(lambda: steps_done(output) >= 3)
    job.warn()
    job.wait_for(lambda: len(launches_of(output).all()) == 2)
    (disk / "filling").write_bytes(bytes(shutil.disk_usage(disk).free - 2**18))
    assert outcomes(output)[:1] == [Status.UNFINISHED]
    assert launches_of(output).all()[1].progress == 3
    assert not any("evaluation" in record for record in records(output))
    assert "goes on from step 3" in job.log

    assert job.wait_for_end() == "FAILED 78:0", job.log
    assert job.fields["Restarts"] == "1"
    assert [one["step"] for one in step_records(output)] == [1, 2, 3]
    assert "no space left for a checkpoint" in job.log
    assert "Traceback" not in job.log


def test_a_warned_capture_goes_on_to_the_same_files_without_a_bad_node_where_one_is_spare(
    cluster: Cluster, pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    config = write_capture(inputs, "slurm-capture", samples=240, per_shard=24)
    store = tmp_path / "store"
    words = ("--wanted-nodes", "2", "--health-command", 'test "$SLURMD_NODENAME" != n2', "--",
             "capture", str(config), f"store.path={store}")  # fmt: skip
    with holding(cluster, tmp_path, store / "shards" / "logits-000005.json"):
        job = cluster.submit(words, nodes=3)
    job.wait_for(has_shards(store, 2))
    with held_up(job):
        job.warn()
    launches = Launches(tmp_path / "store.launches", store, "")
    job.wait_for(lambda: launches.outcome(launches.all()[0]) is not None)
    (tmp_path / "go").touch()
    assert job.wait_for_end() == "COMPLETED 0:0", job.log
    first, second = launches.all()
    assert [launches.outcome(one).status for one in (first, second)] == [  # type: ignore[union-attr]
        Status.UNFINISHED, Status.DONE,
    ]  # fmt: skip
    assert (first.nodes, second.nodes) == (["n1", "n3"], ["n1", "n3"])
    assert [one.node for one in bad_nodes(launches.folder)] == ["n2"]
    assert 2 <= second.progress < 10
    assert "Traceback" not in job.log
    assert partial_files(store) == []
    status = read_status(store)
    assert (status.state, status.step, status.steps) == ("done", 10, 10)
    assert run_in(pool, 1, config, tmp_path / "alone") is True
    assert contents(store) == contents(tmp_path / "alone")

"""The state of a run from its files: fresh, running, waiting, done, failed, silent."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_distill.cli import main
from megatron_distill.errors import ConfigError
from megatron_distill.launching.records import (
    Launches,
    LaunchRecord,
    Outcome,
    Status,
    Submission,
    write_record,
)
from megatron_distill.launching.status.read import read_status
from megatron_distill.runtime.folder_lock import take_lock

LONG_AGO = 1.0e9


def begin(run: Path, *, steps_done: int, changed: float = LONG_AGO) -> Path:
    """A run of 40 steps that has saved its 20th."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("train: {steps: 40}\n")
    (run / ".lock").touch()
    log = run / "metrics.jsonl"
    figures = {"step_seconds": 3.0, "tokens_per_second": 500.0}
    records = [{"step": step, **figures} for step in range(1, steps_done + 1)]
    records[-1]["slowest_ranks"] = "forward rank 3 on n2 31.2 ms"
    log.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    folder = run / "checkpoints" / "step_0000020"
    folder.mkdir(parents=True)
    (folder / "description.json").write_text('{"save_seconds": 1.5}')
    os.utime(log, (changed, changed))
    return run


def launch(run: Path, outcome: Outcome | None, *, started: float = LONG_AGO) -> None:
    launches = Launches(run / "launches", run, "")
    folder = launches.begin(
        LaunchRecord("7", 2, "7", ["train"], ["n1", "n2"], ["n1", "n2"], 20, started)
    )
    if outcome is not None:
        write_record(folder / "outcome.json", outcome)


def save_last(run: Path) -> None:
    """The checkpoint of the last step."""
    folder = run / "checkpoints" / "step_0000040"
    folder.mkdir()
    (folder / "description.json").write_text("{}")


def submit(folder: Path, submitted: float) -> None:
    """A job that Slurm has accepted."""
    launches = Launches(folder, folder.parent, "")
    write_record(launches.submission_file, Submission(["12"], submitted))


def ended(status: Status, text: str) -> Callable[[Path], None]:
    return lambda run: launch(run, Outcome(status, "why", 20, time.time(), text))


def test_a_running_run_has_its_figures(tmp_path: Path) -> None:
    status = read_status(begin(tmp_path / "run", steps_done=25, changed=time.time()))
    assert (status.state, status.step, status.steps) == ("running", 25, 40)
    assert (status.step_seconds, status.tokens_per_second, status.seconds_left) == (3, 500, 46.5)
    assert (status.checkpoint, status.save_seconds) == ("step_0000020", 1.5)
    assert status.slowest_ranks == "forward rank 3 on n2 31.2 ms"
    text = "\n".join(status.lines())
    assert "step        25 of 40 (62.5 %)" in text
    assert "left        0:46" in text
    assert ", saved in 1.5 s" in text


def test_the_speed_is_of_the_same_steps_in_seconds_and_tokens(tmp_path: Path) -> None:
    """A quick step weighs no more in one figure than in the other: 1,024 tokens each."""
    run = begin(tmp_path / "run", steps_done=25)
    seconds = [0.1, 0.5, 0.9]
    steps = [
        {"step": step, "step_seconds": one, "tokens_per_second": 1024 / one}
        for step, one in enumerate(seconds, start=1)
    ]
    steps.append({"step": 4, "step_seconds": 70.0})  # without tokens: in neither figure
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in steps))
    status = read_status(run)
    assert status.step_seconds == 0.5
    assert status.tokens_per_second == pytest.approx(1024 / 0.5)
    assert "speed       0.5 s per step, 2,048 tokens/s" in status.lines()


def test_the_slowest_ranks_of_each_teacher_are_the_newest(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", steps_done=25)
    log = run / "metrics.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    for step, entry in ((4, {"law": "old", "code": "code.1"}), (6, {"law": "law.0"}), (7, {})):
        records[step]["slowest_teacher_ranks"] = entry
    log.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    status = read_status(run)
    assert status.slowest_teacher_ranks == {"code": "code.1", "law": "law.0"}
    assert [line.split(maxsplit=1)[1] for line in status.lines() if line.startswith("slowest")] == [
        "forward rank 3 on n2 31.2 ms", "of code, code.1", "of law, law.0"
    ]  # fmt: skip


def test_a_run_that_holds_its_lock_is_running_however_long_its_step(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", steps_done=25)
    with (run / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert read_status(run).state == "running"
    assert read_status(run).state == "stopped"


def test_a_run_that_ended_on_this_host_has_stopped_at_once(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", steps_done=25, changed=time.time())
    held = take_lock(run / ".lock", named="output=run")
    assert read_status(run).state == "running"
    held.close()
    assert read_status(run).state == "stopped"
    # Whether a process of another host still runs can only be told by what it writes.
    (run / ".lock").write_text("process 7 on another-host\n")
    assert read_status(run).state == "running"


@pytest.mark.parametrize(
    ("steps", "make", "state", "detail"),
    [
        (40, save_last, "done", ""),
        (25, lambda run: None, "stopped", "at step 25"),
        (25, lambda run: launch(run, None), "failed", "launch 7-2 on n1, n2 has given no sign"),
        (25, ended(Status.DONE, "done"), "done", ""),
        (25, ended(Status.UNFINISHED, "goes on from step 20"), "waiting", "why: goes on from"),
        (25, ended(Status.FAILED, "goes on from step 20"), "waiting", "why: goes on from"),
        (25, ended(Status.FAILED, "no further launch"), "failed", "why: no further launch"),
        (25, ended(Status.UNFINISHED, "cancelled"), "stopped", "why: cancelled"),
    ],
)
def test_the_state_follows_from_the_files(
    tmp_path: Path, steps: int, make: Callable[[Path], None], state: str, detail: str
) -> None:
    run = begin(tmp_path / "run", steps_done=steps)
    make(run)
    status = read_status(run)
    assert status.state == state
    assert status.detail.startswith(detail)


def test_a_job_without_a_number_of_slurm_is_not_asked_for_there(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", steps_done=25)
    launches = Launches(run / "launches", run, "")
    one = LaunchRecord("20260101-120000", 0, "s", ["train"], ["a"], ["a"], 20, LONG_AGO)
    outcome = Outcome(Status.FAILED, "why", 20, time.time(), "goes on from step 20 in 15 s")
    write_record(launches.begin(one) / "outcome.json", outcome)
    assert read_status(run).detail == "why: goes on from step 20 in 15 s"


def test_a_launch_that_checks_its_nodes_is_no_failure(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", steps_done=25)
    launch(run, None, started=time.time())
    assert read_status(run).state == "running"
    (run / "metrics.jsonl").unlink()
    status = read_status(run)
    assert (status.state, status.detail) == ("starting", "launch 7-2 on n1, n2")


def test_a_start_by_hand_after_a_launch_counts(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", steps_done=25, changed=time.time() + 60)
    ended(Status.FAILED, "no further launch")(run)
    assert read_status(run).state == "running"


def test_a_submission_in_the_queue_waits_and_one_that_could_not_begin_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm has no launch to show before the job runs."""
    run = tmp_path / "run"
    (run / "launches").mkdir(parents=True)
    now = float(int(time.time()))  # in whole seconds, as the text
    submit(run / "launches", now - 3700)
    with monkeypatch.context() as frozen:
        frozen.setattr(time, "time", lambda: now)
        status = read_status(run)
    assert (status.state, status.step, status.steps) == ("waiting", 0, None)
    assert status.detail == (
        "job 12 submitted 1:01:40 ago, no launch since then; `squeue --jobs=12` tells whether it "
        "is still in the queue"
    )
    log = run / "launches" / "log-12.txt"
    log.write_text("[job] reading the settings\n")
    assert read_status(run).state == "starting"
    log.write_text("[job] error: train.stops: is no key\n")
    status = read_status(run)
    assert (status.state, status.detail) == ("failed", f"train.stops: is no key ({log})")


def test_a_run_that_is_submitted_again_waits_until_its_launch_begins(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", steps_done=25)
    launch(run, Outcome(Status.FAILED, "why", 20, LONG_AGO, "no further launch"))
    assert read_status(run).state == "failed"
    (run / "launches" / "job.sbatch").touch()  # Slurm may have refused it
    assert read_status(run).state == "failed"
    submit(run / "launches", time.time())
    assert read_status(run).state == "waiting"
    log = run / "launches" / "log-12.txt"
    log.write_text("[job] nothing to do: launches/done is of an earlier launch\n")
    submit(run / "launches", time.time() - 1000)
    os.utime(log, (time.time() - 900,) * 2)
    assert read_status(run).detail.startswith("why: no further launch")


@contextmanager
def of_another_user(folder: Path) -> Iterator[None]:
    """Take the right to read the folder from this process."""
    mode, user = folder.stat().st_mode, os.geteuid()
    folder.chmod(0)
    if user == 0:
        os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(mode)


def test_a_folder_of_another_user_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(tmp_path / "run", steps_done=25)
    with of_another_user(run):
        assert main(["status", str(run)]) == 1
    text = capsys.readouterr().err
    assert text.startswith(f"error: {run}: cannot read {run}")
    assert "(Permission denied); ask the owner" in text
    with of_another_user(run / "checkpoints"):
        assert main(["status", str(run)]) == 1
    assert f"cannot read {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.yaml", "train: 40\n"),
        ("config.yaml", "- 40\n"),
        ("metrics.jsonl", '{"step": null, "step_seconds": 3.0}\n[1]\n{"step": 3\n'),
        ("metrics.jsonl", '{"step": 3, "step_seconds": "3"}\n{"step": 4}\n\0\0\0'),
        ("metrics.jsonl", '{"step": 3, "step_seconds": NaN}\n{"step": 4, "step_seconds": 1e999}'),
        ("metrics.jsonl", '{"step": 3, "step_seconds": 0, "tokens_per_second": 7}'),
        ("metrics.jsonl", '{"step": 3, "step_seconds": 3, "tokens_per_second": null}'),
        ("metrics.jsonl", '{"slowest_teacher_ranks": null}\n{"slowest_teacher_ranks": ["a"]}'),
        ("metrics.jsonl", '{"slowest_ranks": null, "slowest_teacher_ranks": {"law": null}}'),
        ("checkpoints/step_0000020/description.json", "[]"),
        ("checkpoints/step_0000020/description.json", '{"save_seconds": "long"}'),
        ("launches/7-2/launch.json", '{"job": "7"}'),
        ("launches/7-2/launch.json", "[]"),
        ("launches/7-2/outcome.json", '{"status": "lost"}'),
        ("launches/7-2/outcome.json", '"done"'),
    ],
)
def test_a_damaged_file_leaves_the_rest_of_the_state(
    tmp_path: Path, file: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(tmp_path / "run", steps_done=25)
    launch(run, Outcome(Status.FAILED, "why", 20, time.time(), "no further launch"))
    (run / file).write_text(text)
    assert main(["status", str(run)]) == 0
    assert "checkpoint  step_0000020" in capsys.readouterr().out


@pytest.mark.parametrize("below", ["", "/x"])
def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as found:
        read_status(Path(f"{tmp_path}/file{below}"))
    text = f"{tmp_path}/file: it is a file; name the folder `output` of a run, "
    assert str(found.value).startswith(text)
    assert "permission" not in str(found.value)


def test_a_disk_that_cannot_be_read_is_no_matter_of_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(tmp_path / "run", steps_done=25)

    def read_text(path: Path, **_: str) -> str:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(ConfigError, match=r"config\.yaml \(Input/output error\); look at the disk"):
        read_status(run)


def test_settings_that_are_no_text_are_named(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", steps_done=25)
    (run / "config.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"config\.yaml: not valid YAML"):
        read_status(run)


def test_a_record_of_a_later_version_is_read(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", steps_done=25)
    launch(run, None)
    file = run / "launches" / "7-2" / "launch.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"colour": "blue"}))
    assert read_status(run).launches == 1


def test_the_command_prints_lines_or_json_and_refuses_other_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(begin(tmp_path / name, steps_done=25)) for name in ("a", "b")]
    assert main(["status", *runs]) == 0
    assert capsys.readouterr().out.count("state       stopped: at step 25") == 2
    assert main(["status", "--json", *runs]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["run"] for one in found] == runs
    assert main(["status", str(tmp_path), *runs]) == 1
    text = capsys.readouterr()
    assert "no run has started here" in text.err
    assert text.out.count("state       stopped: at step 25") == 2
    with pytest.raises(ConfigError, match="nowhere: there is no such folder; name the folder"):
        read_status(tmp_path / "nowhere")


def test_a_capture_has_its_shards_speed_and_state(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "shards").mkdir(parents=True)
    (store / "plan.json").write_text('{"samples": 45, "samples_per_shard": 10}')
    now = time.time()
    for shard in range(3):
        file = store / "shards" / f"logits-{shard:06d}.array_record"
        file.touch()
        os.utime(file, (now - 60 + 20 * shard,) * 2)
    (store / "shards" / "logits-000003.partial-n1").touch()
    launches = Launches(tmp_path / "store.launches", store, "")
    folder = launches.begin(LaunchRecord("7", 1, "7", ["capture"], ["n1"], ["n1"], 0, now - 100))
    status = read_status(store)
    assert (status.state, status.detail) == ("running", "launch 7-1 on n1")
    assert (status.step, status.steps) == (3, 5)
    assert status.step_seconds == pytest.approx(20)
    assert status.seconds_left == pytest.approx(40)
    text = "\n".join(status.lines())
    assert "shard       3 of 5 (60.0 %)" in text
    assert "20 s per shard" in text
    assert "checkpoint" not in text
    write_record(folder / "outcome.json", Outcome(Status.UNFINISHED, "why", 3, now, "goes on"))
    assert read_status(store).state == "waiting"
    for shard in (3, 4):
        (store / "shards" / f"logits-{shard:06d}.array_record").touch()
    write_record(folder / "outcome.json", Outcome(Status.DONE, "done", 5, time.time() + 1, "done"))
    assert read_status(store).state == "done"


def test_a_capture_waits_once_slurm_has_accepted_it(tmp_path: Path) -> None:
    store, beside = tmp_path / "store", tmp_path / "store.launches"
    beside.mkdir()
    (beside / "job.sbatch").touch()
    with pytest.raises(ConfigError, match="store: no run has started here"):
        read_status(store)
    submit(beside, time.time())
    assert read_status(store).state == "waiting"


def test_rollouts_have_their_parts_speed_and_state(tmp_path: Path) -> None:
    folder, now = tmp_path / "rollouts", time.time()
    folder.mkdir()
    (folder / "rollouts.json").write_text('{"settings": {"rows": 45, "part_rows": 10}}')
    for part in range(3):
        file = folder / f"part-{part:05d}.jsonl"
        file.touch()
        os.utime(file, (now - 60 + 20 * part,) * 2)
    (folder / "part-00003.jsonl.partial").touch()
    status = read_status(folder)
    assert (status.state, status.step, status.steps, status.unit) == ("running", 3, 5, "part")
    assert (status.step_seconds, status.seconds_left) == (20, 40)
    assert "part        3 of 5 (60.0 %)" in status.lines()
    for part in range(3):
        os.utime(folder / f"part-{part:05d}.jsonl", (LONG_AGO, LONG_AGO))
    assert (read_status(folder).state, read_status(folder).detail) == ("stopped", "at part 3")
    for part in (3, 4):
        (folder / f"part-{part:05d}.jsonl").touch()
    assert read_status(folder).state == "done"


def test_jobs_that_write_a_store_side_by_side_are_shown_together(tmp_path: Path) -> None:
    store, now = tmp_path / "store", time.time()
    (store / "shards").mkdir(parents=True)
    (store / "plan.json").write_text('{"samples": 50, "samples_per_shard": 10}')

    def shard(number: int, age: float = 0.0) -> None:
        file = store / "shards" / f"logits-{number:06d}.array_record"
        file.touch()
        os.utime(file, (now - age,) * 2)

    def of_job(job: int, outcome: Outcome | None) -> None:
        folder = tmp_path / "store.launches" / f"job_{job}_of_2"
        launches = Launches(folder, store, "", job=job, jobs=2)
        one = LaunchRecord(str(job), 3 * job, "s", ["capture"], ["n1"], ["n1"], 0, now - 1000 + job)
        folder = launches.begin(one)
        if outcome is not None:
            write_record(folder / "outcome.json", outcome)

    # An earlier submission was of one job.
    launch(store, Outcome(Status.FAILED, "old", 0, LONG_AGO, "no further launch"))
    (store / "launches").rename(tmp_path / "store.launches")
    assert read_status(store).detail == "old: no further launch"
    shard(0, age=900)
    shard(1, age=800)
    shard(2)
    of_job(0, None)
    status = read_status(store)
    assert (status.state, status.detail) == ("running", "job 0 of 2 running (launch 0-0 on n1)")
    of_job(1, Outcome(Status.FAILED, "why", 1, now - 700, "no further launch"))
    status = read_status(store)
    assert (status.state, status.step, status.steps) == ("running", 3, 5)
    assert (status.launches, status.restarts) == (2, 3)
    assert status.detail.endswith("; job 1 of 2 failed (why: no further launch)")
    # The shards of the other job are no sign of this one.
    shard(4)
    of_job(0, Outcome(Status.DONE, "done", 3, now + 1, "done"))
    status = read_status(store)
    assert status.state == "failed"
    assert status.detail == "job 0 of 2 done; job 1 of 2 failed (why: no further launch)"
    shard(3)
    of_job(1, Outcome(Status.DONE, "done", 2, now + 1, "done"))
    assert (read_status(store).state, read_status(store).detail) == ("done", "")


def test_a_launch_whose_job_holds_its_lock_is_running_however_silent(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", steps_done=25)
    launch(run, None)
    assert read_status(run).state == "failed"
    with (run / "launches" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert read_status(run).state == "running"


def test_jobs_that_read_a_run_or_a_model_have_their_state(tmp_path: Path) -> None:
    """They have no progress; the lock of a run is of its training, not of them."""
    run, model = begin(tmp_path / "run", steps_done=25), tmp_path / "model"
    now = time.time()

    def of(folder: Path, command: str, outcome: Outcome | None) -> Path:
        launches = Launches(folder / f"launches_{command}", folder, "")
        one = LaunchRecord("8", 1, "8", [command], ["n1"], ["n1"], 0, now - 1000)
        if outcome is not None:
            write_record(launches.begin(one) / "outcome.json", outcome)
        return launches.begin(one)

    assert read_status(run).jobs == {}
    of(run, "evaluate", None)
    of(run, "generate", Outcome(Status.UNFINISHED, "why", 0, now, "goes on from step 0"))
    submit(run / "launches_generate", LONG_AGO)
    with (run / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        status = read_status(run)
        assert status.state == "running"
        text = "failed: launch 8-1 on n1 has given no sign for "
        assert status.jobs["evaluate"].startswith(text)
        text = "waiting: why: goes on from step 0; `squeue --jobs=8` tells whether it is still in "
        assert status.jobs["generate"] == f"{text}the queue"
        assert f"generate    {text}the queue" in status.lines()

    folder = of(model, "evaluate", None)
    (folder / "rank_00000.err").touch()
    status = read_status(model)
    assert (status.state, status.detail) == ("running", "launch 8-1 on n1")
    assert status.lines() == [
        str(model),
        "state       running: launch 8-1 on n1",
        "launches    1, with 1 restart of the newest job",
        "evaluate    running: launch 8-1 on n1",
    ]
    of(model, "evaluate", Outcome(Status.DONE, "done", 0, time.time() + 1, "done"))
    assert (read_status(model).state, read_status(model).detail) == ("done", "")

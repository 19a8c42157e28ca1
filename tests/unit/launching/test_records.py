"""Records of launches: progress, launches without progress, done marker, bad nodes, grace."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from megatron_distill.errors import ConfigError
from megatron_distill.launching import grace
from megatron_distill.launching.grace import LongestStep, grace_seconds, measured_looks
from megatron_distill.launching.records import (
    BadNode,
    Launches,
    LaunchRecord,
    NodeOutcome,
    Outcome,
    Status,
    bad_nodes,
    progress_of,
    read_record,
    write_record,
)


def launch(
    job: str, restart: int, progress: int, started: float, submission: str = "a"
) -> LaunchRecord:
    return LaunchRecord(
        job, restart, submission, ["train"], ["n1"], ["127.0.0.1"], progress, started
    )


def make_checkpoint(results: Path, step: int, save_seconds: float | None = None) -> None:
    folder = results / "checkpoints" / f"step_{step:07d}"
    folder.mkdir(parents=True)
    (folder / "description.json").write_text(json.dumps({"save_seconds": save_seconds}))


def test_progress_is_the_newest_complete_checkpoint_or_the_number_of_shards(tmp_path: Path) -> None:
    assert progress_of(tmp_path / "nowhere") == 0
    run, store = tmp_path / "run", tmp_path / "store"
    make_checkpoint(run, 20)
    make_checkpoint(run, 100)
    (run / "checkpoints" / "step_0000200.partial").mkdir()
    assert progress_of(run) == 100
    (store / "shards").mkdir(parents=True)
    for name in ("logits-0.array_record", "logits-1.array_record", "logits-1.json",
                 "logits-2.partial-n1"):  # fmt: skip
        (store / "shards" / name).touch()
    (store / "shards" / "documents-2.json").touch()  # before the shard itself
    assert progress_of(store) == 2


def test_launches_count_since_the_last_new_checkpoint_of_their_submission(tmp_path: Path) -> None:
    launches = Launches(tmp_path / "launches", tmp_path, "output=a")
    assert launches.starts_without_progress("a") == 0
    for number, (progress, submission) in enumerate([(0, "a"), (0, "b"), (20, "a"), (20, "a")]):
        launches.begin(launch("7", number, progress, float(number), submission))
    make_checkpoint(tmp_path, 20)
    assert launches.starts_without_progress("a") == 2
    assert launches.starts_without_progress("b") == 0
    assert [one.restart for one in launches.all()] == [0, 1, 2, 3]
    assert launches.starts_without_progress("a", before=3) == 1
    make_checkpoint(tmp_path, 40)
    assert launches.starts_without_progress("a") == 0


def test_no_later_job_of_a_submission_begins_after_useless_launches_or_an_error(
    tmp_path: Path,
) -> None:
    launches = Launches(tmp_path / "launches", tmp_path, "output=a")
    for number in range(2):
        launches.begin(launch(str(number), 0, 0, float(number)))
        assert launches.refusal("a", max_starts=3) is None
    launches.begin(launch("2", 0, 0, 2.0))
    useless = (Status.FAILED, "3 launches since step 0 brought no new checkpoint")
    assert launches.refusal("a", max_starts=3) == useless
    assert launches.refusal("a", max_starts=4) is None
    assert launches.refusal("b", max_starts=3) is None
    # One that was told to leave is no evidence about the next.
    told = Outcome(Status.UNFINISHED, "saved", 0, 2.0, next="cancelled after step 0; the same")
    write_record(launches.of(launches.all()[-1]) / "outcome.json", told)
    assert launches.refusal("a", max_starts=3) is None
    make_checkpoint(tmp_path, 20)
    assert launches.refusal("a", max_starts=3) is None

    last = launch("3", 0, 20, 3.0)
    outcome = Outcome(Status.MISCONFIGURED, "error: disk full", 20, 4.0)
    write_record(launches.begin(last) / "outcome.json", outcome)
    refusal = launches.refusal("a", max_starts=3)
    assert refusal[0] is Status.MISCONFIGURED
    assert refusal[1].endswith("call `megatron-distill submit` again: error: disk full")
    assert launches.refusal("b", max_starts=3) is None


def test_a_job_is_done_for_the_settings_that_reached_the_end_alone(tmp_path: Path) -> None:
    first, other, none = (Launches(tmp_path, tmp_path, "", digest) for digest in ("a", "b", None))
    none.mark_done()
    assert not any(one.is_done() for one in (first, other, none))
    first.mark_done()
    assert [one.is_done() for one in (first, other, none)] == [True, False, False]


def test_a_job_whose_results_were_removed_is_not_done(tmp_path: Path) -> None:
    run, store = tmp_path / "run", tmp_path / "store"
    make_checkpoint(run, 20)
    (store / "shards").mkdir(parents=True)
    for number in range(2):
        (store / "shards" / f"logits-{number}.array_record").touch()
    jobs = [Launches(run / "launches", run, "", "a"), Launches(tmp_path / "beside", store, "", "b")]
    for job in jobs:
        job.folder.mkdir()
        job.mark_done()
        assert job.is_done()
    (run / "checkpoints" / "step_0000020" / "description.json").unlink()
    (run / "checkpoints" / "step_0000020").rmdir()
    (store / "shards" / "logits-1.array_record").unlink()
    assert [job.is_done() for job in jobs] == [False, False]
    make_checkpoint(run, 20)
    (store / "shards" / "logits-1.array_record").touch()
    assert [job.is_done() for job in jobs] == [True, True]
    shutil.rmtree(store)
    assert not jobs[1].is_done()

    # A run without checkpoints ends as well, and an unreadable marker counts as none.
    (tmp_path / "plain" / "launches").mkdir(parents=True)
    plain = Launches(tmp_path / "plain" / "launches", tmp_path / "plain", "", "c")
    plain.mark_done()
    assert plain.is_done()
    (plain.folder / "done").write_text("c\n")
    assert not plain.is_done()


def test_records_return_as_written_and_torn_ones_do_not_count(tmp_path: Path) -> None:
    outcome = Outcome(Status.UNFINISHED, "stopped", 20, 12.5, "goes on")
    node = NodeOutcome("n1", 0, Status.FAILED, 12.0, 3, 1, "error: rank 3 failed")
    for record in (outcome, node):
        write_record(tmp_path / "record.json", record)
        assert read_record(tmp_path / "record.json", type(record)) == record
    (tmp_path / "torn.json").write_text('{"status": "do')
    assert read_record(tmp_path / "torn.json", Outcome) is None
    assert read_record(tmp_path / "none.json", Outcome) is None


def test_bad_nodes_add_up_and_a_damaged_list_is_refused(tmp_path: Path) -> None:
    launches = Launches(tmp_path, tmp_path, "")
    assert bad_nodes(tmp_path) == []
    found = [BadNode("2026-01-01T00:00:00", f"n{number}", "no answer") for number in (1, 2)]
    for one in found:
        launches.add_bad_nodes([one])
    assert bad_nodes(tmp_path) == found
    (tmp_path / "bad_nodes").write_text("n1 n2\n")
    with pytest.raises(ConfigError, match="bad_nodes: a line is not time, node and reason"):
        bad_nodes(tmp_path)


def test_the_grace_is_twice_step_validation_and_save_and_a_minute(tmp_path: Path) -> None:
    assert grace_seconds(tmp_path) is None
    log = tmp_path / "metrics.jsonl"
    steps = [{"step": step, "step_seconds": 100.0 if step == 1 else 2.0} for step in range(1, 120)]
    lines = [*map(json.dumps, steps), '{"step": 119, "validation": {}}', '{"step": 12']
    log.write_text("\n".join(lines))
    assert grace_seconds(tmp_path) == 64.0  # the first step compiles, and is long ago
    make_checkpoint(tmp_path, 20, 7.0)
    make_checkpoint(tmp_path, 40)
    assert grace_seconds(tmp_path) == 78.0
    held_out = {"step": 119, "validation": {}, "validation_seconds": 30.0}
    log.write_text("\n".join([*map(json.dumps, steps), json.dumps(held_out)]))
    assert grace_seconds(tmp_path) == 138.0
    log.write_text("\n".join(map(json.dumps, steps[:3])))
    assert grace_seconds(tmp_path) == 274.0


def test_the_grace_of_a_capture_follows_from_its_longest_step_after_the_first(
    tmp_path: Path,
) -> None:
    working = tmp_path / "store" / "capture"
    working.mkdir(parents=True)
    now = 0.0
    steps = LongestStep(working, clock=lambda: now)
    for seconds, expected in ((900.0, None), (100.0, 260.0), (20.0, 260.0), (150.0, 360.0)):
        now += seconds
        steps.end_step()
        assert grace_seconds(tmp_path / "store") == expected
    (working / "longest_step.json").write_text("[]")
    assert grace_seconds(tmp_path / "store") is None
    shutil.rmtree(working)  # another job has finished the store
    now += 500.0
    steps.end_step()
    assert not working.exists()


def test_the_grace_of_a_command_that_reads_a_model_follows_from_its_own_looks_at_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    (run / "launches_evaluate" / "7-0").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "step_seconds": 2.0}\n')
    launches = Launches(run / "launches_evaluate", run, "evaluate run")
    assert grace_seconds(launches.measured) is None  # a step of its training says nothing
    now = 0.0
    monkeypatch.setattr(grace, "LongestStep", partial(LongestStep, clock=lambda: now))
    for variable, rank in ((None, "0"), (run / "launches_evaluate" / "7-0", "1")):
        if variable is not None:
            monkeypatch.setenv("DISTILL_LAUNCH", str(variable))
        monkeypatch.setenv("RANK", rank)
        looked = measured_looks(lambda: False)
        for _ in range(3):
            assert not looked()
            now += 50.0
    assert grace_seconds(launches.measured) is None
    monkeypatch.setenv("RANK", "0")
    for seconds in (900.0, 100.0, 20.0):  # with the start; a batch; the next model of the command
        now += seconds
        assert measured_looks(lambda: True)()
    assert grace_seconds(launches.measured) == 260.0
    for number in range(8):  # later launches had no such hour
        file = run / "launches_evaluate" / f"8-{number}" / "longest_step.json"
        file.parent.mkdir()
        file.write_text('{"step_seconds": 10.0}')
    assert grace_seconds(launches.measured) == 80.0
    written = Launches(run / "launches", run, "--output run")
    assert written.measured == run / "launches"
    assert Launches(run / "launches", run, "output=run").measured == run

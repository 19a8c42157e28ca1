"""What `submit slurm` leaves and says where sbatch takes a job, refuses it, or is not there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_distill.cli import main
from megatron_distill.launching.records import Launches, LaunchRecord, Outcome, Status, write_record
from megatron_distill.launching.status.read import read_status

ACCEPTS = 'echo "4711;cluster"'
REFUSES = "echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1"
TESTS = "echo 'sbatch: Job 7 to start at 2026-01-01T00:00:00 on nodes n1' >&2"
ACCEPTS_ONCE = f"if [ -e {{mark}} ]; then {REFUSES}; fi; : > {{mark}}; echo 4711"


@dataclass(frozen=True)
class Desk:
    """A machine with a stand-in for sbatch, and a program whose results are in `run`."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def sbatch(self, text: str) -> None:
        program = self.folder / "bin" / "sbatch"
        program.write_text(f"#!/bin/sh\n{text.format(mark=self.folder / 'mark')}\n")
        program.chmod(0o755)

    def submit(self, *words: str) -> int:
        return self.submit_without_cores("--cpus-per-task", "8", *words)

    def submit_without_cores(self, *words: str) -> int:
        program = ["--command", str(self.folder / "program.py"), "--nodes", "1"]
        return main(["submit", "slurm", *program, *words])


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    (tmp_path / "bin").mkdir()
    found = Desk(tmp_path)
    (tmp_path / "program.py").write_text(f"print({f'output: {found.run}'!r})\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return found


def finished(run: Path) -> None:
    """A run whose launch has reached the last step."""
    run.mkdir()
    (run / "config.yaml").write_text("train: {steps: 1}\n")
    (run / "metrics.jsonl").write_text('{"step": 1, "step_seconds": 1.0}\n')
    launches = Launches(run / "launches", run, "")
    now = time.time()
    one = LaunchRecord("7", 0, "7", ["train"], ["n1"], ["n1"], 0, now - 10)
    write_record(launches.begin(one) / "outcome.json", Outcome(Status.DONE, "done", 1, now, "done"))


def test_a_job_in_the_queue_is_named_with_the_way_to_ask_for_it(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.sbatch(ACCEPTS)
    assert desk.submit("--chain", "2") == 0
    assert capsys.readouterr().out == "4711\n4711\n"
    status = read_status(desk.run)
    assert status.state == "waiting"
    assert status.detail.startswith("job 4711, 4711 submitted 0:00 ago, no launch since then; ")
    assert "`squeue --jobs=4711,4711` tells whether" in status.detail


@pytest.mark.parametrize(("sbatch", "status"), [(REFUSES, 1), (TESTS, 0)], ids=["no", "test only"])
def test_a_submission_without_a_job_leaves_the_state_before_it(
    desk: Desk, sbatch: str, status: int
) -> None:
    finished(desk.run)
    desk.sbatch(sbatch)
    assert desk.submit() == status
    assert read_status(desk.run).state == "done"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--health-command", ""), "--health-command '': is empty; give a shell command, such as"),
        (("--health-command", " "), "--health-command ' ': is empty; give a shell command"),
        (
            ("--container", "i", "--container-mounts", "nonsense"),
            "--container-mounts 'nonsense': write FROM:TO for each mount, with commas between",
        ),
        (("--container", "i", "--container-mounts", "/a:/b,"), "'/a:/b,': write FROM:TO"),
        (("--container", "i", "--container-mounts", "/a:"), "'/a:': write FROM:TO"),
        (("--container", "", "--container-mounts", "/a:/b"), "--container '': is empty; give"),
        (("--container", "i", "--container-python", ""), "--container-python '': is empty; give"),
        (
            ("--ranks-per-node", "8", "--gpus-per-node", "4"),
            "--ranks-per-node 8: is more than --gpus-per-node 4, and each rank needs a GPU of its "
            "own; give at most 4, or leave --gpus-per-node out for ranks on CPUs",
        ),
        (("--ranks-per-node", "8", "--gpus-per-node", "a100:4"), "more than --gpus-per-node 4,"),
    ],
)
def test_an_option_that_no_job_could_follow_says_what_to_give(
    desk: Desk, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        desk.submit(*words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not desk.run.exists()


@pytest.mark.parametrize(
    "words",
    [
        ("--ranks-per-node", "8"),
        ("--ranks-per-node", "4", "--gpus-per-node", "a100:4"),
        ("--ranks-per-node", "2", "--gpus-per-node", "4"),
    ],
)
def test_a_node_may_have_ranks_without_gpus_and_gpus_without_ranks(
    desk: Desk, words: tuple[str, ...]
) -> None:
    assert desk.submit(*words, "--dry-run") == 0


def test_options_of_a_container_without_one_are_a_warning(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    mounts = ("--container-mounts", "/a:/b,/c:/d:ro", "--container-python", "/e")
    assert desk.submit(*mounts, "--dry-run") == 0
    found = capsys.readouterr()
    for option in ("--container-mounts /a:/b,/c:/d:ro", "--container-python /e"):
        assert f"{option}: has no effect without --container; give the image\n" in found.err
    assert "--container" not in found.out
    assert desk.submit(*mounts, "--container", "i.sqsh", "--dry-run") == 0
    found = capsys.readouterr()
    assert found.err == ""
    rules = "--container i.sqsh --container-mounts /a:/b,/c:/d:ro --container-python /e"
    assert rules in found.out


@pytest.mark.parametrize(
    ("words", "warns"),
    [
        (("--no-requeue", "--max-starts", "5"), True),
        (("--no-requeue", "--max-starts", "5", "--chain", "4"), False),
        (("--no-requeue", "--max-starts", "5", "--array", "4"), False),
        (("--no-requeue",), False),
        (("--max-starts", "5"), False),
    ],
)
def test_starts_of_a_job_that_is_launched_once_are_a_warning(
    desk: Desk, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], warns: bool
) -> None:
    assert desk.submit(*words, "--dry-run") == 0
    found = capsys.readouterr().err
    text = "--max-starts 5: has no effect with --no-requeue, which launches once; leave it out, "
    assert (text in found) if warns else not found


@pytest.mark.parametrize(
    ("words", "warns"),
    [
        ((), True),
        (("--gpus-per-node", "8"), True),
        (("--sbatch=--mem=64G",), True),
        (("--sbatch=--exclusive=user",), True),
        (("--cpus-per-task", "8"), False),
        (("--sbatch=--exclusive",), False),
        (("--sbatch=--cpus-per-gpu=8",), False),
        (("--sbatch=--cpus-per-gpu 8",), False),
        (("--sbatch=--mincpus=8",), False),
    ],
)
def test_a_submission_that_asks_for_no_cores_is_a_warning(
    desk: Desk, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], warns: bool
) -> None:
    """Slurm would give all ranks of a node one core, where jobs share nodes."""
    assert desk.submit_without_cores(*words, "--dry-run") == 0
    text = (
        "--cpus-per-task: is not given; on clusters that share nodes, all ranks of a node then get "
        "one core. Give the cores of a node, as --cpus-per-task 64, or --sbatch=--exclusive\n"
    )
    found = capsys.readouterr().err
    assert found.endswith(text) if warns else found == ""
    assert found.count("\n") == int(warns)


def test_a_first_submission_that_is_refused_is_no_run(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.sbatch(REFUSES)
    assert desk.submit() == 1
    text = capsys.readouterr().err
    assert text == (
        "sbatch: error: invalid partition specified: nope\n"
        "error: sbatch failed with status 1, and took no job. The script is kept: repair what "
        f"sbatch says, and submit again, or by hand: sbatch {desk.run}/launches/job.sbatch\n"
    )
    assert (desk.run / "launches" / "job.sbatch").is_file()
    assert main(["status", str(desk.run)]) == 1
    text = capsys.readouterr().err
    assert f"error: {desk.run}: no run has started here" in text


def test_the_first_job_of_a_chain_waits_where_the_second_is_refused(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.sbatch(ACCEPTS_ONCE)
    assert desk.submit("--chain", "2") == 1
    assert capsys.readouterr().out == "4711\n"
    assert read_status(desk.run).detail.startswith("job 4711 submitted 0:00 ago")


def test_a_test_of_sbatch_submits_nothing_and_shows_what_sbatch_said(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.sbatch(TESTS)
    assert desk.submit("--sbatch=--test-only", "--chain", "2") == 0
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err == (
        "sbatch: Job 7 to start at 2026-01-01T00:00:00 on nodes n1\n"
        "nothing was submitted: sbatch gave no job number; "
        f"script: {desk.run}/launches/job.sbatch\n"
    )


def test_a_machine_without_sbatch_is_told_from_a_folder_that_cannot_be_made(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert desk.submit() == 1
    assert capsys.readouterr().err.startswith("error: sbatch: no such program here; submit on")
    desk.sbatch(ACCEPTS)
    (desk.folder / "bin" / "sbatch").chmod(0o600)
    assert desk.submit() == 1
    assert "sbatch: cannot be started (Permission denied)" in capsys.readouterr().err
    (desk.folder / "program.py").write_text("print('output: /proc/x/y')\n")
    assert desk.submit() == 1
    text = capsys.readouterr().err
    assert text.startswith("error: output=/proc/x/y: cannot write in /proc/x/y/launches (No such")
    assert "or name another folder" in text


def test_a_folder_below_a_file_is_named(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.sbatch(ACCEPTS)
    desk.run.touch()
    (desk.folder / "program.py").write_text(f"print({f'output: {desk.run}/x'!r})\n")
    assert desk.submit() == 1
    text = capsys.readouterr().err
    assert text.startswith(f"error: output={desk.run}/x: cannot write in {desk.run}/x/launches (")
    assert "Not a directory" in text


def test_a_save_that_slurm_cannot_announce_in_time_names_the_option(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        desk.submit("--grace-seconds", "65535.5")
    text = capsys.readouterr().err
    assert "--grace-seconds 65535.5: Slurm signals a job at most 65,535 seconds before" in text
    assert desk.submit("--grace-seconds", "65535", "--dry-run") == 0
    assert "--signal=B:USR1@65535\n" in capsys.readouterr().out

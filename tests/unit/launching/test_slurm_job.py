"""Requeues and exclusions by Slurm's programs, which scripts stand in for."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.launching.slurm import SlurmJob

SCONTROL = """#!/bin/sh
echo "$@" >> {log}
case "$1" in
    show) echo "JobId=7 ExcNodeList={excluded} NodeList=n1,n2" ;;
    {failing}) echo "slurm_update error: Invalid node" >&2; exit 1 ;;
esac
"""


SQUEUE = """#!/bin/sh
case "$*" in
    *--jobs=7*) echo "/runs/a/job.sbatch a b" ;;
    *--states=PENDING*)
        echo "8 /runs/a/job.sbatch a b"
        echo "9 /runs/b/job.sbatch a b"
        echo "12_3 /runs/a/job.sbatch a b" ;;
esac
"""


def test_a_job_knows_its_end_and_its_wait_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = "EligibleTime=2026-03-01T12:00:00 StartTime=2026-03-01T12:01:30 EndTime=Unknown"
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\ncase "$2" in hostnames) echo n1;; *) echo "{fields}";; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    job = SlurmJob.from_environment(None)
    assert (job.nodes, job.waited, job.end) == (("n1",), 90.0, None)


@pytest.mark.parametrize(
    ("excluded", "without", "failing", "update", "refusal"),
    [
        ("(null)", ["n2"], "none", "update JobId=7 ExcNodeList=n2", False),
        ("n[5-6],n8", ["n2"], "none", "update JobId=7 ExcNodeList=n[5-6],n8,n2", False),
        ("n[5-6]", [], "none", None, False),
        ("(null)", ["n2"], "update", "update JobId=7 ExcNodeList=n2", False),
        ("(null)", ["n2"], "requeue", None, True),
    ],
)
def test_a_requeued_job_excludes_bad_nodes_beside_those_that_it_excluded_before(
    excluded: str,
    without: list[str],
    failing: str,
    update: str | None,
    refusal: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, log = tmp_path / "scontrol", tmp_path / "log"
    program.write_text(SCONTROL.format(log=log, excluded=excluded, failing=failing))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    job = SlurmJob("7", "7", 0, ("n1", "n2"), None)
    assert (job.requeue(without=without, silent=[]) is not None) == refusal
    calls = log.read_text().splitlines()
    assert "requeue 7" in calls
    assert [call for call in calls if call.startswith("update")] == ([update] if update else [])


@pytest.mark.parametrize("failing", ["none", "update"])
def test_waiting_jobs_of_the_same_words_exclude_bad_nodes_as_well(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    programs = {
        "scontrol": SCONTROL.format(log=log, excluded="n5", failing=failing),
        "squeue": SQUEUE,
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    job = SlurmJob("7", "7", 0, ("n1", "n2"), None)
    job.exclude_later(["n1", "n2"])
    calls = [call for call in log.read_text().splitlines() if call.startswith("update")]
    assert calls == [f"update JobId={later} ExcNodeList=n5,n1,n2" for later in ("8", "12_3")]


def test_a_job_goes_on_where_the_queue_gives_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    SlurmJob("7", "7", 0, ("n1",), None).exclude_later(["n1"])

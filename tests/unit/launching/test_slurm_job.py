"""A requeue by Slurm's program, which a script stands in for."""

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

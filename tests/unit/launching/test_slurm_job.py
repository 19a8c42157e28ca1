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


PARTITION = """#!/bin/sh
echo "$@" >> {log}
case "$1 $2" in
    "show job") echo "JobId=$3 Partition=gpu ExcNodeList={excluded} NodeList=n1,n2 {wanted}" ;;
    "show hostnames") echo "$3" | tr , '\\n' ;;
    "show config") printf 'ResvEpilog = x\\nReturnToService         = {returns}\\nX = 0\\n' ;;
esac
"""


def sinfo(n3: str = "allocated", reason: str = "none") -> str:
    """Three nodes of a partition, the last in this state."""
    answer = f"n1|mixed|none\\nn2|idle*|none\\nn3|{n3}|{reason}\\nn2|idle*|none\\n"
    asked = "--noheader --Node --partition=gpu --format=%N|%T|%E"
    return f"#!/bin/sh\ntest \"$*\" = '{asked}' && printf '%b' '{answer}'\n"


SINFO = sinfo()


SQUEUE = """#!/bin/sh
case "$*" in
    *--jobs=7*) echo "/runs/a/job.sbatch a b" ;;
    *--states=PENDING*)
        echo "8 /runs/a/job.sbatch a b"
        echo "9 /runs/b/job.sbatch a b"
        echo "12_3 /runs/a/job.sbatch a b" ;;
esac
"""


def programs(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    scontrol: str,
    excluded: str = "(null)",
    failing: str = "none",
    wanted: str = "",
    returns: int = 0,
    **others: str,
) -> Path:
    """Put programs of Slurm into a folder on the path; returns the log of scontrol's calls."""
    log = folder / "log"
    log.touch()
    answers = scontrol.format(
        log=log, excluded=excluded, failing=failing, wanted=wanted, returns=returns
    )
    texts = {"scontrol": answers, **others}
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return log


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
    log = programs(tmp_path, monkeypatch, scontrol=SCONTROL, excluded=excluded, failing=failing)
    job = SlurmJob("7", "7", 0, ("n1", "n2"), None)
    assert (job.requeue(without=without, silent=[]) is not None) == refusal
    calls = log.read_text().splitlines()
    assert "requeue 7" in calls
    assert [call for call in calls if call.startswith("update")] == ([update] if update else [])


LACK = "1 of 2 nodes are left in partition gpu without "


@pytest.mark.parametrize(
    ("excluded", "without", "silent", "update", "refusal"),
    [
        ("(null)", ["n2"], [], "n2", ""),
        ("(null)", ["n2", "n3"], ["n3"], "n2", ""),
        ("(null)", ["n2", "n3"], ["n2", "n3"], None, ""),
        ("n3", ["n1"], ["n1"], None, ""),
        ("(null)", ["n2", "n3"], [], None, f"{LACK}n2, n3: repair or resume enough"),
        ("n3", ["n2"], [], None, f"{LACK}n2: repair or resume enough"),
        ("n3", ["n1", "n2"], ["n1"], None, f"{LACK}n2: repair or resume enough"),
    ],
)
def test_a_job_for_which_the_partition_has_no_other_nodes_is_not_left_to_wait(
    excluded: str,
    without: list[str],
    silent: list[str],
    update: str | None,
    refusal: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = programs(tmp_path, monkeypatch, scontrol=PARTITION, excluded=excluded, sinfo=SINFO)
    job = SlurmJob("7", "7", 0, ("n1", "n2"), None)
    refused = job.requeue(without=without, silent=silent)
    assert (refused is None) == (not refusal)
    assert (refused or "").startswith(refusal)
    calls = log.read_text().splitlines()
    assert ("requeue 7" in calls) == (not refusal)
    updates = [call for call in calls if call.startswith("update")]
    assert updates == ([] if update is None else [f"update JobId=7 ExcNodeList={update}"])


@pytest.mark.parametrize(
    ("state", "reason", "returns", "stays_out"),
    [
        *((busy, "none", 0, False) for busy in ("allocated+", "mixed-", "maint", "idle~")),
        *((out, "disk", 2, True) for out in ("drained", "drained*", "draining", "fail", "inval")),
        *((restart, "kernel", 0, False) for restart in ("draining@", "down^", "drained!")),
        ("down*", "Not responding [slurm@2026-03-01]", 0, True),
        ("down*", "Not responding [slurm@2026-03-01]", 1, False),
        ("down", "fan", 1, True),
        ("down", "fan | board", 2, False),
    ],
)
def test_nodes_that_only_an_administrator_brings_back_are_not_waited_for(
    state: str,
    reason: str,
    returns: int,
    stays_out: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = programs(
        tmp_path, monkeypatch, scontrol=PARTITION, returns=returns, sinfo=sinfo(state, reason)
    )
    refused = SlurmJob("7", "7", 0, ("n1", "n2"), None).requeue(without=["n2"], silent=[])
    assert ("requeue 7" in log.read_text().splitlines()) == (not stays_out)
    name = state.strip("*")
    assert (refused or "").startswith(f"{LACK}n2 and n3 ({name}): repair" if stays_out else "")
    assert (refused is not None) == stays_out


def test_a_job_without_bad_nodes_waits_for_drained_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = programs(tmp_path, monkeypatch, scontrol=PARTITION, sinfo=sinfo("drained"))
    job = SlurmJob("7", "7", 0, ("n1", "n2", "n3"), None)
    assert job.requeue(without=["n2"], silent=["n2"]) is None
    assert "requeue 7" in log.read_text().splitlines()


@pytest.mark.parametrize(
    ("nodes", "wanted", "count"),
    [
        (["n1"], "", 2),
        (["n1", "n2"], "", 0),
        (["n1", "n2"], "NumNodes=1", 2),
        (["n1"], "NumNodes=3", 0),
        (["n1"], "NumNodes=2-4", 2),
    ],
)
def test_waiting_jobs_keep_the_nodes_without_which_they_would_wait_for_ever(
    nodes: list[str], wanted: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = programs(
        tmp_path, monkeypatch, scontrol=PARTITION, wanted=wanted, sinfo=SINFO, squeue=SQUEUE
    )
    SlurmJob("7", "7", 0, ("n1", "n2"), None).exclude_later(nodes)
    assert log.read_text().count("update") == count


@pytest.mark.parametrize("failing", ["none", "update"])
def test_waiting_jobs_of_the_same_words_exclude_bad_nodes_as_well(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = programs(
        tmp_path, monkeypatch, scontrol=SCONTROL, excluded="n5", failing=failing, squeue=SQUEUE
    )
    job = SlurmJob("7", "7", 0, ("n1", "n2"), None)
    job.exclude_later(["n1", "n2"])
    calls = [call for call in log.read_text().splitlines() if call.startswith("update")]
    assert calls == [f"update JobId={later} ExcNodeList=n5,n1,n2" for later in ("8", "12_3")]


def test_a_job_goes_on_where_the_queue_gives_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    SlurmJob("7", "7", 0, ("n1",), None).exclude_later(["n1"])

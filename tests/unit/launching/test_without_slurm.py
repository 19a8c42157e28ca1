"""A submission from its words to its ranks where no Slurm is: scripts stand in for its programs."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress

import pytest

from megatron_distill.cli import main
from megatron_distill.launching.ports import free_port
from megatron_distill.launching.records import Status
from megatron_distill.launching.slurm import SlurmJob
from tests.unit.launching.slurm_programs import StandIn


def test_the_ranks_of_a_submission_have_its_nodes_port_words_and_container(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    check = 'test "$SLURMD_NODENAME" != n2'
    container = ["--container", "image.sqsh", "--container-python", sys.executable]
    script = stand_in.submit(
        "--ranks-per-node", "4", "--spare-nodes", "1", "--health-command", check, *container
    )  # fmt: skip
    assert capsys.readouterr().out == f"{stand_in.job}\n"
    done = stand_in.run(script, RANKS="failed")
    # A failure, after which the job asks to be queued again.
    assert done.returncode == 1, done.stderr
    assert "node n2: 'test" in done.stderr
    settings, checks, ranks = stand_in.called("srun")
    assert "--nodelist=n1" in settings
    assert settings[-2:] == ["teacher.ranks=2", "--print-config"]
    assert "--nodelist=n1,n2,n3" in checks
    assert "--kill-on-bad-exit=0" in checks
    assert checks[checks.index("--command") + 1] == check
    # Four fifths of the 300 seconds that checks have with an image to import.
    assert checks[checks.index("--command-seconds") + 1] == "240.0"
    assert "--nodelist=n1,n3" in ranks
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} <= {*ranks}
    for call in (settings, checks, ranks):
        assert {"--container-image=image.sqsh", "--no-container-mount-home"} <= {*call}
    words = ranks[ranks.index(sys.executable) :]
    assert words[words.index("--endpoint") + 1] == f"127.0.0.1:{stand_in.port}"
    assert words[words.index("--ranks-per-node") + 1] == "4"
    assert words[-3:] == ["--", stand_in.program, "teacher.ranks=2"]
    assert [call[1] for call in stand_in.called("torchrun")] in (["n1", "n3"], ["n3", "n1"])
    job = str(stand_in.job)
    assert stand_in.called("scontrol", "requeue") == [["scontrol", "requeue", job]]
    update = ["scontrol", "update", f"JobId={job}", "ExcNodeList=n2"]
    assert stand_in.called("scontrol", "update") == [update]
    (launch,) = stand_in.launches.all()
    assert (launch.name, launch.nodes) == (f"{job}-0", ["n1", "n3"])
    (outcome,) = stand_in.outcomes
    assert outcome is not None
    assert (outcome.status, outcome.next) == (Status.FAILED, "goes on from step 0")


def test_a_chain_is_submitted_once_for_each_job_which_excludes_bad_nodes_in_place_of_a_requeue(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    program = ["--command", stand_in.program, "--nodes", "2", "--spare-nodes", "1"]
    checks = ["--health-command", 'test "$SLURMD_NODENAME" != n2', "--health-seconds", "100"]
    assert main(["submit", "slurm", "x", *program, "--chain", "2", *checks]) == 0
    assert capsys.readouterr().out == f"{stand_in.job}\n{stand_in.job}\n"
    assert len(stand_in.called("sbatch")) == 2
    done = stand_in.run(stand_in.launches.script_file, RANKS="failed")
    assert done.returncode == 1, done.stderr
    _, checked, _ = stand_in.called("srun")
    assert checked[checked.index("--command-seconds") + 1] == "80.0"
    assert stand_in.called("scontrol", "requeue") == []
    assert "the next job goes on from step 0" in done.stderr
    update = ["scontrol", "update", "JobId=4712", "ExcNodeList=n2"]
    assert stand_in.called("scontrol", "update") == [update]


def test_jobs_on_one_node_have_ports_of_their_own() -> None:
    jobs = [SlurmJob(number, number, 0, ("n1",), None) for number in ("7", "8", "20007")]
    first, second, third = (job.ports for job in jobs)
    assert all(10_000 <= port < 30_000 for port in (*first, *second))
    assert {*first}.isdisjoint(second)
    assert third == first
    # The job 20,000 later has the same number. While that port is used it takes another one, which
    # is not its neighbour's: both may be about to begin.
    with socket.socket() as used:
        with suppress(OSError):  # another program's
            used.bind(("", first[0]))
            used.listen()
        assert free_port(third) not in (None, first[0], second[0])


def test_the_launch_after_a_requeue_has_the_port_of_the_one_before() -> None:
    job = SlurmJob("4713", "4713", 1, ("n1",), None)
    before = free_port(job.ports)
    assert before is not None
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("", before))
        store.listen()
        with socket.create_connection(store.getsockname()) as _:
            store.accept()[0].close()  # first, so that the address stays in TIME_WAIT
    assert free_port(job.ports) == before

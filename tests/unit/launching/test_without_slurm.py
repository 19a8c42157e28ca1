"""A submission from its words to its ranks where no Slurm is: scripts stand in for its programs.

`srun` runs the settings and the checks of the nodes here, and writes down the ranks' command.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_distill.cli import main
from megatron_distill.launching.records import Launches, Status
from megatron_distill.launching.slurm import SlurmJob

JOB = 4711
PROGRAMS = {
    "sbatch": 'echo "sbatch $*" >> {log}; echo "4711;cluster"',
    "scontrol": """\
echo "scontrol $*" >> {log}
case "$1 $2" in
    "show hostnames") printf 'n1\\nn2\\nn3\\n' ;;
    "show job") echo "JobId=4711 EndTime=Unknown ExcNodeList=(null)" ;;
    "show node") echo "NodeName=$3 NodeAddr=127.0.0.1" ;;
esac
""",
    "squeue": """\
case "$*" in
    *--jobs=*) echo job.sbatch ;;
    *) printf '4712 job.sbatch\\n4713 other.sbatch\\n' ;;
esac
""",
    "srun": """\
echo "srun $*" >> {log}
while true; do
    case "$1" in
        --nodelist=*) nodes=${{1#--nodelist=}}; shift ;;
        --*) shift ;;
        *) break ;;
    esac
done
case "$*" in *launching.node\\ --launch*) exit 0 ;; esac
for node in $(echo "$nodes" | tr , ' '); do SLURMD_NODENAME=$node "$@" || exit; done
""",
}


@dataclass(frozen=True)
class StandIn:
    """The programs' folder, what they were called with, and a program to submit."""

    folder: Path

    @property
    def calls(self) -> list[list[str]]:
        return [line.split(" ") for line in (self.folder / "log").read_text().splitlines()]

    def called(self, *start: str) -> list[list[str]]:
        return [one for one in self.calls if one[: len(start)] == list(start)]

    @property
    def launches(self) -> Launches:
        return Launches(self.folder / "run" / "launches", self.folder / "run", "")

    def submit(self, *words: str) -> Path:
        """Submit the program over two nodes and a spare one; returns the batch script."""
        program = ["--command", str(self.folder / "program.py"), "--nodes", "2"]
        assert main(["submit", "slurm", "teacher.ranks=2", *program, *words]) == 0
        (submitted,) = self.called("sbatch")
        return Path(submitted[-1])

    def run(self, script: Path) -> subprocess.CompletedProcess[str]:
        """Run a batch script as Slurm does, in a job of three nodes."""
        variables = {"SLURM_JOB_ID": str(JOB), "SLURM_JOB_NODELIST": "n[1-3]"}
        return subprocess.run(
            ["bash", str(script)], env=os.environ | variables, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    for name, text in PROGRAMS.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{text.format(log=tmp_path / 'log')}\n")
        program.chmod(0o755)
    (tmp_path / "program.py").write_text(f"print({f'output: {tmp_path}/run'!r})\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    return StandIn(tmp_path)


def test_the_ranks_of_a_submission_have_its_nodes_port_words_and_container(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    check = 'test "$SLURMD_NODENAME" != n2'
    container = ["--container", "image.sqsh", "--container-python", sys.executable]
    script = stand_in.submit(
        "--ranks-per-node", "4", "--spare-nodes", "1", "--health-command", check, *container
    )  # fmt: skip
    assert capsys.readouterr().out == f"{JOB}\n"
    done = stand_in.run(script)
    # The stand-in's ranks leave no record: a failure, after which the job asks to be queued again.
    assert done.returncode == 1, done.stderr
    assert "node n2: 'test" in done.stderr
    assert "no report from n1, n3" in done.stderr
    settings, checks, ranks = stand_in.called("srun")
    assert "--nodelist=n1" in settings
    assert settings[-2:] == ["teacher.ranks=2", "--print-config"]
    assert "--nodelist=n1,n2,n3" in checks
    assert "--kill-on-bad-exit=0" in checks
    # Four fifths of the 300 seconds that checks have with an image to import.
    assert checks[checks.index("--command-seconds") + 1] == "240.0"
    assert "--nodelist=n1,n3" in ranks
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} <= {*ranks}
    for call in (settings, checks, ranks):
        assert {"--container-image=image.sqsh", "--no-container-mount-home"} <= {*call}
    words = ranks[ranks.index(sys.executable) :]
    address, port = words[words.index("--endpoint") + 1].split(":")
    assert (address, int(port) >= 10_000 + JOB) == ("127.0.0.1", True)
    assert words[words.index("--ranks-per-node") + 1] == "4"
    assert words[-3:] == ["--", str(stand_in.folder / "program.py"), "teacher.ranks=2"]
    assert stand_in.called("scontrol", "requeue") == [["scontrol", "requeue", str(JOB)]]
    update = ["scontrol", "update", f"JobId={JOB}", "ExcNodeList=n2"]
    assert stand_in.called("scontrol", "update") == [update]
    (launch,) = stand_in.launches.all()
    assert (launch.name, launch.nodes) == (f"{JOB}-0", ["n1", "n3"])
    outcome = stand_in.launches.outcome(launch)
    assert (outcome.status, outcome.next) == (Status.FAILED, "goes on from step 0")


def test_a_chain_is_submitted_once_for_each_job_which_excludes_bad_nodes_in_place_of_a_requeue(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    program = ["--command", str(stand_in.folder / "program.py"), "--nodes", "2"]
    program += ["--spare-nodes", "1"]
    checks = ["--health-command", 'test "$SLURMD_NODENAME" != n2', "--health-seconds", "100"]
    assert main(["submit", "slurm", "x", *program, "--chain", "2", *checks]) == 0
    assert capsys.readouterr().out == f"{JOB}\n{JOB}\n"
    assert len(stand_in.called("sbatch")) == 2
    done = stand_in.run(stand_in.launches.script_file)
    assert done.returncode == 1, done.stderr
    _, checked, _ = stand_in.called("srun")
    assert checked[checked.index("--command-seconds") + 1] == "80.0"
    assert stand_in.called("scontrol", "requeue") == []
    assert "the next job goes on from step 0" in done.stderr
    update = ["scontrol", "update", "JobId=4712", "ExcNodeList=n2"]
    assert stand_in.called("scontrol", "update") == [update]


def test_jobs_on_one_node_have_ports_of_their_own() -> None:
    jobs = [SlurmJob(number, number, 0, ("n1",), None) for number in ("7", "8", "20007")]
    ports = [int(job.endpoint("n1").rpartition(":")[2]) for job in jobs]
    assert all(10_000 <= port < 30_000 for port in ports)
    assert ports[0] != ports[1]
    # The job 20,000 later has the same number. While that port is used it takes another one, which
    # is not its neighbour's: both may be about to begin.
    with socket.socket() as used:
        with suppress(OSError):  # another program's
            used.bind(("", ports[0]))
            used.listen()
        assert int(jobs[2].endpoint("n1").rpartition(":")[2]) not in ports[:2]


def test_the_launch_after_a_requeue_has_the_port_of_the_one_before() -> None:
    job = SlurmJob("4713", "4713", 1, ("n1",), None)
    before = job.endpoint("n1")
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("", int(before.rpartition(":")[2])))
        store.listen()
        with socket.create_connection(store.getsockname()) as _:
            store.accept()[0].close()  # first, so that the address stays in TIME_WAIT
    assert job.endpoint("n1") == before

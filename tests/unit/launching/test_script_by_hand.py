"""launch/slurm.sbatch, for submissions by hand, where scripts stand in for Slurm's programs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.guards.source_tree import ROOT
from tests.unit.launching.slurm_programs import BY_HAND, StandIn

TINY = str(ROOT / "configs" / "tiny.yaml")


def asked(script: Path) -> dict[str, str]:
    """The options of #SBATCH lines; '' without a value."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script.read_text(), re.MULTILINE))


def test_the_script_asks_slurm_for_what_a_submission_asks_for(stand_in: StandIn) -> None:
    submitted, own = asked(stand_in.submit()), asked(BY_HAND)
    for name in ("ntasks-per-node", "signal", "requeue", "open-mode"):
        assert own[name] == submitted[name]
    # What sbatch is called with by hand: the rest of a submission.
    assert set(submitted) - set(own) == {"nodes", "chdir"}


def test_its_ranks_have_the_nodes_the_port_and_the_rendezvous_of_the_job(stand_in: StandIn) -> None:
    rules = ("--ranks-per-node", "4", "--grace-seconds", "500")
    done = stand_in.run(
        BY_HAND, *rules, "--", stand_in.program, "a=b c",
        nodes=("n2", "n9", "n10"), RANKS="done", SLURM_CPUS_PER_TASK="32",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert stand_in.called("scontrol", "show", "hostnames") == [
        ["scontrol", "show", "hostnames", "n[...]"]
    ]
    settings, checks, ranks = stand_in.called("srun")
    assert {"--nodes=1", "--nodelist=n2"} <= {*settings}
    assert settings[-3:] == [stand_in.program, "a=b c", "--print-config"]
    every = {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--nodelist=n2,n9,n10"}
    for call in (checks, ranks):
        assert every | {"--export=ALL", "--cpus-per-task=32"} <= {*call}
    assert {"--kill-on-bad-exit=0", "--wait=0"} <= {*checks}
    assert {"--kill-on-bad-exit=1", "--wait=60"} <= {*ranks}
    endpoint = f"127.0.0.2:{stand_in.port}"
    assert ranks[ranks.index("--endpoint") + 1] == endpoint
    assert ranks[ranks.index("--stop-seconds") + 1] == "500.0"
    (launch,) = stand_in.launches.all()
    assert launch.nodes == ["n2", "n9", "n10"]
    found = sorted(stand_in.called("torchrun"), key=lambda call: launch.nodes.index(call[1]))
    for call, is_first in zip(found, (1, 0, 0), strict=True):
        assert call[2:] == [
            "--nnodes=3", "--nproc-per-node=4", "--max-restarts=0",
            f"--rdzv-id={stand_in.job}-0", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}",
            f"--rdzv-conf=is_host={is_first}", f"--local-addr=127.0.0.{call[1][1:]}",
            "--signals-to-handle=SIGQUIT", f"--log-dir={stand_in.launches.of(launch)}",
            "--", stand_in.program, "a=b c",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ((TINY,), ["train", TINY]),
        (("--no-requeue", "--", "train", TINY), ["train", TINY]),
        (("train", TINY, "train.steps=3"), ["train", TINY, "train.steps=3"]),
    ],
    ids=["a configuration", "rules first", "a command"],
)
def test_a_configuration_alone_is_one_to_train(
    stand_in: StandIn, words: tuple[str, ...], command: list[str]
) -> None:
    output = f"output={stand_in.folder}/run"
    done = stand_in.run(BY_HAND, *words, output, nodes=("n1", "n2"), RANKS="done")
    assert done.returncode == 0, done.stderr
    (launch,) = stand_in.launches.all()
    assert launch.command == [*command, output]
    for call in stand_in.called("torchrun"):
        assert call[call.index("-m") :] == ["-m", "--", "megatron_distill.cli", *command, output]


def test_without_words_no_program_of_slurm_starts_anything(stand_in: StandIn) -> None:
    done = stand_in.run(BY_HAND)
    assert done.returncode == 78
    assert done.stderr == "error: give a configuration, such as configs/tiny.yaml\n"
    assert stand_in.called("srun") == stand_in.called("scontrol", "requeue") == []


def test_a_task_of_an_array_leaves_the_rest_to_the_next_one(stand_in: StandIn) -> None:
    of_array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    done = stand_in.run(BY_HAND, stand_in.program, RANKS="failed", **of_array)
    assert done.returncode == 1, done.stderr
    assert "the next job goes on from step 0" in done.stderr
    assert stand_in.called("scontrol", "show", "job")[0][3] == "7_2"
    assert stand_in.called("scontrol", "requeue") == []


def test_without_the_variable_python_is_that_of_the_repository(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = stand_in.folder / ".venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "python").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (venv / "python").chmod(0o755)
    monkeypatch.delenv("PYTHON", raising=False)
    done = subprocess.run(
        ["bash", str(BY_HAND), "a.yaml", "x=1 2"],
        cwd=stand_in.folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "-m|megatron_distill.launching.slurm_job|--|a.yaml|x=1 2|"


SAYING = """\
import os, sys
if "--print-config" in sys.argv:
    print("output: {run}")
else:
    names = ("SLURMD_NODENAME", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR",
             "TORCHELASTIC_RUN_ID")
    print(*(os.environ[name] for name in names), *sys.argv[1:])
"""


@pytest.mark.slow
def test_torchrun_s_ranks_are_in_the_order_of_slurm_s_nodes(stand_in: StandIn) -> None:
    """A teacher's nodes are the last; by name n10 would come first."""
    Path(stand_in.program).write_text(SAYING.format(run=stand_in.folder / "run"))
    words = ("--ranks-per-node", "2", "--", stand_in.program, "a=b c")
    done = stand_in.run(BY_HAND, *words, nodes=("n2", "n9", "n10"))
    assert done.returncode == 0, done.stderr
    (launch,) = stand_in.launches.all()
    folder = stand_in.launches.of(launch)
    found = [path.read_text() for path in sorted(folder.glob("rank_*.out"))]
    assert found == [
        f"{node} {place} {local} 6 127.0.0.2 {stand_in.job}-0 a=b c\n"
        for place, node in enumerate(("n2", "n9", "n10"))
        for local in (0, 1)
    ]

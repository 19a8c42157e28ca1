"""The batch script of a submission: demands, rules, bad nodes, grace, chains and containers."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_distill.cli import main
from megatron_distill.errors import ConfigError
from megatron_distill.launching.batch_script import Demand, batch_script, limit_seconds
from megatron_distill.launching.program import Program
from megatron_distill.launching.records import BadNode, Launches
from megatron_distill.launching.slurm import Container, SlurmJob
from tests.guards.source_tree import ROOT

TINY = str(ROOT / "configs" / "tiny.yaml")


WRONG = {
    "--chain|2|--array|2": "--chain and --array: choose one",
    "--nodes|0": "--nodes 0: must be 1 or more",
    "--spare-nodes|-1": "--spare-nodes -1: must be 0 or more",
    "--gpus-per-node|0": "--gpus-per-node 0: write a number from 1 on, as 8 or a100:8",
    "--gpus-per-node|a100": "--gpus-per-node a100: write a number from 1 on, as 8 or a100:8",
    "--variable|X": "--variable X: write NAME=VALUE, as NCCL_SOCKET_IFNAME=eth1",
    "--variable|A-B=1": "--variable A-B=1: write NAME=VALUE",
    "--grace-seconds|-5": "--grace-seconds -5: must be a finite number",
    "--health-seconds|inf": "--health-seconds inf: must be a finite number",
    "--job-name|my run": "--job-name 'my run': Slurm's script takes a name without spaces",
    "--sbatch|mem=64G": "--sbatch mem=64G: write it as sbatch takes it, --sbatch=--mem=64G",
    "--sbatch=--nodes=8": "--sbatch --nodes=8: submit has this option itself; write --nodes 8",
    "--sbatch=-t 1-0": "--sbatch -t 1-0: submit has this option itself; write --time 1-0",
    "--sbatch=--ntasks=8": "the batch script sets --ntasks; a node has one task",
    "--sbatch=-o log": "the batch script sets --output; the job's log is next to its records",
    "--sbatch=--mem=1G --exclusive": "give one option, and repeat --sbatch for the next",
    "--sbatch=--exclusive -p h100": "give one option, and repeat --sbatch for the next",
}


def script(folder: Path, *, grace: float | None = None, **demand: Any) -> str:
    launches = Launches(folder / "launches", folder, "output=a")
    asked = Demand(**({"name": "distill", "nodes": 2} | demand))
    program = Program("train", ("a file.yaml", "output=a"))
    return batch_script(asked, program, launches, submission="s1", grace=grace)


def options(text: str) -> dict[str, str]:
    """The options of #SBATCH lines; '' without a value."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))


def job_words(text: str) -> list[str]:
    (line,) = re.findall(r"^exec (.*)$", text, re.MULTILINE)
    return shlex.split(line)


def test_demands_are_options_of_sbatch_and_others_are_left_out(
    tmp_path: Path,
) -> None:
    found = options(script(tmp_path))
    assert set(found) == {
        "job-name", "nodes", "ntasks-per-node", "requeue", "signal", "open-mode", "output", "chdir",
    }  # fmt: skip
    assert found["output"] == f"{tmp_path}/launches/log-%j.txt"
    text = script(
        tmp_path, spare=1, time="1:00:00", partition="h100", account="physics", qos="long",
        gpus_per_node="8", cpus_per_task=64, options=("--reservation=r",),
    )  # fmt: skip
    more = options(text)
    assert {name: more[name] for name in set(more) - set(found)} == {
        "time": "1:00:00", "partition": "h100", "account": "physics", "qos": "long",
        "gpus-per-node": "8", "cpus-per-task": "64", "reservation": "r",
    }  # fmt: skip
    assert more["nodes"] == "3"
    words = job_words(text)
    assert words[words.index("--wanted-nodes") + 1] == "2"
    assert words[-4:] == ["--", "train", "a file.yaml", "output=a"]


def test_bad_nodes_are_excluded(tmp_path: Path) -> None:
    launches = Launches(tmp_path / "launches", tmp_path, "")
    launches.folder.mkdir()
    launches.add_bad_nodes([BadNode("2026-01-01T00:00:00", name, "x") for name in ("n7", "n2")])
    assert options(script(tmp_path))["exclude"] == "n2,n7"


def test_the_warning_comes_as_early_as_measured_steps_and_saves_need(tmp_path: Path) -> None:
    assert options(script(tmp_path))["signal"] == "B:USR1@300"
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "step_seconds": 20.3}) + "\n")
    assert options(script(tmp_path))["signal"] == "B:USR1@101"
    assert options(script(tmp_path, grace=45.0))["signal"] == "B:USR1@45"
    # As measured; sbatch takes no more.
    assert options(script(tmp_path, grace=70_000.0))["signal"] == "B:USR1@65535"


def test_jobs_that_follow_each_other_do_not_requeue_themselves(tmp_path: Path) -> None:
    one, chain, array = (script(tmp_path, **more) for more in ({}, {"chain": 3}, {"array": 3}))
    assert options(chain)["dependency"] == "singleton"
    assert options(array)["array"] == "1-3%1"
    assert options(array)["output"].endswith("log-%A_%a.txt")
    for text in (chain, array):
        assert "no-requeue" in options(text)
        assert "--no-requeue" in job_words(text)
    assert "--no-requeue" not in job_words(one)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("24:00", 1440), ("24:00:00", 86400), ("1-0", 86400), ("2-1:30", 178200),
     ("0-0:5:30", 330), ("1-12:00:00", 129_600), ("100:59:59", 363_599), ("90:00", 5400),
     ("0-48", 172_800), ("35791394", 2_147_483_640), ("0", None), ("0:00:00", None),
     ("unlimited", None), ("UNLIMITED", None), ("INFINITE", None)],
)  # fmt: skip
def test_a_time_limit_is_read_as_sbatch_reads_it(text: str, seconds: float | None) -> None:
    assert limit_seconds(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["24h", "90.5", "1:2:3:4", "1-2-3", "1::5", "1-", "+5", " 90", "", "\u0663", "99:99:99",
     "1:60:00", "1:00:60", "24:90", "1-2:60", "1-2:00:75", "INFINITY"],
)  # fmt: skip
def test_a_time_limit_that_sbatch_refuses_or_misreads_is_refused_with_the_forms(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [TINY, f"output={tmp_path}/a", "--nodes", "1", "--dry-run"]
    with pytest.raises(SystemExit) as ended:
        main(["submit", "slurm", *words, f"--time={text}"])
    assert ended.value.code == 2
    assert (
        f"--time {shlex.quote(text)}: sbatch takes minutes, minutes:seconds, "
        "hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds or "
        "UNLIMITED, with minutes and seconds below 60 behind another number; write 24:00:00 or "
        "1-0 for a day"
    ) in capsys.readouterr().err


def test_a_time_limit_beyond_the_seconds_that_slurm_counts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--time 35791395: is more than the 68 years that Slurm"):
        limit_seconds("35791395")


def test_a_time_limit_without_time_for_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--time 4:59: is 299 s for Slurm, .* takes 300 of"):
        script(tmp_path, time="4:59")
    assert options(script(tmp_path, time="4:59", grace=60.0))["time"] == "4:59"


def test_a_chain_has_a_name_that_no_other_run_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm lets a job of a chain wait for all jobs of its name."""
    names = []
    for run, words in (("a", ["--chain", "3"]), ("b", ["--chain", "3"]), ("a", [])):
        output = f"output={tmp_path}/{run}"
        assert main(["submit", "slurm", TINY, output, "--nodes", "1", "--dry-run", *words]) == 0
        names.append(options(capsys.readouterr().out)["job-name"])
    assert len(set(names)) == 3
    assert names[0].startswith("megatron-distill-")
    assert names[2] == "megatron-distill"
    words = [str(ROOT / "configs" / "cache.yaml"), "--command", "capture", "store.jobs=2"]
    for job in ("store.job=0", "store.job=1"):
        submit = ["submit", "slurm", *words, job, "--nodes", "1", "--chain", "2", "--dry-run"]
        assert main(submit) == 0
        names.append(options(capsys.readouterr().out)["job-name"])
    assert len(set(names)) == 5


def test_a_node_has_as_many_ranks_as_gpus_of_a_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "slurm", TINY, f"output={tmp_path}/a", "--nodes", "1", "--dry-run"]
    assert main([*words, "--gpus-per-node", "a100:2", "parallel.tensor=2"]) == 0
    assert options(capsys.readouterr().out)["gpus-per-node"] == "a100:2"
    assert main([*words, "--gpus-per-node", "a100:1", "parallel.tensor=2"]) == 1
    assert "parallel.tensor" in capsys.readouterr().err


def test_a_path_is_written_as_slurm_reads_it(tmp_path: Path) -> None:
    """Slurm reads quotes; it replaces %j, and after a backslash nothing at all."""
    found = options(script(tmp_path / "50% of a run #2"))
    assert found["output"] == f'"{tmp_path}/50%% of a run #2/launches/log-%j.txt"'
    for name in ("a\\b", "a\nb"):
        with pytest.raises(ConfigError, match="backslash or a line break; rename the folder"):
            script(tmp_path / name)


def test_a_word_of_several_lines_does_not_end_the_options_of_slurm(tmp_path: Path) -> None:
    launches = Launches(tmp_path / "launches", tmp_path, "")
    program = Program("generate", ("runs/a", "--prompt", "two\ntouch lines"))
    text = batch_script(Demand(name="a", nodes=1), program, launches, submission="s", grace=None)
    lines = text.splitlines()
    before = lines[: lines.index("set -euo pipefail")]
    assert all(line.startswith("#") or not line for line in before)
    assert shlex.split(text[text.index("exec ") :])[-4:] == ["generate", *program.words]


def test_further_options_join_those_of_the_script(tmp_path: Path) -> None:
    """sbatch takes the last of two options of one name."""
    launches = Launches(tmp_path / "launches", tmp_path, "")
    launches.folder.mkdir()
    launches.add_bad_nodes([BadNode("2026-01-01T00:00:00", "n7", "x")])
    further = ("--exclude=n[1-3]", "--dependency=afterok:12", "--comment=my run", "-C ib",
               "--nice=-5", "--exclusive")  # fmt: skip
    text = script(tmp_path, chain=2, options=further)
    found = options(text)
    assert found["exclude"] == "n7,n[1-3]"
    assert found["dependency"] == "singleton,afterok:12"
    assert found["comment"] == '"my run"'
    assert (found["nice"], found["exclusive"]) == ("-5", "")
    assert "#SBATCH -C ib\n" in text
    assert text.count("--exclude=") == text.count("--dependency=") == 1


def test_a_job_that_may_not_go_on_is_not_requeued_by_slurm_either(tmp_path: Path) -> None:
    text = script(tmp_path, rules=("--no-requeue",))
    assert "no-requeue" in options(text)
    assert "requeue" not in options(text)
    assert job_words(text).count("--no-requeue") == 1


def test_variables_are_set_before_the_job_and_srun_hands_them_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"NCCL_SOCKET_IFNAME": "eth1,eth2", "X": "it's $HOME\n#SBATCH --nodes=9", "N": "1"}
    given = [f"--variable={name}={text}" for name, text in {"N": "0", **values}.items()]
    words = [TINY, f"output={tmp_path}/a", "--nodes", "2", "--dry-run", *given]
    assert main(["submit", "slurm", *words]) == 0
    text = capsys.readouterr().out
    assert "export NCCL_SOCKET_IFNAME=eth1,eth2\n" in text
    before, _, _ = text.partition("exec ")
    done = subprocess.run(
        ["bash", "-c", f"{before}exec env -0"], capture_output=True, text=True, check=True
    )
    found = dict(one.partition("=")[::2] for one in done.stdout.split("\0"))
    assert {name: found[name] for name in values} == values
    assert before.index("export ") > before.index("set -euo")  # sbatch reads options no further
    assert "--export=ALL" in SlurmJob("7", "7", 0, ("n1",), None).on_nodes(["n1"])


def test_a_container_sees_the_work_folder_and_no_home() -> None:
    plain, mounted = Container("image.sqsh"), Container("image.sqsh", "/data:/data,/x:/y")
    assert plain.options("/work") == [
        "--container-image=image.sqsh",
        "--container-mounts=/work:/work",
        "--container-workdir=/work",
        "--no-container-mount-home",
    ]
    assert "--container-mounts=/work:/work,/data:/data,/x:/y" in mounted.options("/work")


def test_a_dry_run_shows_the_script_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "slurm", TINY, f"output={tmp_path}/a", "--nodes", "2", "--max-starts", "5"]
    assert main([*words, "--dry-run", "--container", "i.sqsh"]) == 0
    text = capsys.readouterr().out
    assert job_words(text)[-3:] == ["train", TINY, f"output={tmp_path}/a"]
    given = job_words(text)
    assert given[given.index("--max-starts") + 1] == "5"
    assert given[given.index("--container") + 1] == "i.sqsh"
    assert not (tmp_path / "a").exists()
    assert main([*words, "--dry-run", "train.stops=7"]) == 1
    assert "train.stops" in capsys.readouterr().err
    assert main([*words, "--command", "data"]) == 1
    assert (
        "data: not a command for a cluster; train, capture, rollout, evaluate, generate, convert"
        in (capsys.readouterr().err)
    )
    for wrong, message in WRONG.items():
        with pytest.raises(SystemExit):
            main([*words, *wrong.split("|")])
        assert message in " ".join(capsys.readouterr().err.split())

"""Submit a job to Slurm: write its batch script, check the settings, print the job's number."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

from megatron_distill.commands.command import PROGRAM, Command
from megatron_distill.commands.submitted_layout import (
    add_command,
    add_variables,
    check_submission,
    empty_health,
    own_name,
    too_many_ranks,
    variables_of,
    wrong_variable,
    wrong_words,
)
from megatron_distill.errors import ConfigError
from megatron_distill.launching.batch_script import (
    LONGEST_WARNING,
    Demand,
    asks_for_cores,
    batch_script,
    limit_seconds,
    option_objection,
)
from megatron_distill.launching.option_numbers import whole_number
from megatron_distill.launching.policy import Policy
from megatron_distill.launching.program import Program
from megatron_distill.launching.records import (
    Launches,
    Submission,
    disk_errors,
    write_record,
)
from megatron_distill.launching.slurm_job import add_arguments as add_rules
from megatron_distill.log import get_logger
from megatron_distill.runtime.atomic_files import replace_file

_LOGGER = get_logger(__name__)
_GPUS: Final = re.compile(r"([\w.-]+:)?[1-9]\d*")
_MOUNT: Final = re.compile(r"[^:]+:[^:]+(:[^:]+)?")  # with flags, as pyxis takes them
_OF_CONTAINER: Final = ("container", "container_mounts", "container_python")
_DESCRIPTION = """Submit a job to Slurm and print its number.

    megatron-distill submit slurm llama31_8b_to_1b.yaml output=runs/a --nodes 4 --gpus-per-node 8 \\
        --cpus-per-task 64
    megatron-distill submit slurm cache.yaml --command capture --nodes 2 --gpus-per-node 8 \\
        --sbatch=--exclusive
    megatron-distill submit slurm runs/a --command evaluate --nodes 1 --cpus-per-task 16 \\
        -- --tasks mmlu=data/mmlu
    megatron-distill submit slurm tiny.yaml --nodes 2 --ranks-per-node 4 --cpus-per-task 4 \\
        --partition cpu --dry-run

The job checks its nodes, saves before its time limit, and is requeued while its launches bring new
checkpoints. Its exit status is 0 (done), 75 (saved, and more to do), 78 (an error in the settings)
or 1 (a failure). The batch script and the logs are in `launches` in the run's folder. Options of
the command itself follow `--`."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    demand = parser.add_argument_group("demands, as sbatch takes them")
    demand.add_argument("--nodes", type=whole_number("4"), required=True, metavar="N")
    demand.add_argument("--time", metavar="LIMIT", help="e.g. 24:00:00; 24:00 is 24 minutes")
    for name in ("partition", "account", "qos"):
        demand.add_argument(f"--{name}", metavar=name.upper())
    demand.add_argument("--gpus-per-node", metavar="[TYPE:]N", help="e.g. 8 or a100:8")
    demand.add_argument(
        "--cpus-per-task",
        type=whole_number("8"),
        metavar="N",
        help="CPU cores of all ranks of a node; without it one, where jobs share nodes",
    )
    demand.add_argument(
        "--job-name", metavar="NAME",
        help="default: megatron-distill; with --chain a digest of its records' folder follows",
    )  # fmt: skip
    demand.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION",
        help="further option of sbatch, as --sbatch=--reservation=maintenance; may be repeated",
    )  # fmt: skip
    rules = parser.add_argument_group("rules of the job")
    rules.add_argument(
        "--spare-nodes",
        type=whole_number("1"),
        default=0,
        metavar="N",
        help="nodes to replace bad ones",
    )
    rules.add_argument(
        "--chain", type=whole_number("5"), default=1, metavar="N",
        help="jobs one after the other (singleton), where requeues are not allowed",
    )  # fmt: skip
    rules.add_argument(
        "--array",
        type=whole_number("5"),
        default=1,
        metavar="N",
        help="like --chain, as tasks of one array",
    )
    add_rules(parser)
    add_variables(parser)
    add_command(parser)
    parser.add_argument("--dry-run", action="store_true", help="show the batch script, stop")


def _objection(given: argparse.Namespace) -> str | None:
    for name in (
        "nodes",
        "chain",
        "array",
        "max_starts",
        "ranks_per_node",
        "cpus_per_task",
    ):
        count = getattr(given, name)
        if count is not None and count < 1:
            return f"--{name.replace('_', '-')} {count}: must be 1 or more"
    if given.gpus_per_node is not None and _GPUS.fullmatch(given.gpus_per_node) is None:
        return f"--gpus-per-node {given.gpus_per_node}: write a number from 1 on, as 8 or a100:8"
    for name in ("grace_seconds", "health_seconds"):
        seconds = getattr(given, name)
        if seconds is not None and not 0 < seconds < math.inf:
            option = f"--{name.replace('_', '-')} {seconds:g}"
            return f"{option}: must be a finite number of seconds above 0"
    if given.grace_seconds is not None and given.grace_seconds > LONGEST_WARNING:
        return (
            f"--grace-seconds {given.grace_seconds:g}: Slurm signals a job at most "
            f"{LONGEST_WARNING:,} seconds before its end; give at most as many"
        )
    for name in ("job_name", "partition", "account", "qos"):
        text = getattr(given, name)
        if text is not None and (not text or any(map(str.isspace, text))):
            return (
                f"--{name.replace('_', '-')} {text!r}: Slurm's script takes a name without spaces"
            )
    for option in given.sbatch:
        if (refused := option_objection(option)) is not None:
            return refused
    if given.spare_nodes < 0:
        return f"--spare-nodes {given.spare_nodes}: must be 0 or more"
    if given.chain > 1 and given.array > 1:
        return "--chain and --array: choose one"
    return (
        _time_objection(given)
        or wrong_variable(given)
        or empty_health(given)
        or _container_objection(given)
        or too_many_ranks(given.ranks_per_node, _gpus(given))
        or wrong_words(given)
    )


def _gpus(given: argparse.Namespace) -> int | None:
    """Return the number of GPUs of a node, without their type."""
    return None if given.gpus_per_node is None else int(given.gpus_per_node.rpartition(":")[2])


def _time_objection(given: argparse.Namespace) -> str | None:
    if given.time is not None:
        try:
            limit_seconds(given.time)
        except ConfigError as error:
            return str(error)
    return None


def _container_objection(given: argparse.Namespace) -> str | None:
    for name in ("container", "container_python"):
        if getattr(given, name) is not None and not getattr(given, name).strip():
            return f"--{name.replace('_', '-')} '': is empty; give one, or leave it out"
    mounts = given.container_mounts
    if mounts is not None and not all(map(_MOUNT.fullmatch, mounts.split(","))):
        return (
            f"--container-mounts {mounts!r}: write FROM:TO for each mount, with commas between "
            "them, as /data:/data"
        )
    return None


def _warn(given: argparse.Namespace) -> None:
    """Warn of options without effect, and of a default of Slurm that starves the ranks."""
    if given.container is None:
        for name in _OF_CONTAINER[1:]:
            if getattr(given, name) is not None:
                option = f"--{name.replace('_', '-')} {getattr(given, name)}"
                _LOGGER.warning("%s: has no effect without --container; give the image", option)
    is_one_launch = given.no_requeue and given.chain == given.array == 1
    if is_one_launch and given.max_starts != Policy.max_starts:
        _LOGGER.warning(
            "--max-starts %d: has no effect with --no-requeue, which launches once; leave it out, "
            "or give --chain, as --chain %d",
            given.max_starts, given.max_starts,
        )  # fmt: skip
    if given.cpus_per_task is None and not asks_for_cores(given.sbatch):
        _LOGGER.warning(
            "--cpus-per-task: is not given; on clusters that share nodes, all ranks of a node then "
            "get one core. Give the cores of a node, as --cpus-per-task 64, or --sbatch=--exclusive"
        )


def _run(given: argparse.Namespace) -> int:
    _warn(given)
    program = Program(given.command, tuple(given.words), given.folder)
    launches = program.launches([sys.executable])
    ranks = given.ranks_per_node or _gpus(given)
    run, device = [sys.executable], given.device
    check_submission(program, nodes=given.nodes, ranks=ranks, run=run, device=device)
    submission = time.strftime("%Y%m%d-%H%M%S")
    script = batch_script(
        _demand(given, launches),
        program,
        launches,
        submission=submission,
        grace=given.grace_seconds,
    )
    if given.dry_run:
        sys.stdout.write(script)
        return 0
    _submit(script, launches, count=given.chain)
    return 0


def _demand(given: argparse.Namespace, launches: Launches) -> Demand:
    return Demand(
        name=given.job_name or _job_name(launches, is_chain=given.chain > 1),
        nodes=given.nodes,
        spare=given.spare_nodes,
        time=given.time,
        partition=given.partition,
        account=given.account,
        qos=given.qos,
        gpus_per_node=given.gpus_per_node,
        cpus_per_task=given.cpus_per_task,
        options=given.sbatch,
        chain=given.chain,
        array=given.array,
        rules=_rules(given),
        variables=variables_of(given),
    )


def _job_name(launches: Launches, *, is_chain: bool) -> str:
    """Return the name of a job without one; Slurm's singleton waits for all jobs of one name."""
    return own_name(launches.folder.resolve()) if is_chain else PROGRAM


def _rules(given: argparse.Namespace) -> Sequence[str]:
    """Return the options of the job's rules that were given."""
    words = ["--no-requeue"] if given.no_requeue else []
    for name in (
        "ranks_per_node",
        "max_starts",
        "health_command",
        "health_seconds",
        "all_reduce_check",
        "grace_seconds",
        "folder",
        *(() if given.container is None else _OF_CONTAINER),
    ):
        value = getattr(given, name)
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def _submit(script: str, launches: Launches, *, count: int) -> None:
    """Write the batch script, submit it so often, and print the jobs' numbers.

    Only an accepted job is recorded: `status` takes the record for a job in the queue. Raises
    ConfigError.
    """
    with disk_errors(launches):
        launches.folder.mkdir(parents=True, exist_ok=True)
        replace_file(launches.script_file, script.encode())
        # By the clock of the disk, as the times of the logs that `status` compares with it.
        begun = launches.script_file.stat().st_mtime
    jobs: list[str] = []
    for _ in range(count):
        done = _sbatch(launches)
        number = done.stdout.strip().partition(";")[0]
        if not number:
            sys.stderr.write(
                f"{done.stderr}nothing was submitted: sbatch gave no job number; script: "
                f"{launches.script_file}\n"
            )
            return
        jobs.append(number)
        sys.stdout.write(f"{number}\n")
        with disk_errors(launches):
            write_record(launches.submission_file, Submission(jobs, begun))
    sys.stderr.write(f"script, records and logs: {launches.folder}\n")


def _sbatch(launches: Launches) -> subprocess.CompletedProcess[str]:
    """Submit the batch script once; raises ConfigError where Slurm has not taken it."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(launches.script_file)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise ConfigError(
            "sbatch: no such program here; submit on a machine of the cluster, or see the script "
            "with --dry-run"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"sbatch: cannot be started ({error.strerror}); submit on a machine of the cluster"
        ) from error
    if done.returncode != 0:
        sys.stderr.write(f"{done.stderr.rstrip()}\n".lstrip())
        by_hand = shlex.join(["sbatch", str(launches.script_file)])
        raise ConfigError(
            f"sbatch failed with status {done.returncode}, and took no job. The script is kept: "
            f"repair what sbatch says, and submit again, or by hand: {by_hand}"
        )
    return done


COMMAND = Command(
    description=_DESCRIPTION,
    add_arguments=_add_arguments,
    run=_run,
    check=_objection,
    passes_on=True,
)

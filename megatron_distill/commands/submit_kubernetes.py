"""Write the manifest of a job on Kubernetes."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml

from megatron_distill.commands.command import Command
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
from megatron_distill.launching.grace import USUAL_SECONDS, grace_seconds
from megatron_distill.launching.kubernetes import PodDemand, job_set
from megatron_distill.launching.option_numbers import number, whole_number
from megatron_distill.launching.policy import add_health_check
from megatron_distill.launching.program import Program
from megatron_distill.launching.records import Launches, bad_nodes

# Of Kubernetes: numbers of cores or bytes.
_QUANTITY: Final = re.compile(r"\d+(\.\d+)?(m|k|[MGTPE]|[KMGTPE]i)?")
_DESCRIPTION = """Write the manifest of a JobSet of Kubernetes, for `kubectl apply`.

    megatron-distill submit kubernetes llama31_8b_to_1b.yaml output=/data/runs/a --nodes 4 \\
        --gpus-per-node 8 --image registry/distill:1 --claim data:/data --dry-run

The cluster needs the controller of JobSet. The settings are read here, and paths are the same in
the pods; the run's folder must be on a claim. All pods restart together while launches bring new
checkpoints."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="write the manifest; required")
    parser.add_argument(
        "--name", help="name of the JobSet (default: megatron-distill and a digest of the folder "
        "of its records, so that another run has another name)",
    )  # fmt: skip
    parser.add_argument("--namespace", metavar="NAME")
    parser.add_argument(
        "--nodes", type=whole_number("4"), required=True, metavar="N", help="number of pods"
    )
    parser.add_argument("--gpus-per-node", type=whole_number("8"), metavar="N")
    parser.add_argument("--cpus-per-node", metavar="QUANTITY", help="e.g. 64")
    parser.add_argument("--memory-per-node", metavar="QUANTITY", help="e.g. 512Gi")
    parser.add_argument("--image", required=True)
    parser.add_argument(
        "--image-python", default="python3", metavar="PYTHON",
        help="Python in the image (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--claim", action="append", default=[], metavar="NAME:FOLDER",
        help="a persistent volume claim that all pods mount; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--work-folder",
        metavar="FOLDER",
        help="folder of the program in the pods (default: this one)",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=whole_number("8"),
        metavar="N",
        help="default: --gpus-per-node, else 1",
    )
    add_health_check(parser, "node")
    parser.add_argument(
        "--max-starts", type=whole_number("3"), default=3, metavar="N",
        help="launches without a new checkpoint before the job gives up (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--grace-seconds", type=number("600"), metavar="S",
        help="time for a save before a pod is killed (default: from measured steps and saves)",
    )  # fmt: skip
    add_variables(parser)
    add_command(parser)


def _objection(given: argparse.Namespace) -> str | None:
    wrong = [claim for claim in given.claim if not all(claim.partition(":"))]
    if wrong:
        return f"--claim {wrong[0]}: write NAME:FOLDER"
    for name in ("nodes", "max_starts", "ranks_per_node", "gpus_per_node"):
        count = getattr(given, name)
        if count is not None and count < 1:
            return f"--{name.replace('_', '-')} {count}: must be 1 or more"
    for name in ("grace_seconds", "health_seconds"):
        seconds = getattr(given, name)
        if seconds is not None and not 0 < seconds < math.inf:
            option = f"--{name.replace('_', '-')} {seconds:g}"
            return f"{option}: must be a finite number of seconds above 0"
    for name in ("cpus_per_node", "memory_per_node"):
        amount = getattr(given, name)
        if amount is not None and _QUANTITY.fullmatch(amount) is None:
            example = "64" if name == "cpus_per_node" else "512Gi"
            return f"--{name.replace('_', '-')} {amount}: not a quantity; write it as {example}"
    folders = {f"--claim {claim}": claim.partition(":")[2] for claim in given.claim}
    if given.work_folder is not None:
        folders[f"--work-folder {given.work_folder}"] = given.work_folder
    for option, folder in folders.items():
        if not folder.startswith("/"):
            return f"{option}: a folder in the pods has a path from the root, as /data"
    if further := next((claim for claim in given.claim if claim.count(":") > 1), None):
        return f"--claim {further}: write NAME:FOLDER, without a further colon"
    if not given.dry_run:
        return "give --dry-run, and apply the manifest: ... --dry-run | kubectl apply -f -"
    return (
        wrong_variable(given)
        or empty_health(given)
        or too_many_ranks(given.ranks_per_node, given.gpus_per_node)
        or wrong_words(given)
    )


def _run(given: argparse.Namespace) -> int:
    program = Program(given.command, tuple(given.words), given.folder)
    launches = program.launches([sys.executable], sees_results=False)
    ranks = given.ranks_per_node or given.gpus_per_node or 1
    rules = ["--max-starts", str(given.max_starts), "--ranks-per-node", str(ranks)]
    rules += [] if given.gpus_per_node is None else ["--gpus", str(given.gpus_per_node)]
    rules += ["--health-seconds", f"{given.health_seconds:g}"]
    rules += [] if given.health_command is None else ["--health-command", given.health_command]
    rules += [] if given.folder is None else ["--folder", given.folder]
    # Models and data are on the claims of the pods.
    check_submission(program, nodes=given.nodes, ranks=ranks, run=None, device=given.device)
    work_folder = given.work_folder or str(Path.cwd())
    claims = [tuple(claim.split(":", 1)) for claim in given.claim]
    records = Path(os.path.normpath(Path(work_folder) / launches.folder))
    _check_claims(launches, records, [folder for _, folder in claims])
    demand = PodDemand(
        name=own_name(records) if given.name is None else given.name,
        namespace=given.namespace,
        nodes=given.nodes,
        image=given.image,
        claims=claims,
        folder=work_folder,
        gpus_per_node=given.gpus_per_node,
        cpus_per_node=given.cpus_per_node,
        memory_per_node=given.memory_per_node,
        python=given.image_python,
        stop_seconds=given.grace_seconds or grace_seconds(launches.measured) or USUAL_SECONDS,
        bad_nodes=sorted({one.node for one in bad_nodes(launches.folder)}),
        rules=rules,
        variables=variables_of(given),
    )
    sys.stdout.write(yaml.safe_dump(job_set(demand, program), sort_keys=False, width=1000))
    return 0


def _check_claims(launches: Launches, place: Path, claims: Sequence[str]) -> None:
    """Raise ConfigError unless a claim holds the records, beside which the results are.

    place: of the records in the pods.
    """
    if not any(place.is_relative_to(os.path.normpath(claim)) for claim in claims):
        raise ConfigError(
            f"{launches.named}: in the pods {place} is on no --claim, and would be lost with them. "
            "Give --claim NAME:FOLDER above it, or use a folder on a claim"
        )


COMMAND = Command(
    description=_DESCRIPTION,
    add_arguments=_add_arguments,
    run=_run,
    check=_objection,
    passes_on=True,
)

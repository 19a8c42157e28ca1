"""The manifest of a JobSet (jobset.x-k8s.io): one pod per node, all restarted together.

A pod's exit status decides. 78 ends the JobSet, 75 and any other restart all pods, and 0 of all
pods ends the job.
"""

from __future__ import annotations

import math
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from megatron_distill.errors import ConfigError
from megatron_distill.launching.program import Program
from megatron_distill.launching.records import EXIT_STATUS, Status

__all__ = ["NODE_VARIABLE", "PodDemand", "job_set"]

_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_LABEL: Final = 63
# Of RFC 1123, for namespaces; claims have several with dots between them.
_PART: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME: Final = 253
_SHARED_MEMORY: Final = "/dev/shm"
_GROUP: Final = "nodes"  # of the pods in the JobSet
_CONTAINER: Final = "ranks"
_ATTEMPT: Final = "ATTEMPT"  # the variable of the number of restarts
NODE_VARIABLE: Final = "KUBERNETES_NODE"  # the variable of the name of the pod's node
_ATTEMPT_LABEL: Final = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
# Restarts by the JobSet; the pods themselves end the job once launches bring no new checkpoint.
_RESTARTS: Final = 1000
_END_SECONDS: Final = 30


@dataclass(frozen=True)
class PodDemand:
    """The demands of a job on Kubernetes.

    Attributes:
        name: of the JobSet. namespace: None: the present one.
        claims: names of persistent volume claims, and the folders that they are mounted on.
        python: the interpreter in the image. folder: that the job works in.
        stop_seconds: for the ranks to save when the pod is told to end.
        bad_nodes: on which no pod is to run.
        rules: options of `launching.pod`.
        variables: of the environment of the ranks.
    """

    name: str
    nodes: int
    image: str
    claims: Sequence[tuple[str, str]]
    folder: str
    namespace: str | None = None
    gpus_per_node: int | None = None
    cpus_per_node: str | None = None
    memory_per_node: str | None = None
    python: str = "python3"
    stop_seconds: float = 300.0
    bad_nodes: Sequence[str] = ()
    rules: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def pods(self) -> list[str]:
        """The names of the pods, by which they reach each other."""
        return [f"{self.name}-{_GROUP}-0-{index}.{self.name}" for index in range(self.nodes)]


def job_set(demand: PodDemand, program: Program) -> dict[str, Any]:
    """Return the manifest; raises ConfigError for a value that Kubernetes refuses."""
    # Kubernetes adds five characters to a pod's name, and JobSet counts them.
    longest = f"{max((pod.partition('.')[0] for pod in demand.pods), key=len)}-abcde"
    if _LABEL.fullmatch(demand.name) is None or len(longest) > _LONGEST_LABEL:
        raise ConfigError(
            f"--name {demand.name}: write small letters, digits and hyphens, a letter first, so "
            f"that the pods' names, as {longest}, have at most {_LONGEST_LABEL} characters"
        )
    _check_names(demand)
    _check_claims(demand.claims)
    metadata = {"name": demand.name}
    if demand.namespace is not None:
        metadata["namespace"] = demand.namespace
    job = {
        "parallelism": demand.nodes,
        "completions": demand.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": _CONTAINER,
                        "operator": "In",
                        "values": [EXIT_STATUS[Status.MISCONFIGURED]],
                    },
                }
            ]
        },
        "template": {"spec": _pod(demand, program)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": demand.name},
            "failurePolicy": {
                "maxRestarts": _RESTARTS,
                "rules": [
                    {
                        "name": "errors_in_settings",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    },
                ],
            },
            "replicatedJobs": [{"name": _GROUP, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _check_names(demand: PodDemand) -> None:
    """Raise ConfigError for a namespace, image, interpreter or variable that is refused."""
    space = demand.namespace
    if space is not None and (_PART.fullmatch(space) is None or len(space) > _LONGEST_LABEL):
        raise ConfigError(
            f"--namespace {shlex.quote(space)}: write small letters, digits and hyphens, the first "
            f"and the last no hyphen, at most {_LONGEST_LABEL} characters"
        )
    for own, reason in ((_ATTEMPT, "to count restarts"), (NODE_VARIABLE, "to name the pod's node")):
        if own in demand.variables:
            raise ConfigError(
                f"--variable {own}={demand.variables[own]}: the manifest sets {own}, {reason}; "
                "give the variable another name"
            )
    for option, text in (("--image", demand.image), ("--image-python", demand.python)):
        if not text or any(map(str.isspace, text)):
            raise ConfigError(f"{option} {shlex.quote(text)}: give a name without spaces")


def _check_claims(claims: Sequence[tuple[str, str]]) -> None:
    """Raise ConfigError for a claim's name, or a folder to mount it on, that is refused."""
    mounted: dict[str, str] = {}
    for claim, folder in claims:
        option = f"--claim {claim}:{folder}"
        if len(claim) > _LONGEST_NAME or not all(map(_PART.fullmatch, claim.split("."))):
            raise ConfigError(
                f"{option}: a claim's name has small letters, digits, hyphens and dots, each part "
                f"with a letter or digit at both ends, at most {_LONGEST_NAME} characters"
            )
        if not folder.startswith("/") or ":" in folder:
            raise ConfigError(f"{option}: give a path from the root without a colon, as /data")
        place = posixpath.normpath(f"/{folder.lstrip('/')}")
        if place == "/":
            raise ConfigError(f"{option}: the image's own files are there; give a folder, as /data")
        if place == _SHARED_MEMORY:
            raise ConfigError(f"{option}: the pods' shared memory is there; give another folder")
        if place in mounted:
            raise ConfigError(f"{option}: {mounted[place]} is mounted there; give another folder")
        mounted[place] = option


def _pod(demand: PodDemand, program: Program) -> dict[str, Any]:
    resources = {
        "nvidia.com/gpu": demand.gpus_per_node,
        "cpu": demand.cpus_per_node,
        "memory": demand.memory_per_node,
    }
    limits = {name: str(amount) for name, amount in resources.items() if amount is not None}
    volumes = [
        {"name": f"claim-{place}", "persistentVolumeClaim": {"claimName": claim}}
        for place, (claim, _) in enumerate(demand.claims)
    ]
    # NCCL and data workers share memory there; the default of a container is 64 MB.
    volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
    mounts = [
        {"name": f"claim-{place}", "mountPath": folder}
        for place, (_, folder) in enumerate(demand.claims)
    ]
    mounts.append({"name": "shared-memory", "mountPath": _SHARED_MEMORY})
    return {
        "restartPolicy": "Never",
        **_affinity(demand.bad_nodes),
        "terminationGracePeriodSeconds": math.ceil(demand.stop_seconds) + _END_SECONDS,
        "containers": [
            {
                "name": _CONTAINER,
                "image": demand.image,
                "workingDir": demand.folder,
                "command": _command(demand, program),
                "env": _environment(demand),
                "resources": {"limits": limits, "requests": dict(limits)},
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _affinity(bad_nodes: Sequence[str]) -> dict[str, Any]:
    """Return the rule that keeps pods from these nodes: one name in each part, which all hold."""
    if not bad_nodes:
        return {}
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in bad_nodes]
    required = {"nodeSelectorTerms": [{"matchFields": fields}]}
    rule = {"requiredDuringSchedulingIgnoredDuringExecution": required}
    return {"affinity": {"nodeAffinity": rule}}


def _command(demand: PodDemand, program: Program) -> list[str]:
    return [
        *(demand.python, "-m", "megatron_distill.launching.pod"),
        *("--job", demand.name, "--attempt", f"$({_ATTEMPT})"),
        *("--pods", ",".join(demand.pods)),
        *("--stop-seconds", str(demand.stop_seconds)),
        *map(_literal, (*demand.rules, "--", *program.spelled)),
    ]


def _environment(demand: PodDemand) -> list[dict[str, Any]]:
    fields = {_ATTEMPT: _ATTEMPT_LABEL, NODE_VARIABLE: "spec.nodeName"}
    own = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    given = [{"name": name, "value": _literal(text)} for name, text in demand.variables.items()]
    return [*own, *given]


def _literal(text: str) -> str:
    """Return the text that Kubernetes, which reads $(NAME) and takes $$ for $, turns into this."""
    return text.replace("$", "$$")

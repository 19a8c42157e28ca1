"""Comparison of the ranks of a launch before they start: code and configuration."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

from megatron_distill.runtime.sources import sources_digest

if TYPE_CHECKING:
    from megatron_distill.config.schema import JobConfig
    from megatron_distill.runtime.launch import Launch

__all__ = ["require_same_start"]


def require_same_start(launch: Launch, config: JobConfig) -> None:
    """Raise ConfigError unless this rank has the code and the configuration of rank 0.

    Student and teacher recompute the same units from both, so that a difference would go unnoticed
    until an answer is for other tokens. Call it inside `Launch.together`.
    """
    from megatron_distill.config import to_yaml

    own = {"sources": sources_digest(), "configuration": to_yaml(config)}
    name = launch.roles.name(launch.rank)

    def difference(first: str) -> str:
        of_first = json.loads(first)
        where = f"{name} on {socket.gethostname()}"
        if of_first["sources"] != own["sources"]:
            return (
                f"{where} runs another version of megatron-distill than {launch.roles.name(0)}; "
                "install the same one on all machines"
            )
        lines = own["configuration"].splitlines()
        first_lines = of_first["configuration"].splitlines()
        differing = sorted({*lines} ^ {*first_lines})
        return (
            f"{where} has another configuration than {launch.roles.name(0)}: "
            f"{'; '.join(line.strip() for line in differing)}; start all ranks with the same file "
            "and the same changes"
        )

    launch.require_equal("identity/value", json.dumps(own), difference=difference)

"""The port of a rendezvous: some are tried on each node, before the first one is known."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

__all__ = ["PORTS", "TRIED_PORTS", "free_port"]

PORTS: Final = range(10_000, 30_000)  # below the ephemeral range of Linux, 32,768 and up
TRIED_PORTS: Final = 20  # of one launch


def free_port(ports: Sequence[int]) -> int | None:
    """Return the first of these ports that no other program of this machine uses."""
    for port in ports:
        with socket.socket() as probe, suppress(OSError):
            # As the store binds it: closed connections of a launch before do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return port
    return None

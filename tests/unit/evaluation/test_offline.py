"""Where tests of evaluation run there is no network; this machine's own sockets work."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from tests.distributed.pool import Pool
from tests.e2e.offline import NetworkRefusedError, refusing_network
from tests.e2e.processes import run_from_imports

OTHER = ("192.0.2.1", 80)  # an address of documentation, RFC 5737


def refusals() -> list[bool]:
    """Whether each way to another machine is refused."""
    found = []
    for ask in (
        lambda: socket.create_connection(OTHER, timeout=0.1),
        lambda: socket.socket().connect_ex(OTHER),
        lambda: socket.getaddrinfo("huggingface.co", 443),
    ):
        try:
            ask()
        except NetworkRefusedError:
            found.append(True)
        except OSError:
            found.append(False)
    return found


def test_other_machines_are_refused_and_this_one_is_not() -> None:
    with refusing_network() as asked:
        assert refusals() == [True] * 3
    assert asked == [OTHER, OTHER, "huggingface.co"]
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with socket.create_connection(("localhost", server.getsockname()[1]), timeout=5):
            pass


def connect_of(rank: int, world: int) -> str:
    """Where the worker's method is from."""
    return socket.socket.connect.__module__


def test_workers_and_launches_are_refused_too(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(1, connect_of) == ["tests.e2e.offline"]
    script = tmp_path / "ask.py"
    script.write_text("from tests.unit.evaluation.test_offline import refusals\nprint(refusals())")
    done = run_from_imports(sys.executable, str(script), seconds=60)
    assert done.stdout == "[True, True, True]\n"

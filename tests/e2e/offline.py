"""Connections of Python's sockets beyond this machine, refused: tests need none."""

from __future__ import annotations

import _socket
import ipaddress
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from tests.distributed.pool import Pool
from tests.e2e import forked_launches

_RESOLVE, _RUN, _LAUNCH = socket.getaddrinfo, Pool.run, forked_launches._launch


class NetworkRefusedError(OSError):
    """A connection to another machine, or a question for its address."""


def _is_here(host: Any) -> bool:
    """Whether a host's name or address is this machine's."""
    if isinstance(host, bytes):
        host = host.decode()
    if not host or host in ("localhost", socket.gethostname()):
        return True
    try:
        if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            return True
    except ValueError:
        return False  # a name
    addresses = (one for several in psutil.net_if_addrs().values() for one in several)
    return host in {one.address for one in addresses}


@contextmanager
def refusing_network() -> Iterator[list[Any]]:
    """Refuse what leaves this machine, in this process; yields what was refused."""
    asked: list[Any] = []

    def check(host: Any, whole: Any) -> None:
        if not _is_here(host):
            asked.append(whole)
            raise NetworkRefusedError(f"there is no network: {whole}")

    def connect(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            check(address[0], address)
        _socket.socket.connect(self, address)

    def connect_ex(self: socket.socket, address: Any) -> int:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            check(address[0], address)
        return _socket.socket.connect_ex(self, address)

    def resolve(host: Any, *others: Any, **named: Any) -> Any:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            check(host, host)
        return _RESOLVE(host, *others, **named)

    with (
        patch.object(socket.socket, "connect", connect),
        patch.object(socket.socket, "connect_ex", connect_ex),
        patch.object(socket, "getaddrinfo", resolve),
    ):
        yield asked


def _call_offline(rank: int, world: int, function: Callable[..., Any], *args: Any) -> Any:
    with refusing_network() as asked:
        found = function(rank, world, *args)
    assert not asked, asked
    return found


def _run_offline(
    pool: Pool, world: int, function: Callable[..., Any], *args: Any, **named: Any
) -> list[Any]:
    return _RUN(pool, world, _call_offline, function, *args, **named)


def _launch_offline(*args: Any) -> None:
    with refusing_network():
        _LAUNCH(*args)


@pytest.fixture(scope="module", autouse=True)
def without_network() -> Iterator[None]:
    """Refuse the network in this process, the pool's workers and forked launches.

    The first two fail where something asks for another machine and does not mind the refusal.
    Python processes that are started otherwise, and sockets of C++, are as they are.
    """
    with (
        refusing_network() as asked,
        patch.object(Pool, "run", _run_offline),
        patch.object(forked_launches, "_launch", _launch_offline),
    ):
        yield
    assert not asked, asked

"""Copies to the host that another thread waits for. Without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import cast

import pytest
import torch

from megatron_distill.runtime.host_copy import HostCopy

OWN = torch.device("cuda", 3)


class Devices(threading.local):
    """The current device of each thread, as CUDA has it: GPU 0 in a new one."""

    current = 0


def test_another_thread_waits_on_the_device_of_the_originals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices, waited = Devices(), list[int]()

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        before, devices.current = devices.current, chosen.index
        yield
        devices.current = before

    class Event:
        def synchronize(self) -> None:
            waited.append(devices.current)

    monkeypatch.setattr(torch.cuda, "device", device)
    host = torch.arange(3)
    copies = HostCopy((host,), OWN, cast(torch.cuda.Event, Event()))
    with ThreadPoolExecutor(1) as other:
        (found,) = other.submit(copies.read).result()
        assert other.submit(lambda: devices.current).result() == 0
    assert found is host
    assert waited == [3]


def test_a_copy_of_host_memory_waits_for_nothing() -> None:
    one, other = torch.arange(3), torch.zeros(())
    found = HostCopy.begin(one, other).read()
    assert found[0] is one
    assert found[1] is other

"""Measurements of a start of many ranks: the rendezvous store, process groups, random weights."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import quantiles
from threading import Thread
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

_ADDRESS = "127.0.0.1"
_SECONDS = 5.0
_DRAWN_SECONDS = 5.0
_HIDDEN, _ROWS = 4096, 256


def store_requests(*, clients: int, processes: int) -> dict[str, float]:
    """Ask one store as the watch of peers does, from as many connections as fast as they can.

    Returns requests per second, and milliseconds of a request: median and 99th percentile.
    """
    ask = _of_processes(_ask, clients, processes)
    seconds = [second for found in ask for second in found]
    hundredths = quantiles(seconds, n=100)
    return {
        "clients": clients,
        "processes": processes,
        "requests per second": len(seconds) / _SECONDS,
        "median ms": 1e3 * hundredths[49],
        "99th percentile ms": 1e3 * hundredths[98],
    }


def _of_processes(work: Callable[..., None], clients: int, processes: int) -> list[list[float]]:
    context = multiprocessing.get_context("spawn")
    server = dist.TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)
    answers = context.SimpleQueue()
    share = clients // processes
    children = [
        context.Process(target=work, args=(server.port, share, processes, answers))
        for _ in range(processes)
    ]
    for child in children:
        child.start()
    found = [answers.get() for _ in children]
    for child in children:
        child.join()
    return found


def _ask(port: int, clients: int, processes: int, answers: Any) -> None:
    stores = [
        dist.TCPStore(_ADDRESS, port, is_master=False, timeout=timedelta(seconds=60))
        for _ in range(clients)
    ]
    stores[0].add("ready", 1)
    while stores[0].add("ready", 0) < processes:
        time.sleep(0.01)
    seconds: list[list[float]] = [[] for _ in stores]
    end = time.perf_counter() + _SECONDS

    def ask(store: dist.TCPStore, own: list[float]) -> None:
        began = time.perf_counter()
        while began < end:
            store.check(["failed"])
            now = time.perf_counter()
            own.append(now - began)
            began = now

    threads = [Thread(target=ask, args=given) for given in zip(stores, seconds, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers.put([second for own in seconds for second in own])


def created_groups(*, ranks: int, tensor: int, pipeline: int) -> dict[str, int]:
    """Create the groups of a layout in one process that takes itself for the first of the ranks.

    Returns how many groups there are, and how many of them this rank is in.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_distill.runtime.mcore_patches import prepare_megatron_core

    prepare_megatron_core(on_cuda=False)
    from megatron_distill.runtime.groups import create_groups
    from megatron_distill.runtime.layout import Layout

    new_group, sizes = dist.new_group, []

    def counted(ranks: Any = None, *given: Any, **named: Any) -> Any:
        members = range(dist.get_world_size()) if ranks is None else ranks
        sizes.append(0 in members)
        return new_group(ranks, *given, **named)

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with patch.object(dist, "new_group", counted):
            create_groups(Layout(tensor=tensor, pipeline=pipeline), timeout_minutes=1.0)
    finally:
        dist.destroy_process_group()
    return {
        "ranks": ranks, "tensor": tensor, "pipeline": pipeline,
        "groups": len(sizes), "of a rank": sum(sizes),
    }  # fmt: skip


def drawn_weights() -> float:
    """Return how many random weights one core draws per second of its own time."""
    from megatron_distill.runtime.mcore_patches import prepare_megatron_core

    prepare_megatron_core(on_cuda=False)
    from megatron_distill.models.weights import random_rows

    torch.set_num_threads(1)
    drawn, began = 0, time.thread_time()
    while (passed := time.thread_time() - began) < _DRAWN_SECONDS:
        top = drawn // _HIDDEN
        drawn += random_rows("a matrix", (top, top + _ROWS), (0, _HIDDEN)).numel()
    return drawn / passed

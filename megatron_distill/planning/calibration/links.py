"""The link between two processes of this machine, measured by sums, gathers and scatters."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_distill.errors import TrainingError
from megatron_distill.launching.forked_ranks import ForkedRanks
from megatron_distill.planning.links import Link, NearMessages

__all__ = ["measure_links"]

_RANKS: Final = 2
# Bytes, and how often each is sent.
_MESSAGES: Final = {2**12: 12, 2**24: 6}
# On a CPU one of four small sums waits several times as long as the others, for a core: their mean
# needs many. Other work on the machine delays the slowest.
_SMALL_SUMS: Final = 192
_SMALL_SECONDS: Final = 0.8  # of work before them: on a slow machine they are fewer
_LEAST_SUMS: Final = 64
_COUNTED, _TYPICAL = 0.99, 0.75  # shares of a CPU's messages, from the fastest on, of a mean
_WORK: Final = (512, 512, 1408)  # a product before each message on a CPU, about half a layer's
_LITTLE_WORK: Final = (8, 512, 1408)  # of that before messages that follow each other closely
_PRODUCTS: Final = 8
_HANG_SECONDS: Final = 300.0  # of all messages; only a hang takes that long
# A run has as many groups of gloo, whose threads wake a hundred times a second each. A rank that
# waits for a core has one sooner then: with one group messages take 1.2 to 1.6 times as long.
_FURTHER_GROUPS: Final = 18
_RESULT: Final = "seconds"


def measure_links(device: torch.device, forked: ForkedRanks | None) -> tuple[Link, Link]:
    """Measure messages between two processes; the network is taken to be the same.

    forked: ranks of a CPU; None: the processes start anew. Raises TrainingError: forked ones fail.
    """
    if device.type == "cuda" and torch.cuda.device_count() < _RANKS:
        link = Link(devices=1, gb_per_s=25.0, efficiency=0.8, latency_us=20.0)
        return link, link
    with tempfile.TemporaryDirectory() as folder:
        if forked is None:
            mp.spawn(_collectives_of_rank, args=(device.type, folder), nprocs=_RANKS)
        else:
            _run_forked(forked, device.type, folder)
        found = (Path(folder) / _RESULT).read_text()
    latency, *near = map(float, found.split()[:5])
    small, *small_halves, large, gather, scatter = map(float, found.split()[5:])
    # A sum sends and receives twice the half of it.
    by_bytes = max(large - small, 1e-9)
    halves = [
        max(2 * (half - least) / by_bytes, 0.1)
        for half, least in zip((gather, scatter), small_halves, strict=True)
    ]
    most = torch.cuda.device_count() if device.type == "cuda" else 64
    link = Link(
        devices=most,
        gb_per_s=max(_MESSAGES) / by_bytes / 1e9,
        efficiency=1.0,
        latency_us=latency * 1e6,
        near=_near(*near) if near[0] else None,
        gather=halves[0],
        scatter=halves[1],
    )
    return link, link


def _near(latency: float, after: float, far: float, gather_wait: float) -> NearMessages:
    return NearMessages(
        latency_us=latency * 1e6, after_us=after * 1e6, far_us=far * 1e6, gather_wait=gather_wait
    )


def _run_forked(forked: ForkedRanks, kind: str, folder: str) -> None:
    output = Path(folder) / "output.txt"
    status = forked.run(
        _collectives_of_forked,
        kind,
        folder,
        ranks=_RANKS,
        threads=1,
        output=output,
        seconds=_HANG_SECONDS,
    )
    if status:
        raise TrainingError(
            f"calibrate: its messages between two processes ended with status {status}; correct "
            f"the cause that their output names, and calibrate again:\n{output.read_text()}"
        )


def _collectives_of_forked(kind: str, folder: str) -> None:
    _collectives_of_rank(int(os.environ["RANK"]), kind, folder)


def _collectives_of_rank(rank: int, kind: str, folder: str) -> None:
    """Time sums, gathers and scatters of two sizes, and small sums; the first rank writes them."""
    torch.set_num_threads(1)
    # torch has new names for collectives that older releases do not know.
    warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)  # else the barrier of every rank is on the first GPU
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=dist.FileStore(f"{folder}/store", _RANKS),
        rank=rank,
        world_size=_RANKS,
        device_id=device if kind == "cuda" else None,
    )
    if kind == "cpu":
        for _ in range(_FURTHER_GROUPS):
            dist.new_group()
    operands = _operands(_WORK) if kind == "cpu" else None
    small = partial(dist.all_reduce, torch.zeros(min(_MESSAGES) // 4, device=device))
    sums = _SMALL_SUMS if operands is None else _agreed_sums(_product_seconds(*operands))
    times = [_mean_of_fastest(_seconds_of(small, sums, operands), _COUNTED), 0.0, 0.0, 0.0, 0.0]
    if operands is not None:
        little = _operands(_LITTLE_WORK)
        near, gathered = _sums_and_gathers(small.args[0], little)
        works = _product_seconds(*little), _product_seconds(*operands)
        times[1:] = min(times[0], near), *works, min(1.0, gathered / near)
    for count, repeats in _MESSAGES.items():
        message = torch.zeros(count // 4, device=device)
        part = torch.zeros(count // 4 // _RANKS, device=device)
        for collective in (
            partial(dist.all_reduce, message),
            partial(dist.all_gather_into_tensor, message, part),
            partial(dist.reduce_scatter_tensor, part, message),
        ):
            own = _seconds_of(collective, repeats, operands)
            times.append(_mean_of_fastest(own, _TYPICAL))
    mean = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(mean)  # the rank that is first waits for the other
    times = (mean / _RANKS).tolist()
    if rank == 0:
        (Path(folder) / _RESULT).write_text(" ".join(map(str, times)))
    dist.destroy_process_group()


def _sums_and_gathers(
    message: torch.Tensor, operands: tuple[torch.Tensor, torch.Tensor]
) -> tuple[float, float]:
    """Return the seconds of small sums and of gathers in turns, each after a product.

    As with sequence parallelism, where a gather follows a sum's parts.
    """
    part = torch.zeros(len(message) // _RANKS)
    kinds = (
        partial(dist.all_reduce, message),
        partial(dist.all_gather_into_tensor, message, part),
    )
    found: tuple[list[float], list[float]] = ([], [])
    dist.barrier()
    for _ in range(_SMALL_SUMS):
        for collective, own in zip(kinds, found, strict=True):
            own.append(_after_product(collective, operands))
    sums, gathers = (_mean_of_fastest(own, _COUNTED) for own in found)
    return sums, gathers


def _after_product(
    collective: Callable[[], object], operands: tuple[torch.Tensor, torch.Tensor]
) -> float:
    torch.mm(*operands)
    sent = time.perf_counter()
    collective()
    return time.perf_counter() - sent


def _agreed_sums(work: float) -> int:
    """Return how many small sums follow work of so many seconds, the same on all ranks."""
    slowest = torch.tensor(work)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return min(_SMALL_SUMS, max(_LEAST_SUMS, int(_SMALL_SECONDS / slowest.item())))


def _operands(shape: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    m, k, n = shape
    return torch.randn(m, k), torch.randn(k, n)


def _product_seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    began = time.perf_counter()
    for _ in range(_PRODUCTS):
        torch.mm(left, right)
    return (time.perf_counter() - began) / _PRODUCTS


def _seconds_of(
    collective: Callable[[], object],
    repeats: int,
    operands: tuple[torch.Tensor, torch.Tensor] | None,
) -> list[float]:
    """Return the seconds of each message, on a GPU the mean of all.

    One after the other, as in a step: each begins when all ranks have ended the last. operands: of
    a product before each, on a CPU, as a step's layers work between two messages. Ranks arrive
    apart after that, and their threads sleep: messages take longer than in a row.
    """
    collective()
    dist.barrier()
    if operands is None:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            collective()
        torch.cuda.synchronize()
        return [(time.perf_counter() - began) / repeats]
    return [_after_product(collective, operands) for _ in range(repeats)]


def _mean_of_fastest(seconds: list[float], share: float) -> float:
    return fmean(sorted(seconds)[: max(1, int(share * len(seconds)))])

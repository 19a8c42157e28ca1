"""The rates of the machine at hand, measured in less than a minute.

Measured are products of four sizes, a fused attention, element-wise work as the planner counts it,
the losses' work per logit, and a sum over two processes.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Final, Literal

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

from megatron_distill.planning.device import CALIBRATED, Device, Link, Precision

__all__ = ["measure_machine"]

_DTYPES: Final[dict[Precision, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Square products, and matrices of element-wise work in bytes.
_CPU_SIDES: Final = (128, 256, 512, 1024)
_GPU_SIDES: Final = (1024, 2048, 4096, 8192)
_CPU_BYTES: Final = (2**18, 2**20, 2**23, 2**26)
_GPU_BYTES: Final = (2**20, 2**23, 2**26, 2**29)
_SECONDS: Final = 0.6  # of one measurement
_MESSAGES: Final = (2**12, 2**20, 2**24)


def measure_machine(kind: Literal["cpu", "gpu"]) -> Device:
    """Measure this machine's CPU, or its first GPU."""
    device = torch.device("cuda:0" if kind == "gpu" else "cpu")
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if kind == "cpu" else None
    try:
        if kind == "cpu":
            torch.set_num_threads(1)
        peaks, efficiency = _products(device)
        attention = _attention(device, peaks["fp32" if kind == "cpu" else "bf16"])
        rate, memory = _elements(device)
        kernel = _kernel(device)
        logit = _logit(device) if kind == "cpu" else 0.0
        gain = 1.0
        if cores is not None and cores > 1:
            gain = _gain(cores)
    finally:
        torch.set_num_threads(threads)
    node, network = _links(device)
    return Device(
        name=CALIBRATED[kind],
        title=_title(device),
        kind=kind,
        memory_gib=_memory(device) / 2**30,
        reserved_gib=0.4 if kind == "cpu" else 2.5,
        peak_tflops=peaks,
        product_efficiency=efficiency,
        attention_efficiency=attention,
        memory_gb_per_s=rate,
        memory_efficiency=memory,
        kernel_us=kernel * 1e6,
        logit_ns=logit * 1e9,
        cores=cores,
        thread_efficiency=gain,
        node=node,
        network=network,
        source="measured by megatron-distill calibrate",
        efficiency_source="measured too",
        date=date.today().isoformat(),
    )


def _title(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"rank of this {platform.machine()} CPU"


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(psutil.virtual_memory().total)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of one call, over as many as fit the time."""

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    first = [once() for _ in range(3)][-1]
    count = max(3, min(200, int(_SECONDS / max(first, 1e-6))))
    return median(once() for _ in range(count))


def _products(
    device: torch.device,
) -> tuple[dict[Precision, float], tuple[tuple[float, float], ...]]:
    """Return the highest rate of each precision in TFLOP/s, and the share by size of the main."""
    on_cuda = device.type == "cuda"
    main: Precision = "bf16" if on_cuda else "fp32"
    rates: dict[Precision, list[tuple[float, float]]] = {}
    for precision, dtype in _DTYPES.items():
        for side in _GPU_SIDES if on_cuda else _CPU_SIDES:
            left = torch.randn(side, side, device=device).to(dtype)
            seconds = _seconds(lambda left=left: left @ left, device)  # type: ignore[misc]
            rates.setdefault(precision, []).append((2 * side**3 / 1e9, 2 * side**3 / seconds))
    peaks = {precision: max(rate for _, rate in found) / 1e12 for precision, found in rates.items()}
    shares = [(size, rate / peaks[main] / 1e12) for size, rate in rates[main]]
    return peaks, tuple((round(size, 4), round(share, 4)) for size, share in shares)


def _attention(device: torch.device, peak: float) -> tuple[float, float]:
    """Return the share of the peak that fused attention reaches, forward and backward."""
    heads, length, width = (8, 512, 64) if device.type == "cpu" else (32, 4096, 128)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    shape = (1, heads, length, width)
    query, key, value = (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    flops = 4 * heads * width * length * (length + 1) / 2

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    ahead = _seconds(forward, device)
    both = _seconds(lambda: forward().sum().backward(), device)
    back = max(both - ahead, ahead)
    return flops / ahead / (peak * 1e12), 2.5 * flops / back / (peak * 1e12)


def _elements(device: torch.device) -> tuple[float, tuple[tuple[float, float], ...]]:
    """Return the rate of element-wise work in GB/s, and the share by megabytes.

    A norm and a gated activation, over the bytes that the planner counts for them.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    found = []
    for count in _CPU_BYTES if device.type == "cpu" else _GPU_BYTES:
        hidden = 1024
        rows = max(1, count // dtype.itemsize // hidden)
        x = torch.randn(rows, hidden, device=device).to(dtype)
        weight = torch.ones(hidden, device=device, dtype=dtype)

        def work(x: Tensor = x, weight: Tensor = weight) -> Tensor:
            normed = F.rms_norm(x, weight.shape, weight)
            return F.silu(normed) * x

        moved = 5 * rows * hidden * dtype.itemsize  # two of the norm, three of the activation
        found.append((moved / 1e6, moved / _seconds(work, device) / 1e9))
    best = max(rate for _, rate in found)
    return best, tuple((round(size, 3), round(rate / best, 4)) for size, rate in found)


def _kernel(device: torch.device) -> float:
    """Return the time of starting one operation."""
    small = torch.zeros(8, device=device)
    return _seconds(lambda: [small.add_(1.0) for _ in range(100)], device) / 100


def _logit(device: torch.device) -> float:
    """Return the time of one logit of one model in the losses: statistics and gradient."""
    rows, columns = 64, 32_768
    logits = torch.randn(rows, columns, device=device)

    def work() -> Tensor:
        top = logits.amax(-1, keepdim=True)
        weights = (logits - top).exp_()
        return weights.div_(weights.sum(-1, keepdim=True)).sub_(0.5)

    return _seconds(work, device) / (rows * columns)


def _gain(cores: int) -> float:
    """Return the speed of all cores on a product, over that of one times their number."""
    side = _CPU_SIDES[-1]
    left = torch.randn(side, side)
    cpu = torch.device("cpu")
    torch.set_num_threads(1)
    alone = _seconds(lambda: left @ left, cpu)
    torch.set_num_threads(cores)
    return min(1.0, alone / _seconds(lambda: left @ left, cpu) / cores)


def _links(device: torch.device) -> tuple[Link, Link]:
    """Measure a sum over two processes; the network is taken to be the same."""
    ranks = 2
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        link = Link(devices=1, gb_per_s=25.0, efficiency=0.8, latency_us=20.0)
        return link, link
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds"
        arguments = (ranks, device.type, f"{folder}/store", str(result))
        mp.spawn(_sum_of_ranks, args=arguments, nprocs=ranks)
        small, _, large = map(float, result.read_text().split())
    # A sum sends and receives twice the half of it.
    rate = _MESSAGES[-1] / max(large - small, 1e-9) / 1e9
    most = torch.cuda.device_count() if device.type == "cuda" else 64
    link = Link(devices=most, gb_per_s=rate, efficiency=1.0, latency_us=small * 1e6)
    return link, link


def _sum_of_ranks(rank: int, ranks: int, kind: str, store: str, result: str) -> None:
    """Time sums of three sizes; the first of the two processes writes them."""
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)  # else the barrier of every rank is on the first GPU
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        device_id=device if kind == "cuda" else None,
    )
    times = []
    for count in _MESSAGES:
        message = torch.zeros(count // 4, device=device)
        found = []
        for _ in range(20):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(message)
            if kind == "cuda":
                torch.cuda.synchronize(device)
            found.append(time.perf_counter() - began)
        times.append(median(found))
    if rank == 0:
        Path(result).write_text(" ".join(map(str, times)))
    dist.destroy_process_group()

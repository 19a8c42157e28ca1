"""The rates of the machine at hand, measured in less than half a minute.

Measured are products of four sizes, a fused attention, a layer's element-wise work, and messages
between two processes. On a CPU the losses' work per logit, that of a choice of top-k ids, and the
optimizer's per parameter are added. Operands of products are not in the caches, as they are not in
a step.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from itertools import cycle
from statistics import median
from typing import Final, Literal

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_distill.errors import counted
from megatron_distill.log import get_logger
from megatron_distill.losses import Term, fused_linear_objective
from megatron_distill.models.attention_kernels.rule import AttentionRule
from megatron_distill.models.attention_kernels.tiles import attend
from megatron_distill.ops import LogitRule, VocabShard
from megatron_distill.ops.frozen_head import row_statistics
from megatron_distill.ops.topk import select
from megatron_distill.planning.calibration_links import measure_links
from megatron_distill.planning.device import (
    ALIASED_COLUMNS,
    CALIBRATED,
    Curve,
    DeviceProfile,
    Precision,
)
from megatron_distill.planning.forked_ranks import ForkedRanks
from megatron_distill.runtime.segments import Segments
from megatron_distill.signals import HiddenState

__all__ = ["measure_machine", "measured_beside"]

_LOGGER = get_logger(__name__)
_DTYPES: Final[dict[Precision, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Square products, and the hidden states of a layer's element-wise work in bytes, of which it holds
# some thirty times as many.
_CPU_SIDES: Final = (128, 256, 512, 1024)
_GPU_SIDES: Final = (1024, 2048, 4096, 8192)
_CPU_BYTES: Final = (2**18, 2**20, 2**23, 2**25)
_GPU_BYTES: Final = (2**18, 2**21, 2**24, 2**27)
_SECONDS: Final = 0.3  # of one measurement
_FEWEST: Final = 2  # calls of one that takes longer, after one that is not counted
_CACHE_BYTES: Final = 2**26  # more than the caches of a core, or of a GPU, hold
_COLUMNS: Final = 33_024  # of logits, as many as aliased ones and no multiple of their number
_TOP_K: Final = 64
_HEAD_WIDTHS: Final = (32, 128)  # of which a CPU's attention is measured
# Of products in layers: [tokens, hidden size, a multiple of it].
_GAIN_SHAPES: Final = ((512, 256, 1408), (2048, 768, 2048))
_HIDDEN: Final = 1024
# Share of the cores that others may use: the rates of two threads suffer first.
_UNSEEN: Final = 0.1
# Operations that the planner counts in a layer's element-wise work.
_ELEMENT_KERNELS: Final = 7


def measure_machine(
    kind: Literal["cpu", "gpu"],
    *,
    forked: ForkedRanks | None = None,
    steps: Callable[[DeviceProfile], DeviceProfile] | None = None,
) -> DeviceProfile:
    """Measure this machine's CPU, or its first GPU; warns where other processes disturb it.

    forked: ranks of a CPU, whose imports are done. steps: returns the device refined by steps that
    it takes.
    """
    began, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds(forked)
    device = torch.device("cuda:0" if kind == "gpu" else "cpu")
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if kind == "cpu" else None
    try:
        if kind == "cpu":
            torch.set_num_threads(1)
        peaks, efficiency = _products(device)
        attention, softmax = _attention(device, peaks)
        rate, memory = _elements(device)
        kernel = _kernel(device)
        logits, aliased, choices, update = {}, {}, {}, 0.0
        if kind == "cpu":
            logits, aliased = (_logits(peaks, count) for count in (_COLUMNS, ALIASED_COLUMNS))
            choices, update = _choices(), _update()
        gain: Curve = ((1.0, 1.0),)
        if cores is not None and cores > 1:
            gain = _gain(cores)
    finally:
        torch.set_num_threads(threads)
    node, network = measure_links(device, forked)
    found = DeviceProfile(
        name=CALIBRATED[kind],
        title=_title(device),
        kind=kind,
        memory_gib=_memory(device) / 2**30,
        reserved_gib=0.4 if kind == "cpu" else 2.5,
        peak_tflops=peaks,
        product_efficiency=efficiency,
        attention_efficiency=attention,
        score_ns=softmax,
        memory_gb_per_s=rate,
        memory_efficiency=memory,
        kernel_us=kernel * 1e6,
        logit_ns=logits,
        aliased_logit_ns=aliased,
        choice_ns=choices,
        update_ns=update * 1e9,
        cores=cores,
        thread_efficiency=gain,
        node=node,
        network=network,
        source="",
        efficiency_source="measured too",
        date=date.today().isoformat(),
    )
    if steps is not None:
        found = steps(found)
    others = max(0.0, _busy_seconds() - busy - (_own_seconds(forked) - own))
    others /= time.perf_counter() - began
    # A GPU does not mind them.
    source = measured_beside(0.0 if cores is None else others, cores=cores or 1)
    return found.model_copy(update={"source": source})


def measured_beside(others: float, *, cores: int) -> str:
    """Return the source of a measurement, and warn if other processes used many of the cores."""
    source = "measured by megatron-distill calibrate"
    if others <= _UNSEEN * cores:
        return source
    _LOGGER.warning(
        "other processes used %.1f of %s meanwhile, so that the rates are too low; calibrate again "
        "when they have ended",
        others,
        counted(cores, "core"),
    )
    return f"{source}, while other processes used {others:.1f} of {counted(cores, 'core')}"


def _busy_seconds() -> float:
    """Return the seconds that this process's cores have worked, for any process."""
    times = psutil.cpu_times(percpu=True)
    mine = [times[core]._asdict() for core in os.sched_getaffinity(0) if core < len(times)]
    idle = ("idle", "iowait", "guest", "guest_nice")  # user has a guest's
    return sum(value for one in mine for name, value in one.items() if name not in idle)


def _own_seconds(forked: ForkedRanks | None = None) -> float:
    """Return the seconds that this process, its ended children and forked ranks have worked."""
    return sum(os.times()[:4]) + (0.0 if forked is None else forked.cpu_seconds)


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

    once()
    times = [once()]
    count = max(_FEWEST, min(200, int(_SECONDS / max(times[0], 1e-6))))
    times += [once() for _ in range(count - 1)]
    return median(times)


def _products(
    device: torch.device,
) -> tuple[dict[Precision, float], tuple[tuple[float, float], ...]]:
    """Return the highest rate of each precision in TFLOP/s, and the share by size of the main."""
    on_cuda = device.type == "cuda"
    main: Precision = "bf16" if on_cuda else "fp32"
    rates: dict[Precision, list[tuple[float, float]]] = {}
    for precision, dtype in _DTYPES.items():
        for side in _GPU_SIDES if on_cuda else _CPU_SIDES:
            seconds = _seconds(_cold_product((side, side, side), dtype, device), device)
            rates.setdefault(precision, []).append((2 * side**3 / 1e9, 2 * side**3 / seconds))
    peaks = {precision: max(rate for _, rate in found) / 1e12 for precision, found in rates.items()}
    shares = [(size, rate / peaks[main] / 1e12) for size, rate in rates[main]]
    return peaks, tuple((round(size, 4), round(share, 4)) for size, share in shares)


def _cold_product(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """Return a product [m, k] times [n, k] that takes other operands each time."""
    m, k, n = shape
    copies = 1 + _CACHE_BYTES // ((m * k + n * k + m * n) * dtype.itemsize)
    left = [torch.randn(m, k, device=device).to(dtype) for _ in range(copies)]
    right = [torch.randn(n, k, device=device).to(dtype) for _ in range(copies)]
    results: list[Tensor | None] = [None] * copies
    numbers = cycle(range(copies))

    def work() -> None:
        number = next(numbers)
        results[number] = left[number] @ right[number].T

    return work


def _attention(
    device: torch.device, peaks: dict[Precision, float]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the share of the peak of attention's products, and the nanoseconds of a softmax."""
    if device.type == "cuda":
        return _gpu_attention(device, peaks["bf16"]), (0.0, 0.0)
    return _cpu_attention(peaks["fp32"])


def _gpu_attention(device: torch.device, peak: float) -> tuple[float, float]:
    """Return the share of the peak that fused attention reaches, forward and backward."""
    heads, length, width = 32, 4096, 128
    query, key, value = (
        torch.randn(
            (1, heads, length, width), device=device, dtype=torch.bfloat16, requires_grad=True
        )
        for _ in range(3)
    )

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    ahead, back = _both_passes(forward, device)
    flops = 4 * heads * width * length * (length + 1) / 2
    return flops / ahead / (peak * 1e12), 2.5 * flops / back / (peak * 1e12)


def _cpu_attention(peak: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the share of the peak of attention's products, and the nanoseconds of a softmax.

    Both forward and backward; of a softmax for one score. Two widths of heads tell them apart.
    """
    heads, groups, length = 8, 4, 512
    scores = heads * length * (length + 1) / 2
    segments = Segments(bounds=((0, length),))
    found = []
    for width in _HEAD_WIDTHS:
        query, key, value = (
            torch.randn(length, 1, count, width, requires_grad=True)
            for count in (heads, groups, groups)
        )
        rule = AttentionRule(scale=width**-0.5, softcap=None, dropout=0.0)
        forward = partial(attend, query, key, value, segments, rule)
        found.append(_both_passes(forward, torch.device("cpu")))
    narrow, wide = _HEAD_WIDTHS
    shares, softmax = [], []
    for products, few, many in zip((4.0, 10.0), *found, strict=True):
        rate = products * scores * (wide - narrow) / max(many - few, 0.1 * many)
        shares.append(rate / (peak * 1e12))
        softmax.append(max(0.0, few - products * scores * narrow / rate) / scores * 1e9)
    return (shares[0], shares[1]), (softmax[0], softmax[1])


def _both_passes(forward: Callable[[], Tensor], device: torch.device) -> tuple[float, float]:
    """Return the time of a forward pass and of its backward pass."""
    ahead = _seconds(forward, device)
    both = _seconds(lambda: forward().sum().backward(), device)
    return ahead, max(both - ahead, ahead)


def _elements(device: torch.device) -> tuple[float, tuple[tuple[float, float], ...]]:
    """Return the rate of element-wise work in GB/s, and the share by megabytes of one operation.

    The work is a layer's, forward and backward, over the bytes that the planner counts for it. It
    has two norms, two residual sums, rotated queries and keys, and a gated activation.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    found = []
    for size in _CPU_BYTES if device.type == "cpu" else _GPU_BYTES:
        layer = _ElementsOfLayer(max(1, size // dtype.itemsize // _HIDDEN), dtype, device)
        moved = layer.moved / _ELEMENT_KERNELS
        found.append((moved / 1e6, 3 * layer.moved / _seconds(layer, device) / 1e9))
    best = max(rate for _, rate in found)
    return best, tuple((round(size, 3), round(rate / best, 4)) for size, rate in found)


class _ElementsOfLayer:
    """The element-wise work of one layer with _HIDDEN numbers of a token, 3 times as many inside.

    moved: bytes of the forward pass as the planner counts them; backward moves twice as many.
    """

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        self._hidden = random(rows, _HIDDEN).requires_grad_()
        self._weights = [random(_HIDDEN).requires_grad_() for _ in range(2)]
        self._turning = random(rows, 12, _HIDDEN // 8).requires_grad_()  # 8 queries and 4 keys
        self._angles = [random(rows, 1, _HIDDEN // 8) for _ in range(2)]
        self._inner = random(rows, 6 * _HIDDEN).requires_grad_()
        self.moved = rows * dtype.itemsize * _HIDDEN * (10 + 2 * 1.5 + 3 * 3)

    def __call__(self) -> None:
        total = self._hidden
        for weight in self._weights:
            total = total + F.rms_norm(total, weight.shape, weight)
        cosine, sine = self._angles
        first, second = self._turning.chunk(2, dim=-1)
        turned = self._turning * cosine + torch.cat((-second, first), dim=-1) * sine
        gate, value = self._inner.chunk(2, dim=-1)
        results = (total, turned, F.silu(gate) * value)
        torch.autograd.backward(results, [result.detach() for result in results])


def _kernel(device: torch.device) -> float:
    """Return the time of starting one operation."""
    small = torch.zeros(8, device=device)
    return _seconds(lambda: [small.add_(1.0) for _ in range(100)], device) / 100


def _logits(peaks: dict[Precision, float], columns: int) -> dict[Precision, float]:
    """Return the nanoseconds of one logit of one model in the objective, without the products."""
    return {
        precision: max(1e9 * _logit(dtype, peaks[precision], columns), 0.01)
        for precision, dtype in _DTYPES.items()
    }


def _logit(dtype: torch.dtype, peak: float, columns: int) -> float:
    """Return the seconds of one of `columns` logits.

    peak: of products, in TFLOP/s.
    """
    rows, hidden = 512, 256
    student, weight = (
        torch.randn(count, hidden).to(dtype).requires_grad_() for count in (rows, columns)
    )
    teacher = HiddenState(
        torch.randn(rows, hidden).to(dtype), torch.randn(columns, hidden).to(dtype)
    )
    labels, weights = torch.randint(columns, (rows,)), torch.full((rows,), 1 / rows)
    sum_of_gradients = torch.zeros(columns, hidden)

    def work() -> None:
        total, _ = fused_linear_objective(
            student,
            weight,
            teacher,
            labels,
            ce_weights=weights,
            kd_weights=weights,
            terms=(Term("forward_kl"),),
            weight_gradient_sum=sum_of_gradients,
        )
        total.backward()

    products = 4 * 2 * rows * hidden * columns / (peak * 1e12)
    return (_seconds(work, torch.device("cpu")) - products) / (2 * rows * columns)


def _choices() -> dict[Precision, float]:
    """Return the nanoseconds of one logit of a teacher whose top-k ids are recorded."""
    rows = 512
    shard, labels = VocabShard(_COLUMNS, 0, _COLUMNS), torch.randint(_COLUMNS, (rows,))
    found: dict[Precision, float] = {}
    for precision, dtype in _DTYPES.items():
        raw = torch.randn(rows, _COLUMNS).to(dtype)

        def work(raw: Tensor = raw) -> None:
            row_statistics(raw, LogitRule(), shard, None, labels=labels)
            select(raw, LogitRule(), shard, None, k=_TOP_K, temperatures=[1.0])

        found[precision] = 1e9 * _seconds(work, torch.device("cpu")) / raw.numel()
    return found


def _update() -> float:
    """Return the time of one parameter in the optimizer.

    Its gradient is copied, clipped by the norm and zeroed, and the weight copied back.
    """
    parameter = torch.zeros(32_768, 512, requires_grad=True)
    gradient = parameter.grad = torch.empty_like(parameter)
    optimizer = torch.optim.AdamW([parameter])
    weight, weight_gradient = torch.zeros(32_768, 512), torch.randn(32_768, 512)

    def work() -> None:
        gradient.copy_(weight_gradient)
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        optimizer.step()
        weight.copy_(parameter.detach())
        weight_gradient.zero_()

    return _seconds(work, torch.device("cpu")) / parameter.numel()


def _gain(cores: int) -> Curve:
    """Return the speed of all cores over that of one times their number, by a product's GFLOP.

    Element-wise work of as many tokens goes with the small product.
    """
    cpu = torch.device("cpu")
    small, large = _GAIN_SHAPES
    elements = _ElementsOfLayer(small[0] * small[1] // _HIDDEN, torch.float32, cpu)
    works: dict[tuple[int, int, int], list[Callable[[], None]]] = {
        small: [_cold_product(small, torch.float32, cpu), elements],
        large: [_cold_product(large, torch.float32, cpu)],
    }
    found = []
    for shape, parts in works.items():
        seconds = []
        for threads in (1, cores):
            torch.set_num_threads(threads)
            seconds.append(sum(_seconds(part, cpu) for part in parts))
        alone, together = seconds
        found.append((2 * math.prod(shape) / 1e9, min(1.0, alone / together / cores)))
    return tuple((round(size, 4), round(gain, 4)) for size, gain in found)

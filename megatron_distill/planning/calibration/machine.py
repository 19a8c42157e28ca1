"""The rates of the machine at hand, measured in several short rounds.

Each round measures every rate once. Measured are products of four sizes, a fused attention, a
layer's element-wise work, and messages between two processes. On a CPU a choice of top-k ids, and
the optimizer's work per parameter, are added; the losses' per logit is that of steps. Operands of
products are not in the caches, as they are not in a step.
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

from megatron_distill.launching.forked_ranks import ForkedRanks
from megatron_distill.models.attention_kernels.rule import AttentionRule
from megatron_distill.models.attention_kernels.tiles import attend
from megatron_distill.ops import LogitRule, VocabShard
from megatron_distill.ops.frozen_head import row_statistics
from megatron_distill.ops.topk import select
from megatron_distill.planning.calibration.links import measure_links
from megatron_distill.planning.calibration.neighbours import (
    busy_seconds,
    measured_beside,
    own_seconds,
)
from megatron_distill.planning.calibration.rounds import reduced
from megatron_distill.planning.curves import Curve
from megatron_distill.planning.device import (
    CALIBRATED,
    LONG_DOCUMENT,
    SCORED_DOCUMENT,
    DeviceProfile,
    Precision,
)
from megatron_distill.runtime.segments import Segments

__all__ = ["measure_machine"]

_DTYPES: Final[dict[Precision, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Square products, and the hidden states of a layer's element-wise work in bytes, of which it holds
# some thirty times as many.
_CPU_SIDES: Final = (128, 256, 512, 1024)
_GPU_SIDES: Final = (1024, 2048, 4096, 8192)
_CPU_BYTES: Final = (2**18, 2**20, 2**23, 2**25)
_GPU_BYTES: Final = (2**18, 2**21, 2**24, 2**27)
_ROUNDS: Final = 3
_SECONDS: Final = 0.07  # of one measurement in a round
_LONG: Final = 0.5  # seconds of a call of which what the first one does more is too little to count
_CACHE_BYTES: Final = 2**26  # more than the caches of a core, or of a GPU, hold
_COLUMNS: Final = 33_024  # of logits
_TOP_K: Final = 64
_NARROW: Final = 8192  # columns of rows that are read whole for so many ids
_HEAD_WIDTHS: Final = (32, 128)  # of which a CPU's attention is measured
# Of products in layers: [tokens, hidden size, a multiple of it].
_GAIN_SHAPES: Final = ((512, 256, 1408), (2048, 768, 2048))
_HIDDEN: Final = 1024
# Operations that the planner counts in a layer's element-wise work.
_ELEMENT_KERNELS: Final = 7


def measure_machine(
    kind: Literal["cpu", "gpu"],
    *,
    forked: ForkedRanks | None = None,
    steps: Callable[[DeviceProfile], DeviceProfile] | None = None,
) -> DeviceProfile:
    """Measure this machine's CPU, or its first GPU; warns where other processes disturb it.

    forked: ranks of a CPU, whose imports are done. steps: returns the device of all rounds refined
    by steps that it takes.
    """
    began, busy, own = time.perf_counter(), busy_seconds(), own_seconds(forked)
    machine = _Machine(kind, forked)
    found = reduced([machine.rates() for _ in range(_ROUNDS)])
    if steps is not None:
        found = steps(found)
    others = max(0.0, busy_seconds() - busy - (own_seconds(forked) - own))
    others /= time.perf_counter() - began
    # A GPU does not mind them.
    source = measured_beside(0.0 if machine.cores is None else others, cores=machine.cores or 1)
    return found.model_copy(update={"source": source})


class _Machine:
    """The works of all rates, with their operands; `cores`: of a CPU."""

    def __init__(self, kind: Literal["cpu", "gpu"], forked: ForkedRanks | None) -> None:
        self.cores = len(os.sched_getaffinity(0)) if kind == "cpu" else None
        self._kind, self._forked = kind, forked
        device = self._device = torch.device("cuda:0" if kind == "gpu" else "cpu")
        self._products, self._attention = _products(device), _attention(device)
        self._long_attention = _cpu_attention(2, LONG_DOCUMENT) if kind == "cpu" else None
        self._elements, self._kernel = _elements(device), _kernel(device)
        self._choices, self._narrow_choices = (
            (_choices(_COLUMNS), _choices(_NARROW)) if kind == "cpu" else (_no_rates, _no_rates)
        )
        self._update = _update() if kind == "cpu" else None
        self._gain = None if self.cores in (None, 1) else _gain(self.cores or 1)

    def rates(self) -> DeviceProfile:
        """Measure every rate once; those of a CPU on one thread."""
        threads = torch.get_num_threads()
        try:
            if self._kind == "cpu":
                torch.set_num_threads(1)
            peaks, efficiency = self._products()
            attention, softmax = self._attention(peaks)
            long_attention, long_softmax = (
                (None, None) if self._long_attention is None else self._long_attention(peaks)
            )
            rate, memory = self._elements()
            rates = {
                "peak_tflops": peaks,
                "product_efficiency": efficiency,
                "attention_efficiency": attention,
                "score_ns": softmax,
                "long_attention_efficiency": long_attention,
                "long_score_ns": long_softmax,
                "memory_gb_per_s": rate,
                "memory_efficiency": memory,
                "kernel_us": self._kernel() * 1e6,
                "choice_ns": self._choices(),
                "narrow_choice_ns": self._narrow_choices(),
                "update_ns": 0.0 if self._update is None else self._update() * 1e9,
                "thread_efficiency": ((1.0, 1.0),) if self._gain is None else self._gain(),
            }
        finally:
            torch.set_num_threads(threads)
        node, network = measure_links(self._device, self._forked)
        return DeviceProfile.model_validate(
            rates
            | {
                "name": CALIBRATED[self._kind],
                "title": _title(self._device),
                "kind": self._kind,
                "memory_gib": _memory(self._device) / 2**30,
                "reserved_gib": 0.4 if self._kind == "cpu" else 2.5,
                "cores": self.cores,
                "node": node,
                "network": network,
                "source": "",
                "efficiency_source": "measured too",
                "date": date.today().isoformat(),
            }
        )


def _no_rates() -> dict[Precision, float]:
    """Return no rates: of a GPU its memory's is all that is measured."""
    return {}


def _title(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"rank of this {platform.machine()} CPU"


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(psutil.virtual_memory().total)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of one call, over as many as fit the time.

    The first is not counted: it may be the one that allocates. Of longer calls one is, and of very
    long ones the first.
    """

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    first = once()
    if first > _SECONDS:
        return first if first > _LONG else once()
    return median(once() for _ in range(min(200, max(1, int(_SECONDS / max(first, 1e-6))))))


def _products(device: torch.device) -> Callable[[], tuple[dict[Precision, float], Curve]]:
    """Return a measurement of products.

    Of each precision it has the highest rate in TFLOP/s, and of the main one the share by size.
    """
    on_cuda = device.type == "cuda"
    main: Precision = "bf16" if on_cuda else "fp32"
    works = {
        (precision, side): _cold_product((side, side, side), dtype, device)
        for precision, dtype in _DTYPES.items()
        for side in (_GPU_SIDES if on_cuda else _CPU_SIDES)
    }

    def measure() -> tuple[dict[Precision, float], Curve]:
        rates: dict[Precision, list[tuple[float, float]]] = {}
        for (precision, side), work in works.items():
            rate = 2 * side**3 / _seconds(work, device)
            rates.setdefault(precision, []).append((2 * side**3 / 1e9, rate))
        peaks = {key: max(rate for _, rate in found) / 1e12 for key, found in rates.items()}
        shares = [(size, rate / peaks[main] / 1e12) for size, rate in rates[main]]
        return peaks, tuple((round(size, 4), round(share, 4)) for size, share in shares)

    return measure


def _cold_product(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """Return a product [m, k] times [n, k] that takes other operands each time."""
    m, k, n = shape
    copies = 1 + _CACHE_BYTES // ((m * k + n * k + m * n) * dtype.itemsize)
    drawn = [torch.randn(rows, k, device=device).to(dtype) for rows in (m, n)]
    left, right = ([one.clone() for _ in range(copies)] for one in drawn)
    results: list[Tensor | None] = [None] * copies
    numbers = cycle(range(copies))

    def work() -> None:
        number = next(numbers)
        results[number] = left[number] @ right[number].T

    return work


# Shares of the peak of attention's products, and nanoseconds of a softmax; forward and backward.
_Attention = tuple[tuple[float, float], tuple[float, float]]


def _attention(device: torch.device) -> Callable[[dict[Precision, float]], _Attention]:
    """Return a measurement of attention, which is given the highest rates of products."""
    if device.type == "cuda":
        return _gpu_attention(device)
    return _cpu_attention(8, SCORED_DOCUMENT)


def _gpu_attention(device: torch.device) -> Callable[[dict[Precision, float]], _Attention]:
    """Return a measurement of the share of the peak that fused attention reaches."""
    heads, length, width = 32, 4096, 128
    query, key, value = (
        torch.randn(
            (1, heads, length, width), device=device, dtype=torch.bfloat16, requires_grad=True
        )
        for _ in range(3)
    )
    flops = 4 * heads * width * length * (length + 1) / 2

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def measure(peaks: dict[Precision, float]) -> _Attention:
        ahead, back = _both_passes(forward, device)
        peak = peaks["bf16"] * 1e12
        return (flops / ahead / peak, 2.5 * flops / back / peak), (0.0, 0.0)

    return measure


def _cpu_attention(heads: int, length: int) -> Callable[[dict[Precision, float]], _Attention]:
    """Return a measurement of the products and of the softmax of one score of a document.

    Two widths of heads tell them apart.
    """
    groups = heads // 2
    scores = heads * length * (length + 1) / 2
    segments = Segments(bounds=((0, length),))
    passes = []
    for width in _HEAD_WIDTHS:
        query, key, value = (
            torch.randn(length, 1, count, width, requires_grad=True)
            for count in (heads, groups, groups)
        )
        rule = AttentionRule(scale=width**-0.5, softcap=None, dropout=0.0)
        passes.append(partial(attend, query, key, value, segments, rule))
    narrow, wide = _HEAD_WIDTHS

    def measure(peaks: dict[Precision, float]) -> _Attention:
        found = [_both_passes(forward, torch.device("cpu")) for forward in passes]
        shares, softmax = [], []
        for products, few, many in zip((4.0, 10.0), *found, strict=True):
            rate = products * scores * (wide - narrow) / max(many - few, 0.1 * many)
            shares.append(rate / (peaks["fp32"] * 1e12))
            softmax.append(max(0.0, few - products * scores * narrow / rate) / scores * 1e9)
        return (shares[0], shares[1]), (softmax[0], softmax[1])

    return measure


def _both_passes(forward: Callable[[], Tensor], device: torch.device) -> tuple[float, float]:
    """Return the time of a forward pass and of its backward pass."""
    ahead = _seconds(forward, device)
    both = _seconds(lambda: forward().sum().backward(), device)
    return ahead, max(both - ahead, ahead)


def _elements(device: torch.device) -> Callable[[], tuple[float, Curve]]:
    """Return a measurement of element-wise work in GB/s, and the share by megabytes of one kernel.

    The work is a layer's, forward and backward, over the bytes that the planner counts for it. It
    has two norms, two residual sums, rotated queries and keys, and a gated activation.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    layers = [
        _ElementsOfLayer(max(1, size // dtype.itemsize // _HIDDEN), dtype, device)
        for size in (_CPU_BYTES if device.type == "cpu" else _GPU_BYTES)
    ]

    def measure() -> tuple[float, Curve]:
        rates = [3 * layer.moved / _seconds(layer, device) / 1e9 for layer in layers]
        sizes = [layer.moved / _ELEMENT_KERNELS / 1e6 for layer in layers]
        best = max(rates)
        return best, tuple(
            (round(size, 3), round(rate / best, 4)) for size, rate in zip(sizes, rates, strict=True)
        )

    return measure


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


def _kernel(device: torch.device) -> Callable[[], float]:
    """Return a measurement of the seconds that starting one operation takes."""
    small = torch.zeros(8, device=device)
    return lambda: _seconds(lambda: [small.add_(1.0) for _ in range(100)], device) / 100


def _choices(columns: int) -> Callable[[], dict[Precision, float]]:
    """Return a measurement of one logit of a teacher whose top-k ids are recorded."""
    rows = 512
    shard, labels = VocabShard(columns, 0, columns), torch.randint(columns, (rows,))
    matrices = {precision: torch.randn(rows, columns).to(d) for precision, d in _DTYPES.items()}

    def choose(raw: Tensor) -> None:
        row_statistics(raw, LogitRule(), shard, None, labels=labels)
        select(raw, LogitRule(), shard, None, k=_TOP_K, temperatures=[1.0])

    def measure() -> dict[Precision, float]:
        return {
            precision: 1e9 * _seconds(partial(choose, raw), torch.device("cpu")) / raw.numel()
            for precision, raw in matrices.items()
        }

    return measure


def _update() -> Callable[[], float]:
    """Return a measurement of the seconds of one parameter in the optimizer.

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

    return lambda: _seconds(work, torch.device("cpu")) / parameter.numel()


def _gain(cores: int) -> Callable[[], Curve]:
    """Return a measurement of the speed of all cores over one's times their number, by GFLOP.

    Element-wise work of as many tokens goes with the small product.
    """
    cpu = torch.device("cpu")
    small, large = _GAIN_SHAPES
    elements = _ElementsOfLayer(small[0] * small[1] // _HIDDEN, torch.float32, cpu)
    works: dict[tuple[int, int, int], list[Callable[[], None]]] = {
        small: [_cold_product(small, torch.float32, cpu), elements],
        large: [_cold_product(large, torch.float32, cpu)],
    }

    def measure() -> Curve:
        found = []
        for shape, parts in works.items():
            seconds = []
            for threads in (1, cores):
                torch.set_num_threads(threads)
                seconds.append(sum(_seconds(part, cpu) for part in parts))
            alone, together = seconds
            found.append((2 * math.prod(shape) / 1e9, min(1.0, alone / together / cores)))
        return tuple((round(size, 4), round(gain, 4)) for size, gain in found)

    return measure

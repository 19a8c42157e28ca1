"""Seconds of operations on one rank, from a device's rates.

A product takes its FLOPs over the device's peak and the share that products of this size reach.
Everything else takes its bytes over the memory's rate. One micro-batch, one rank; n tokens of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal

from megatron_distill.planning.curves import share

if TYPE_CHECKING:
    from megatron_distill.models.architecture import Architecture
    from megatron_distill.planning.device import DeviceProfile, Precision
    from megatron_distill.runtime.layout import Layout

__all__ = [
    "CALLS_OF_LAYER",
    "Counts",
    "LayerTraits",
    "Passes",
    "Rank",
    "Recomputed",
    "attended_positions",
    "element_seconds",
    "layer_kinds",
    "slice_of",
    "streamed_seconds",
]

Recomputed = Literal["none", "selective", "full"]
# Calls of torch in one pass of a layer on a CPU, views and new tensors included. They run one after
# the other on one thread, however small the work is.
CALLS_OF_LAYER: Final = 340
# That the optimizer moves per parameter in `update_ns`, on a CPU.
_UPDATE_BYTES: Final = 60


@dataclass(frozen=True)
class Rank:
    """One rank of a layout on a device, and a micro-batch on it.

    Attributes:
        tokens: of the micro-batch on this rank.
        attended: mean number of positions that a token attends to, in layers without and with a
            sliding window.
        scores: whether attention writes its scores to memory, as before fused attention.
        overlapped: the shares of the tensor ranks' gathers and scatters that products hide.
    """

    device: DeviceProfile
    precision: Precision
    layout: Layout
    tokens: int
    attended: tuple[float, float]
    scores: bool = False
    overlapped: tuple[float, float] = (0.0, 0.0)

    @property
    def width(self) -> int:
        """Bytes of one number of activations."""
        return 4 if self.precision == "fp32" else 2

    @property
    def element_width(self) -> int:
        """Bytes of one number of element-wise work, by which its time goes.

        A CPU converts bf16 to fp32 and back, which takes as long as fp32 does.
        """
        return 4 if self.device.kind == "cpu" else self.width

    def calls(self, count: float) -> float:
        """Return the time of so many calls of torch on a CPU; on a GPU kernels hide them."""
        return count * self.device.kernel_us * 1e-6 if self.device.kind == "cpu" else 0.0

    def calls_of_losses(self, count: float) -> float:
        """Return the time of so many calls in losses, whose code is evicted as that of layers."""
        evicted = self.device.layer_seconds("forward") / CALLS_OF_LAYER
        return self.calls(count) + count * evicted

    def product(self, rows: float, inner: float, columns: float, *, count: float = 1.0) -> float:
        """Return the time of `count` products [rows, inner] times [inner, columns]."""
        flops = 2.0 * rows * inner * columns
        if not flops:
            return 0.0
        device = self.device
        peak = device.peak_flops(self.precision)
        reached = share(device.product_efficiency, flops / 1e9)
        work = max(flops / (peak * reached), self._traffic(rows, inner, columns))
        return count * (work + device.kernel_us * 1e-6)

    def _traffic(self, rows: float, inner: float, columns: float) -> float:
        numbers = rows * inner + inner * columns + rows * columns
        return numbers * self.width / (self.device.memory_gb_per_s * 1e9)

    def passes(self, byte_count: float, *, kernels: int = 1) -> float:
        """Return the time of element-wise work that reads and writes `byte_count` in all."""
        return element_seconds(self.device, byte_count, kernels=kernels)

    def streamed(self, byte_count: float, *, kernels: int = 1) -> float:
        """Return the time of such work on a whole matrix of weights."""
        return streamed_seconds(self.device, byte_count, kernels=kernels)

    @property
    def attention_peak(self) -> float:
        """The highest FLOP/s of attention's products.

        A CPU's attention computes in fp32 whatever it is given.
        """
        in_fp32 = self.precision == "fp32" or self.device.kind == "cpu"
        return self.device.peak_flops("fp32" if in_fp32 else "bf16")

    def fused_attention(
        self, flops: float, scores: float, *, backward: bool, is_long: bool = False
    ) -> float:
        """Return the time of a fused attention's products, and of the softmax of its scores.

        is_long: at the rates of long documents, which were measured.
        """
        device = self.device
        efficiency, score_ns = device.attention_efficiency, device.score_ns
        if is_long and device.long_attention_efficiency and device.long_score_ns:
            efficiency, score_ns = device.long_attention_efficiency, device.long_score_ns
        softmax = scores * score_ns[backward] * 1e-9
        products = flops / (self.attention_peak * efficiency[backward])
        return products + softmax + device.kernel_us * 1e-6


def element_seconds(device: DeviceProfile, byte_count: float, *, kernels: int = 1) -> float:
    """Return the time of element-wise work that reads and writes `byte_count` in all."""
    if not byte_count:
        return 0.0
    reached = share(device.memory_efficiency, byte_count / kernels / 1e6)
    return byte_count / (device.memory_gb_per_s * 1e9 * reached) + kernels * device.kernel_us * 1e-6


def streamed_seconds(device: DeviceProfile, byte_count: float, *, kernels: int = 1) -> float:
    """Return the time of element-wise work on whole matrices, as an embedding's gradients.

    Where the optimizer was measured, at its rate: a layer's element-wise work on a CPU has more
    arithmetic, and memory that is allocated for its results.
    """
    if device.update_ns:
        return byte_count / _UPDATE_BYTES * device.update_ns * 1e-9
    return element_seconds(device, byte_count, kernels=kernels)


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch: forward and backward work, and messages in both.

    `backward` includes recomputation. tensor, context, expert: messages of both passes that no
    work hides.
    """

    forward: float = 0.0
    backward: float = 0.0
    forward_messages: float = 0.0
    backward_messages: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0

    def __add__(self, other: Passes) -> Passes:
        # Spelled out: a search adds a hundred thousand of them.
        return Passes(
            self.forward + other.forward,
            self.backward + other.backward,
            self.forward_messages + other.forward_messages,
            self.backward_messages + other.backward_messages,
            self.tensor + other.tensor,
            self.context + other.context,
            self.expert + other.expert,
        )

    def times(self, factor: float) -> Passes:
        """Return the time of `factor` such passes."""
        return Passes(*(factor * value for value in self._values))

    def scaled(self, forward: float, backward: float) -> Passes:
        """Return the passes with measured factors of each; the parts of messages by their mean."""
        before = self.forward_messages + self.backward_messages
        messages = self.forward_messages * forward, self.backward_messages * backward
        mean = sum(messages) / before if before else 1.0
        parts = (mean * part for part in (self.tensor, self.context, self.expert))
        return Passes(self.forward * forward, self.backward * backward, *messages, *parts)

    @property
    def _values(self) -> tuple[float, ...]:
        return tuple(vars(self).values())

    @property
    def forward_seconds(self) -> float:
        """Time of the forward pass."""
        return self.forward + self.forward_messages

    @property
    def backward_seconds(self) -> float:
        """Time of the backward pass."""
        return self.backward + self.backward_messages


def attended_positions(length: int, window: int | None, document: int | None) -> float:
    """Return the mean number of positions that a token attends to, itself included.

    document: mean length of the documents that attention does not cross; None: one per sequence.
    """
    visible = min(length, document or length)
    if window is None or window >= visible:
        return (visible + 1) / 2
    return window * (2 * visible - window + 1) / (2 * visible)


# Whether a layer has experts, and whether its attention has the sliding window.
LayerTraits = tuple[bool, bool]
Counts = tuple[tuple[LayerTraits, int], ...]


@lru_cache(maxsize=64)
def layer_kinds(shape: Architecture) -> tuple[LayerTraits, ...]:
    """Return the kind of every layer of a model."""
    moe = shape.moe
    return tuple(
        (
            moe is not None and layer not in moe.dense_layers,
            shape.sliding_window is not None
            and (shape.sliding_layers is None or layer in shape.sliding_layers),
        )
        for layer in range(shape.num_layers)
    )


def slice_of(layers: range) -> slice:
    """Return consecutive layers as a slice of all."""
    return slice(layers.start, layers.stop)

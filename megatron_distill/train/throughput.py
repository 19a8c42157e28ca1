"""The rate of a step, its share of a device's peak, and the memory of a rank."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.flops import step_flops_per_token
from megatron_distill.models.sharded_weights import resident_numbers
from megatron_distill.ops.workspace import chunk_tokens_for
from megatron_distill.runtime.layout import Layout
from megatron_distill.runtime.torchrun import processor_name

__all__ = [
    "MemoryOfRank",
    "PeakMemory",
    "RankParameters",
    "Throughput",
    "chunk_logits",
    "mfu",
    "peak_flops_per_second",
    "peak_memory_bytes",
]

_FP32: Final = 4
_CPU: Final = "cpu"


@dataclass(frozen=True)
class Throughput:
    """Turns the seconds of a step into figures; its fields are constants of a run."""

    tokens_per_step: int
    flops_per_token: float
    num_devices: int
    device_name: str
    precision: Literal["bf16", "fp32"]

    @classmethod
    def of_run(
        cls,
        student: Architecture,
        teacher: Architecture | None,
        *,
        sequence_length: int,
        teacher_length: int | None = None,
        global_batch_size: int,
        precision: Literal["bf16", "fp32"],
        num_devices: int,
        device: torch.device,
    ) -> Throughput:
        """The figures of a run of these models on this number of such devices.

        teacher_length: of the teacher's sequences in tokens of its own; None with one tokenizer.
        """
        flops = step_flops_per_token(
            student, teacher, sequence_length=sequence_length, teacher_length=teacher_length
        )
        on_cuda = device.type == "cuda"
        return cls(
            tokens_per_step=global_batch_size * sequence_length,
            flops_per_token=flops.total,
            num_devices=num_devices,
            device_name=torch.cuda.get_device_name(device) if on_cuda else _CPU,
            precision=precision,
        )

    @property
    def device(self) -> dict[str, str]:
        """The kind and the model of the device, for the log."""
        is_cpu = self.device_name == _CPU
        name = processor_name() if is_cpu else self.device_name
        return {"kind": "cpu" if is_cpu else "gpu", "name": name}

    def figures(self, seconds: float) -> dict[str, float]:
        """Return tokens/s, model TFLOP/s per device and, where the device's peak is known, MFU."""
        tokens_per_second = self.tokens_per_step / seconds
        figures = {
            "tokens_per_second": tokens_per_second,
            "tflops_per_device": self.flops_per_token * tokens_per_second / self.num_devices / 1e12,
        }
        utilisation = mfu(
            self.flops_per_token,
            tokens_per_second=tokens_per_second,
            num_devices=self.num_devices,
            device_name=self.device_name,
            precision=self.precision,
        )
        return figures if utilisation is None else {**figures, "mfu": utilisation}


# Dense tensor-core peaks from the makers' data sheets, in TFLOP/s. A device matches the first row
# if its name contains all words of the row, so narrower rows come first.
_BF16_PEAK_TFLOPS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("GB300",), 2500.0),
    (("GB200",), 2500.0),
    (("B300",), 2250.0),
    (("B200",), 2250.0),
    (("GH200",), 989.4),
    (("H200", "NVL"), 835.5),
    (("H200",), 989.4),
    (("H100", "NVL"), 835.5),
    (("H100", "PCIe"), 756.5),
    (("H100",), 989.4),
    (("H800", "PCIe"), 756.5),
    (("H800",), 989.4),
    (("H20",), 148.0),
    (("A100",), 312.0),
    (("A800",), 312.0),
    (("L40S",), 362.0),
    (("L40",), 181.0),
    (("L4",), 121.0),
    (("A40",), 149.7),
    (("A30",), 165.0),
    (("A10",), 125.0),
    (("MI300X",), 1307.4),
)


def peak_flops_per_second(device_name: str, *, precision: Literal["bf16", "fp32"]) -> float | None:
    """Return the dense peak of a device in FLOP/s, None where it is not known.

    `device_name` is the result of `torch.cuda.get_device_name()`. Only bf16 has a table: the peak
    of fp32 depends on whether TF32 is allowed.
    """
    if precision != "bf16":
        return None
    words = device_name.replace("-", " ")
    for needed, tflops in _BF16_PEAK_TFLOPS:
        if all(f" {word} " in f" {words} " for word in needed):
            return tflops * 1e12
    return None


def mfu(
    flops_per_token: float,
    *,
    tokens_per_second: float,
    num_devices: int,
    device_name: str,
    precision: Literal["bf16", "fp32"],
) -> float | None:
    """Return the model FLOPs utilisation, between 0 and 1; None where the peak is not known."""
    peak = peak_flops_per_second(device_name, precision=precision)
    if peak is None:
        return None
    return flops_per_token * tokens_per_second / (num_devices * peak)


_PROCESS_STATUS = Path("/proc/self/status")
# Writing 5 to it lowers VmHWM to the present resident set (Linux, proc_pid_clear_refs(5)).
_CLEARED_PEAK = Path("/proc/self/clear_refs")


@dataclass
class PeakMemory:
    """The peak memory of a run in this process, without that of its evaluations.

    On a CPU whose kernel cannot lower the peak, that of evaluations counts.
    """

    device: torch.device
    _before: int = 0

    @property
    def bytes(self) -> int:
        """The peak so far."""
        return max(self._before, peak_memory_bytes(self.device))

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """A block whose memory does not count."""
        self._before = self.bytes
        try:
            yield
        finally:
            _lower_peak(self.device)


def _lower_peak(device: torch.device) -> None:
    """Reset the peak to the memory in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        _CLEARED_PEAK.write_text("5", encoding="ascii")


def peak_memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory so far, in bytes.

    On a GPU: the allocator's peak on `device`. On a CPU: the peak resident set of the process,
    which includes the interpreter and its libraries.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _peak_resident_bytes()


def _peak_resident_bytes() -> int:
    """Return VmHWM where the kernel reports it, else `ru_maxrss`.

    `ru_maxrss` survives exec: a process started by a large parent reports the parent's peak.
    """
    if _PROCESS_STATUS.exists():
        for line in _PROCESS_STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class RankParameters:
    """Parameter counts of the models on this rank; `experts` are a part of `student`.

    teacher: that are in memory at a time, where its weights are sharded.
    """

    student: int = 0
    experts: int = 0
    teacher: int = 0

    @classmethod
    def of(
        cls, student: Sequence[torch.nn.Module], teachers: Sequence[torch.nn.Module]
    ) -> RankParameters:
        """Count the parameters of the built models."""
        parameters = [parameter for chunk in student for parameter in chunk.parameters()]
        return cls(
            student=sum(parameter.numel() for parameter in parameters),
            # Megatron-Core marks parameters that differ between data-parallel ranks.
            experts=sum(p.numel() for p in parameters if not getattr(p, "allreduce", True)),
            teacher=sum(map(resident_numbers, teachers)),
        )


@dataclass(frozen=True)
class MemoryOfRank:
    """Bytes of one rank by formula; excludes the activations of the layers."""

    weights: int
    gradients: int
    optimizer: int
    teacher: int
    loss_chunk: int

    @classmethod
    def of_run(
        cls,
        counts: RankParameters,
        *,
        dtype: torch.dtype,
        logits: int,
        layout: Layout,
        world_size: int,
        is_distributed: bool,
    ) -> MemoryOfRank:
        """Weights in the run's precision, fp32 gradients, and Adam's moments in fp32.

        With bf16 the optimizer also has fp32 weights; if it `is_distributed`, its state is sharded
        over the data and context ranks. `logits`: of one model in a chunk.
        """
        width = dtype.itemsize
        state = _FP32 * (2 if width == _FP32 else 3)
        replicas = world_size // (layout.tensor * layout.pipeline)
        expert_ranks = layout.expert if layout.expert > 1 else layout.tensor
        expert_replicas = world_size // (layout.pipeline * expert_ranks)
        if not is_distributed:
            replicas = expert_replicas = 1
        dense = counts.student - counts.experts
        heads = 2 if counts.teacher else 1
        return cls(
            weights=counts.student * width,
            gradients=counts.student * _FP32,
            optimizer=state * (-(-dense // replicas) + -(-counts.experts // expert_replicas)),
            teacher=counts.teacher * width,
            loss_chunk=heads * width * logits,
        )

    @classmethod
    def of_capture(cls, counts: RankParameters, *, dtype: torch.dtype, logits: int) -> MemoryOfRank:
        """The frozen teacher and one chunk of its logits."""
        return cls(0, 0, 0, counts.teacher * dtype.itemsize, dtype.itemsize * logits)


def chunk_logits(
    chosen: int | None, tokens: int, model: Architecture, *, tensor: int, device: torch.device
) -> int:
    """Return the logits of one rank and one model in a chunk of the configured size, or else ours.

    tokens: of this rank in one micro-batch. tensor: ranks that share the vocabulary.
    """
    columns = model.padded_vocab_size(tensor) // tensor
    return columns * min(tokens, chosen or chunk_tokens_for(columns, device))

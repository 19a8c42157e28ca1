"""One shape and precision of `benchmarks/losses.py`, in separate processes."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.harness.quiet import touch_bytes
from megatron_distill.runtime.launch import PRECISIONS, Device, joined_world
from megatron_distill.runtime.torchrun import threads_per_process

if TYPE_CHECKING:
    from benchmarks.objectives.loss_subjects import Subject

_TIMEOUT_SECONDS = 600
# Overhead of the allocators on top of the tensors themselves.
_SPARE = 1.25
_LOOP_WARMUP = 2
# Subjects that are also timed in a plain loop.
_LOOPED = {
    ("forward_kl", "ours"),
    ("forward_kl", "ModelOpt"),
    ("forward_kl", "torch"),
    ("jsd", "ours"),
    ("jsd", "torch"),
    ("jsd", "TRL"),
    ("top-k", "ours, renormalized"),
    ("top-k", "ModelOpt"),
    ("adaptive_kl", "ours"),
    ("adaptive_kl", "torch"),
}
# Widths of the hidden states of the fused objectives.
_WIDTHS = {"cpu": (1024,), "cuda": (2048, 4096)}


def main() -> None:
    """Measure the case given by the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", required=True, type=int)
    parser.add_argument("--vocab", required=True, type=int)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--tensor", required=True, type=int)
    parser.add_argument("--repeats", required=True, type=int)
    parser.add_argument(
        "--inputs", choices=("logits", "hidden"), help="losses from these alone; default: both"
    )
    parser.add_argument("--result", required=True, type=Path)
    arguments = parser.parse_args()
    with joined_world(
        device="auto",
        backend="auto",
        threads=threads_per_process(arguments.tensor),
        timeout_seconds=_TIMEOUT_SECONDS,
    ) as device:
        rows: list[dict[str, Any]] = []
        for some in _parts(arguments, device):
            rows += some
            if dist.get_rank() == 0:  # what was measured is there if a later part fails
                arguments.result.write_text(json.dumps(rows), encoding="utf-8")


def _parts(arguments: argparse.Namespace, device: Device) -> Iterator[list[dict[str, Any]]]:
    """Measure part by part; yield the rows of each."""
    if arguments.inputs != "hidden":
        yield _from_logits(arguments, device.torch_device)
    if arguments.inputs != "logits" and arguments.tensor == 1:
        for width in _WIDTHS[device.kind]:
            yield _fused_linear(arguments, width, device.torch_device)


def _from_logits(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    # Imported late: these import Megatron-Core, which must be prepared first.
    from benchmarks.objectives.loss_subjects import subjects
    from megatron_distill.ops import VocabShard
    from megatron_distill.runtime.groups import Layout, create_groups

    groups = create_groups(Layout(tensor=arguments.tensor), timeout_minutes=_TIMEOUT_SECONDS // 60)
    width = arguments.vocab // arguments.tensor
    start = width * groups.tensor.rank()
    shard = VocabShard(arguments.vocab, start, start + width)
    group = groups.tensor if arguments.tensor > 1 else None
    losses = subjects(shard, group)
    # Half a million objects of the peers' packages, which each collection would walk through.
    gc.freeze()
    # Drawn on the device: a billion numbers take a host many seconds.
    generator = torch.Generator(device).manual_seed(3)
    shape = (arguments.tokens, arguments.vocab)
    student, teacher = (
        (torch.randn(shape, generator=generator, device=device) * 2)
        .to(PRECISIONS[arguments.precision])[:, start : start + width]
        .contiguous()
        for _ in range(2)
    )
    found, extra, missing = [], [], []
    for subject in losses:
        try:
            extra.append(_extra_bytes(subject, student, teacher))
            found.append(subject)
        except RuntimeError as error:  # the subjects after it may run, and need less memory
            missing.append(_missing(subject.family, subject.name, error, student.nbytes))
    seconds: dict[int, list[float]] = {number: [] for number in range(len(found))}
    values: dict[int, float] = {}
    # In turns, so that a slow minute affects all subjects.
    for _ in range(arguments.repeats):
        for number, subject in enumerate(found):
            spent, values[number] = _timed(subject, student, teacher, extra[number], device)
            seconds[number].append(spent)
    rows = [
        {
            **_row(subject.family, subject.name, seconds[number], student.nbytes),
            "value": values[number],
            "extra_bytes": extra[number],
        }
        for number, subject in enumerate(found)
    ]
    rows += _plain_loops(found, student, teacher, arguments.repeats, device)
    return [*rows, *missing, _copy(student, device)]


def _plain_loops(
    found: Sequence[Subject],
    student: torch.Tensor,
    teacher: torch.Tensor,
    repeats: int,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Time a user's loop over the mean and its backward: no memory is prepared, no turns."""
    rows = []
    for subject in found:
        if (subject.family, subject.name) not in _LOOPED:
            continue
        gc.collect()
        logits = student.clone().requires_grad_()

        def step(subject: Subject = subject, logits: torch.Tensor = logits) -> None:
            logits.grad = None
            (subject.loss(logits, teacher) / logits.shape[0]).backward()

        dist.barrier()
        seconds = [_seconds(step, device) for _ in range(_LOOP_WARMUP + 2 * repeats)]
        family = f"{subject.family}, plain loop"
        rows.append(_row(family, subject.name, seconds[_LOOP_WARMUP:], student.nbytes))
    return rows


def _row(family: str, subject: str, seconds: Sequence[float], logit_bytes: int) -> dict[str, Any]:
    """Return the figures of a subject on these logits, without its value and its memory."""
    return {
        "family": family,
        "subject": subject,
        "seconds": median(seconds),
        "best_seconds": min(seconds),
        "value": 0.0,
        "extra_bytes": 0,
        "logit_bytes": logit_bytes,
    }


def _missing(family: str, subject: str, error: RuntimeError, logit_bytes: int) -> dict[str, Any]:
    """Return the row of a subject that cannot be measured, with the reason."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, torch.OutOfMemoryError):
        reason = "out of memory"
    return _row(family, f"{subject}, {reason}", [inf], logit_bytes)


def _copy(student: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """Copy the bytes that forward KL over bf16 logits must read and write: ten per logit."""
    source = torch.ones(5 * student.numel(), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [_seconds(lambda: target.copy_(source), device) for _ in range(6)]
    return _row("forward_kl", "copy of 10 bytes per logit", seconds[1:], student.nbytes)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Time of one run, including the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _settle(name: str, extra_bytes: int, device: torch.device) -> None:
    """Make the memory of this subject quick to allocate, independent of the subject before."""
    gc.collect()
    if device.type == "cpu":
        # Ours requests large pages where it needs much (`ops.blocks.allocate`).
        touch_bytes(int(_SPARE * extra_bytes), large_pages=name.startswith("ours"))


def _timed(
    subject: Subject,
    student: torch.Tensor,
    teacher: torch.Tensor,
    extra_bytes: int,
    device: torch.device,
) -> tuple[float, float]:
    # As from a head: not a leaf, and without further references.
    logits = student.clone().requires_grad_() + 0
    _settle(subject.name, extra_bytes, device)
    dist.barrier()
    losses: list[torch.Tensor] = []

    def run() -> None:
        losses.append(subject.loss(logits, teacher))
        torch.autograd.grad(losses[0], logits)

    return _seconds(run, device), float(losses[0].detach())


def _extra_bytes(subject: Subject, student: torch.Tensor, teacher: torch.Tensor) -> int:
    """The peak bytes above both logits, the gradient included; from the first run of each."""
    from benchmarks.harness.peak import LiveStorages

    logits = student.clone().requires_grad_() + 0
    gc.collect()
    with LiveStorages() as live:
        torch.autograd.grad(subject.loss(logits, teacher), logits)
    return live.peak


def _fused_linear(
    arguments: argparse.Namespace, width: int, device: torch.device
) -> list[dict[str, Any]]:
    """The fused objectives beside their bare products."""
    from benchmarks.harness.peak import LiveStorages
    from benchmarks.objectives.fused_subjects import fused_subjects

    runs = fused_subjects(arguments, width, device)
    logit_bytes = arguments.tokens * arguments.vocab * PRECISIONS[arguments.precision].itemsize
    extra, missing = {}, []
    for key, run in runs.items():
        gc.collect()
        try:
            with LiveStorages() as live:
                run()
        except RuntimeError as error:  # as from logits
            missing.append(_missing(*key, error, logit_bytes))
        else:
            extra[key] = live.peak
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in extra}
    for _ in range(arguments.repeats):
        for key in extra:
            _settle(key[1], extra[key], device)
            seconds[key].append(_seconds(runs[key], device))
    rows = [
        {**_row(*key, seconds[key], logit_bytes), "extra_bytes": extra_bytes}
        for key, extra_bytes in extra.items()
    ]
    return rows + missing


if __name__ == "__main__":
    main()

"""The row kernels of some divergences beside a copy; started by benchmarks/gpu.py."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_distill.losses import token_divergence
from megatron_distill.ops import VocabShard
from megatron_distill.runtime.launch import PRECISIONS
from megatron_distill.signals import DenseLogits

_DIVERGENCES = ("forward_kl", "reverse_kl", "js_divergence")
KERNELS = ("measure_rows", "sum_slopes", "push_rows")
_SPREAD = 2.0
# Added to every seventh logit: a KL below 1e-4 nats.
_NEAR = 0.03
_COPIES = 5


def main() -> None:
    """Measure the shape given by the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", required=True, type=int)
    parser.add_argument("--vocab", required=True, type=int)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--repeats", required=True, type=int)
    parser.add_argument("--result", required=True, type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(3)
    student, teacher = (
        (torch.randn(arguments.tokens, arguments.vocab, generator=generator, device=device))
        .mul_(_SPREAD)
        .to(PRECISIONS[arguments.precision])
        for _ in range(2)
    )
    near = teacher.clone()
    near[:, ::7] += _NEAR
    found: dict[str, dict[str, float]] = {"copy": {"all": _copy_seconds(student)}}
    for case, logits in (("", student), (", near its teacher", near)):
        for name in _DIVERGENCES:
            loss = _loss(name, logits, teacher)
            found[name + case] = _kernel_seconds(loss, arguments.repeats)
    arguments.result.write_text(json.dumps(found), encoding="utf-8")


def _loss(name: str, student: Tensor, teacher: Tensor) -> Callable[[], object]:
    vocab = student.shape[1]

    def run() -> object:
        logits = student.detach().requires_grad_()
        values = token_divergence(
            logits, DenseLogits(teacher), divergence=name, shard=VocabShard(vocab, 0, vocab)
        )
        return torch.autograd.grad(values.sum(), logits)

    return run


def _kernel_seconds(run: Callable[[], object], repeats: int) -> dict[str, float]:
    """Return the device's seconds in each kernel, a mean; without a device those of the call."""
    run()
    if not torch.cuda.is_available():
        started = time.perf_counter()
        run()
        return {"all": time.perf_counter() - started}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    seconds = {
        event.key: event.self_device_time_total * 1e-6 / event.count
        for event in profiled.key_averages()
        if event.key in KERNELS
    }
    return {**seconds, "all": sum(seconds.values())}


def _copy_seconds(logits: Tensor) -> float:
    """Return the time to move ten bytes per logit, read and written."""
    source = torch.ones(5 * logits.numel(), dtype=torch.uint8, device=logits.device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(1 + _COPIES):
        if logits.is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        if logits.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])


if __name__ == "__main__":
    main()

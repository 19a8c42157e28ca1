"""One shape and precision of `benchmarks/losses.py`, in processes of its own."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_distill.runtime.device import PRECISIONS
from megatron_distill.runtime.torchrun import threads_per_process
from megatron_distill.runtime.world import joined_world

if TYPE_CHECKING:
    from benchmarks.loss_subjects import Subject

_TIMEOUT_SECONDS = 600
_HIDDEN = 1024


def main() -> None:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", required=True, type=int)
    parser.add_argument("--vocab", required=True, type=int)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--tensor", required=True, type=int)
    parser.add_argument("--repeats", required=True, type=int)
    parser.add_argument("--result", required=True, type=Path)
    arguments = parser.parse_args()
    with joined_world(
        device="auto",
        backend="auto",
        threads=threads_per_process(arguments.tensor),
        timeout_seconds=_TIMEOUT_SECONDS,
    ) as device:
        rows = _measure(arguments, device.torch_device)
        if dist.get_rank() == 0:
            arguments.result.write_text(json.dumps(rows), encoding="utf-8")


def _measure(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    # Only now: these import Megatron-Core, which had to be prepared first.
    from benchmarks.loss_subjects import subjects
    from megatron_distill.ops import VocabShard
    from megatron_distill.runtime.groups import Layout, create_groups

    groups = create_groups(Layout(tensor=arguments.tensor), timeout_minutes=_TIMEOUT_SECONDS // 60)
    width = arguments.vocab // arguments.tensor
    start = width * groups.tensor.rank()
    shard = VocabShard(arguments.vocab, start, start + width)
    group = groups.tensor if arguments.tensor > 1 else None
    generator = torch.Generator().manual_seed(3)
    student, teacher = (
        (torch.randn(arguments.tokens, arguments.vocab, generator=generator) * 2)
        .to(PRECISIONS[arguments.precision])[:, start : start + width]
        .contiguous()
        .to(device)
        for _ in range(2)
    )
    found = subjects(shard, group)
    seconds: dict[int, list[float]] = {number: [] for number in range(len(found))}
    values: dict[int, float] = {}
    # In turns, so that a slow minute is everybody's.
    for repeat in range(arguments.repeats + 1):
        for number, subject in enumerate(found):
            spent, values[number] = _timed(subject, student, teacher, device)
            if repeat > 0:
                seconds[number].append(spent)
    rows = [
        {
            "family": subject.family,
            "subject": subject.name,
            "seconds": median(seconds[number]),
            "value": values[number],
            "extra_bytes": _extra_bytes(subject, student, teacher),
            "logit_bytes": student.numel() * student.element_size(),
        }
        for number, subject in enumerate(found)
    ]
    if arguments.tensor == 1:
        rows += _fused_linear(arguments, device)
    return rows


def _timed(
    subject: Subject, student: torch.Tensor, teacher: torch.Tensor, device: torch.device
) -> tuple[float, float]:
    # As a head leaves them: no leaf, and nobody else's.
    logits = student.clone().requires_grad_() + 0
    gc.collect()
    dist.barrier()
    started = time.perf_counter()
    loss = subject.loss(logits, teacher)
    (gradient,) = torch.autograd.grad(loss, logits)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    spent = time.perf_counter() - started
    del gradient
    return spent, float(loss.detach())


def _extra_bytes(subject: Subject, student: torch.Tensor, teacher: torch.Tensor) -> int:
    """The most bytes alive above both logits, the gradient included."""
    from benchmarks.peak import LiveStorages

    logits = student.clone().requires_grad_() + 0
    gc.collect()
    with LiveStorages() as live:
        torch.autograd.grad(subject.loss(logits, teacher), logits)
    return live.peak


def _fused_linear(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """The fused objective beside its bare products."""
    from benchmarks.peak import LiveStorages

    runs = _fused_runs(arguments, device)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.repeats + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name].append(time.perf_counter() - started)
    rows = []
    for name, run in runs.items():
        with LiveStorages() as live:
            run()
        rows.append(
            {
                "family": "fused linear",
                "subject": name,
                "seconds": median(seconds[name][1:]),
                "value": 0.0,
                "extra_bytes": live.peak,
                "logit_bytes": arguments.tokens
                * arguments.vocab
                * PRECISIONS[arguments.precision].itemsize,
            }
        )
    return rows


def _fused_runs(
    arguments: argparse.Namespace, device: torch.device
) -> dict[str, Callable[[], None]]:
    from megatron_distill.losses import Term, fused_linear_objective
    from megatron_distill.signals import HiddenState

    dtype = PRECISIONS[arguments.precision]
    generator = torch.Generator().manual_seed(4)
    tokens, vocab = arguments.tokens, arguments.vocab

    def normal(rows: int) -> torch.Tensor:
        drawn = torch.randn(rows, _HIDDEN, generator=generator)
        return (drawn / _HIDDEN**0.25).to(device=device, dtype=dtype)

    hidden, weight = normal(tokens), normal(vocab)
    signal = HiddenState(normal(tokens), normal(vocab))
    labels = torch.randint(vocab, (tokens,), generator=generator).to(device)
    weights = torch.full((tokens,), 1 / tokens, device=device)
    gradient = torch.empty(tokens, vocab, device=device, dtype=dtype).normal_()

    def products() -> None:
        torch.mm(hidden, weight.t())
        torch.mm(signal.hidden, signal.weight.t())
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), hidden)

    def fused() -> None:
        leaf, head = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        counts = {"ce_weights": weights, "kd_weights": weights}
        total, _ = fused_linear_objective(
            leaf, head, signal, labels, **counts, terms=[Term()], chunk_tokens=1024
        )
        torch.autograd.grad(total, (leaf, head))

    def eager() -> None:
        leaf, head = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        student, teacher = leaf @ head.t(), signal.hidden @ signal.weight.t()
        log_q, log_p = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
        kl = torch.nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True)
        ce = torch.nn.functional.nll_loss(log_q, labels, reduction="sum")
        torch.autograd.grad((kl + ce) / tokens, (leaf, head))

    return {"ours": fused, "bare products": products, "torch": eager}


if __name__ == "__main__":
    main()

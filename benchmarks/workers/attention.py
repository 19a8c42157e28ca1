"""One measurement of `benchmarks/attention.py`, in processes of its own."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.harness.peak import LiveStorages
from megatron_distill.models.attention_kernels.choice import Attend, kernel_for
from megatron_distill.models.attention_kernels.rule import AttentionRule
from megatron_distill.runtime.launch import PRECISIONS, joined_world
from megatron_distill.runtime.segments import Segments

if TYPE_CHECKING:
    from megatron_distill.runtime.batch import Batch, StepBatches

HEADS, GROUPS, HEAD_SIZE = 8, 2, 64
SHORTEST, LONGEST = 512, 4096
DEVICE_ROUNDS = 10
ROUNDS = 2
# From here on one round is timed.
MANY_POSITIONS = 16_384
VOCABULARY = 1000
_TIMEOUT_SECONDS = 1800


def main() -> None:
    """Measure the case given by the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", required=True)
    parser.add_argument("--cases", type=json.loads, help="length, documents, subject: layers alone")
    parser.add_argument("--length", type=int)
    parser.add_argument("--documents", default="whole")
    parser.add_argument("--window", type=int)
    parser.add_argument("--subject")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--device", default="cpu", help="of one layer's attention: cpu or auto")
    parser.add_argument("--precision", default="fp32", help="of one layer's attention")
    parser.add_argument("--result", required=True, type=Path)
    arguments = parser.parse_args()
    if arguments.cases is not None:
        _attention_of_each(arguments)
        return
    parts = {"attention": _attention, "step": _step, "communication": _communication}
    if arguments.part == "attention":
        found, is_first = _attention(arguments), True
    else:
        with joined_world(
            device="cpu",
            backend="auto",
            threads=1,
            timeout_seconds=_TIMEOUT_SECONDS,
        ):
            found, is_first = parts[arguments.part](arguments), dist.get_rank() == 0
    if is_first:
        arguments.result.write_text(json.dumps(found), encoding="utf-8")


def bounds_of(length: int, documents: str, *, seed: int = 1) -> tuple[int, ...]:
    """Return a sample's cumulative lengths: one document, eight equal ones, or random ones."""
    if documents == "whole":
        return (0, length)
    if documents == "eight":
        return tuple(range(0, length + 1, length // 8))
    ends = [0]
    generator = torch.Generator().manual_seed(seed)
    while ends[-1] < length:
        drawn = torch.randint(SHORTEST, LONGEST + 1, (), generator=generator)
        ends.append(min(length, ends[-1] + int(drawn)))
    return tuple(ends)


def masked(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: AttentionRule
) -> Tensor:
    """Attend as before: one bool mask of all pairs, made once per micro-batch."""

    def make() -> Tensor:
        ranges = segments.key_ranges(rule.window)
        keys_S = torch.arange(segments.keys, device=query.device)
        last_s1 = ranges.last_s.to(query.device)[:, None]
        first_bs1 = ranges.first_bs.to(query.device)[:, :, None]
        return ((keys_S <= last_s1) & (keys_S >= first_bs1)).unsqueeze(1)

    query_bnsd, key_bgSd, value_bgSd = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    attended = functional.scaled_dot_product_attention(
        query_bnsd,
        key_bgSd,
        value_bgSd,
        attn_mask=segments.derived(("mask", rule.window), make),
        scale=rule.scale,
        enable_gqa=key.shape[2] != query.shape[2],
    )
    return attended.permute(2, 0, 1, 3)


def _timed(round_: Callable[[], object], *, length: int, device: str = "cpu") -> tuple[float, int]:
    """Return the shortest time of some rounds, and the peak of one before them.

    On a CPU it is the process's CPU time, on a GPU that by the clock until the device is done.
    """
    if device == "cuda":
        round_()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        seconds = [_device_seconds(round_) for _ in range(DEVICE_ROUNDS)]
        return min(seconds), torch.cuda.max_memory_allocated() - before
    with LiveStorages() as live:
        seconds = [_cpu_seconds(round_)]
    if length < MANY_POSITIONS:
        seconds = [_cpu_seconds(round_) for _ in range(ROUNDS)]
    return min(seconds), live.peak


def _cpu_seconds(round_: Callable[[], object]) -> float:
    started = time.process_time()
    round_()
    return time.process_time() - started


def _device_seconds(round_: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    round_()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _attention_of_each(arguments: argparse.Namespace) -> None:
    """Measure layers alone in one process; what has ended is written if a later one fails."""
    found: dict[str, dict[str, Any]] = {}
    for length, documents, subject in arguments.cases:
        own = {"length": length, "documents": documents, "subject": subject}
        case = argparse.Namespace(**{**vars(arguments), **own})
        try:
            found[f"{length:,} {documents}, {subject}"] = own | {"figures": _attention(case)}
        except torch.OutOfMemoryError:
            found[f"{length:,} {documents}, {subject}"] = own | {"figures": None}
        arguments.result.write_text(json.dumps(found), encoding="utf-8")


def _attention(arguments: argparse.Namespace) -> dict[str, Any]:
    length = arguments.length
    on_cuda = arguments.device != "cpu" and torch.cuda.is_available()
    device = "cuda" if on_cuda else "cpu"
    segments = Segments((bounds_of(length, arguments.documents),))
    rule = AttentionRule(HEAD_SIZE**-0.5, window=arguments.window)
    generator = torch.Generator().manual_seed(2)
    shapes = [(length, 1, heads, HEAD_SIZE) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    query, key, value, gradient = (
        torch.randn(*shape, generator=generator).to(device, PRECISIONS[arguments.precision])
        for shape in shapes
    )
    leaves = [leaf.requires_grad_() for leaf in (query, key, value)]
    attend = masked
    if arguments.subject == "ours":
        attend = kernel_for(query, rule).attend

    def round_() -> None:
        # New documents, as a micro-batch brings them: the mask or the tiles are made again.
        fresh = replace(segments).to(device)
        torch.autograd.grad(attend(query, key, value, fresh, rule), leaves, gradient)

    seconds, peak = _timed(round_, length=length, device=device)
    difference = 0.0
    if arguments.subject == "ours":
        difference = _difference(attend, [leaf.detach()[:2048] for leaf in leaves], rule)
    return {
        "documents": len(segments.bounds[0]) - 1,
        "tokens_per_second": length / seconds,
        "peak": peak,
        "difference": difference,
    }


def _difference(attend: Attend, first: list[Tensor], rule: AttentionRule) -> float:
    """Return the largest difference between both paths on the first positions."""
    query, key, value = first
    segments = Segments((bounds_of(len(query), "packed"),)).to(query.device)
    ours, peer = (one(query, key, value, segments, rule) for one in (attend, masked))
    return float((ours - peer).abs().max())


def _step(arguments: argparse.Namespace) -> dict[str, Any]:
    # Imported late: these import Megatron-Core, which must be prepared first.
    from benchmarks.steps.cases import Body, Ranks, Workload
    from benchmarks.steps.cases import Case as StepCase
    from benchmarks.steps.own_step import build_own_step
    from megatron_distill.models import attention
    from megatron_distill.models.attention_kernels.choice import AttentionKernel
    from megatron_distill.runtime.groups import Layout, create_groups, seed_everything

    length, world = arguments.length, dist.get_world_size()
    workload = Workload(
        "tiny",
        Body(4, 64, 160, 4, 2),
        Body(4, 96, 256, 4, 2),
        VOCABULARY,
        length,
        micro_batch_size=1,
        micro_batches=arguments.tokens // length,
    )
    case = StepCase(workload, Ranks("attention", world, context=world), "fp32")
    groups = create_groups(Layout(context=world), timeout_minutes=30)
    seed_everything(1, groups)
    subject = build_own_step(case, groups=groups, device=torch.device("cpu"))
    batches = _batches(case.workload.micro_batches, arguments, groups.context.rank(), world)
    losses = []

    def round_() -> None:
        figures = subject.step(_fresh(batches))
        losses.append(figures.ce + figures.kd)

    kernel = AttentionKernel("masked", lambda *_: True, masked)
    if arguments.subject == "masked":
        patch.object(attention, "kernel_for", lambda *_: kernel).start()
    seconds, peak = _timed(round_, length=length)
    return {
        "documents": len(batches.micro_batches[0].segments.bounds[0]) - 1,
        "tokens_per_second": arguments.tokens / seconds,
        "peak": peak,
        "loss": losses[0],
    }


def _batches(count: int, arguments: argparse.Namespace, rank: int, size: int) -> StepBatches:
    from megatron_distill.runtime.batch import StepBatches

    generator = torch.Generator().manual_seed(3)
    batches = []
    for number in range(count):
        tokens_bS1 = torch.randint(VOCABULARY, (1, arguments.length + 1), generator=generator)
        bounds = bounds_of(arguments.length, arguments.documents, seed=number)
        batch = batch_of(tokens_bS1, bounds).context_shard(rank, size)
        batches.append(batch.with_trained_rows().to("cpu"))
    positions = count * arguments.length
    return StepBatches(
        tuple(batches), ce_tokens=positions, kd_tokens=positions, positions=positions
    )


def batch_of(tokens_bS1: Tensor, bounds: tuple[int, ...]) -> Batch:
    """Return one sample with documents of these cumulative lengths, all of it trained."""
    from megatron_distill.data.collation import document_positions
    from megatron_distill.runtime.batch import Batch

    length = tokens_bS1.shape[1] - 1
    lengths = torch.tensor(bounds).diff()
    documents_bS = torch.arange(len(lengths)).repeat_interleave(lengths)[None]
    everywhere = torch.ones(1, length, dtype=torch.bool)
    return Batch(
        tokens_bs=tokens_bS1[:, :-1].contiguous(),
        labels_bs=tokens_bS1[:, 1:].contiguous(),
        ce_mask_bs=everywhere,
        kd_mask_bs=everywhere,
        position_ids_bs=document_positions(documents_bS),
        document_ids_bS=documents_bS,
        sequence_index_s=torch.arange(length),
        sample_ids_b=torch.zeros(1, dtype=torch.int64),
        isolate_documents=True,
    )


def _fresh(batches: StepBatches) -> StepBatches:
    """Return the same batches without what kernels derived from their documents."""
    renewed = [replace(b, documents=replace(b.segments)) for b in batches.micro_batches]
    return replace(batches, micro_batches=tuple(renewed))


def _communication(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time the ways to bring keys and values of one layer to every context rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.randn(arguments.length // size, 1, 2 * GROUPS, HEAD_SIZE)

    def gathered() -> None:
        parts = mine.new_empty(size * mine.shape[0], *mine.shape[1:])
        dist.all_gather_into_tensor(parts, mine)

    def around_the_ring() -> None:
        held = mine
        for _ in range(size - 1):
            received = torch.empty_like(held)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, held, (rank + 1) % size),
                    dist.P2POp(dist.irecv, received, (rank - 1) % size),
                ]
            )
            for work in works:
                work.wait()
            held = received

    found = {}
    for way, move in (("all-gather", gathered), ("ring", around_the_ring)):
        move()
        seconds = []
        for _ in range(20):
            dist.barrier()
            started = time.perf_counter()
            move()
            seconds.append(time.perf_counter() - started)
        found[way] = statistics.median(seconds)
    return found


if __name__ == "__main__":
    main()

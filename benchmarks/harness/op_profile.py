"""Time of a step by torch operator, self time, and its sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

# The range in which both subjects compute their losses from logits (ours: from hidden states).
LOSS_RANGE = "loss"
_OPTIMIZER_RANGE = "Optimizer.step"
_BACKWARD_NODE = "autograd::engine::evaluate_function"
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_ATTENTION = ("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention")
_COMMUNICATION = ("c10d::", "gloo:", "nccl:")
_ROWS = 30


def write_profile(step: Callable[[], object], path: Path, device: torch.device) -> None:
    """Run one step on every rank under torch's profiler; rank 0 writes a Markdown table."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step()
    if dist.get_rank() == 0:
        assert profile.profiler is not None
        events = profile.profiler.function_events
        path.write_text(markdown(events, on_cuda=device.type == "cuda"), encoding="utf-8")


def markdown(events: Sequence[FunctionEvent], *, on_cuda: bool) -> str:
    """Return the tables of a step's events."""
    # A kernel is an event too, and its time also that of the operator that started it.
    events = [event for event in events if event.device_type == DeviceType.CPU]
    loss_nodes = {event.sequence_nr for event in events if _forward_in_loss(event)}
    by_heading: dict[str, float] = defaultdict(float)
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in events:
        own = _own_time(event, on_cuda=on_cuda)
        by_heading[_heading(event, loss_nodes)] += own
        by_name[event.name].append(own)
    total = sum(by_heading.values())
    lines = ["| part of the step | ms | share of operator time |", "|---|---|---|"]
    for heading, own in sorted(by_heading.items(), key=lambda item: -item[1]):
        lines.append(f"| {heading} | {own / 1e3:.0f} | {own / total:.1%} |")
    lines += ["", "| operator | calls | own ms | share |", "|---|---|---|---|"]
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:_ROWS]:
        own = sum(times)
        lines.append(f"| {name} | {len(times)} | {own / 1e3:.1f} | {own / total:.1%} |")
    return "\n".join(lines) + "\n"


def _own_time(event: FunctionEvent, *, on_cuda: bool) -> float:
    """Return the microseconds of an event without those within it, of the device on CUDA."""
    if not on_cuda:
        return float(event.self_cpu_time_total)
    # To a range torch counts the span of all kernels inside, which are those of operators.
    return 0.0 if event.is_user_annotation else float(event.self_device_time_total)


def _forward_in_loss(event: FunctionEvent) -> bool:
    names = [ancestor.name for ancestor in _ancestors(event)]
    recorded = event.sequence_nr >= 0 and not any(name.startswith(_BACKWARD_NODE) for name in names)
    return recorded and LOSS_RANGE in names[1:]


def _heading(event: FunctionEvent, loss_nodes: set[int]) -> str:
    if event.name.startswith(_PRODUCTS):
        return "matrix products, heads included"
    if event.name.startswith(_ATTENTION):
        return "attention"
    if event.name.startswith(_COMMUNICATION):
        return "communication"
    for ancestor in _ancestors(event):
        backward = ancestor.name.startswith(_BACKWARD_NODE)
        if ancestor.name == LOSS_RANGE or (backward and ancestor.sequence_nr in loss_nodes):
            return "losses and their gradients, without products"
        if ancestor.name.startswith(_OPTIMIZER_RANGE):
            return "optimizer update"
    return "everything else"


def _ancestors(event: FunctionEvent) -> Iterator[FunctionEvent]:
    """Yield the event and its enclosing events, innermost first."""
    current: FunctionEvent | None = event
    while current is not None:
        yield current
        current = current.cpu_parent

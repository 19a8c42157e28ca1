"""Popular layouts that a ranking does not show, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from megatron_distill.errors import counted
from megatron_distill.planning.device import DeviceProfile
from megatron_distill.planning.memory import USABLE, MemoryNeed, memory_need
from megatron_distill.planning.parameters import stage_numbers
from megatron_distill.planning.run import Choice, PlannedRun
from megatron_distill.runtime.layout import Layout

__all__ = ["LONG", "POPULAR", "Missing", "Reasons", "Sizes", "sizes_of", "way_out"]

# Context ranks leave the node only for sequences of more positions than this.
LONG: Final = 32_768
# Devices up to which a plan without a layout looks for one.
_MOST_DEVICES: Final = 4096
# Tensor, pipeline, context and expert ranks of a student.
Sizes = tuple[int, int, int, int]
# Layouts that people try first, and those of experts besides.
POPULAR: Final[tuple[Sizes, ...]] = (
    (1, 1, 1, 1), (2, 1, 1, 1), (4, 1, 1, 1), (8, 1, 1, 1), (1, 2, 1, 1), (2, 2, 1, 1),
    (4, 2, 1, 1), (8, 2, 1, 1), (4, 4, 1, 1), (8, 4, 1, 1), (8, 8, 1, 1), (1, 1, 2, 1),
    (8, 1, 2, 1),
)  # fmt: skip
_POPULAR_OF_EXPERTS: Final[tuple[Sizes, ...]] = (
    (1, 1, 1, 2), (1, 1, 1, 4), (1, 1, 1, 8), (2, 1, 1, 8), (1, 4, 1, 8),
)  # fmt: skip


@dataclass(frozen=True)
class Missing:
    """A popular layout that is not among the shown ones, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Reasons:
    """What a search met of layouts: the least memory that was too much, and rules against them."""

    _least: dict[Sizes, MemoryNeed] = field(default_factory=dict)
    _refused: dict[Sizes, str] = field(default_factory=dict)
    _choices: dict[Sizes, Choice] = field(default_factory=dict)

    def names(self, run: PlannedRun, layout: Layout) -> bool:
        """Whether the layout is a popular one, for which a reason may be given."""
        return sizes_of(layout) in _popular(run)

    @property
    def closest(self) -> tuple[Choice, MemoryNeed] | None:
        """The choice with the least need of memory that was too much, among popular layouts."""
        if not self._least:
            return None
        key = min(self._least, key=lambda sizes: self._least[sizes].total)
        return self._choices[key], self._least[key]

    def note_memory(self, choice: Choice, need: MemoryNeed) -> None:
        """Keep the least need of memory of those with these sizes, which was too much."""
        key = sizes_of(choice.layout)
        least = self._least.get(key)
        if least is None or need.total < least.total:
            self._least[key], self._choices[key] = need, choice

    def note_rule(self, layout: Layout, problem: str) -> None:
        """Keep the first reason why the rules of the configuration refuse these sizes."""
        self._refused.setdefault(sizes_of(layout), problem)

    def missing(
        self,
        run: PlannedRun,
        device: DeviceProfile,
        devices: int,
        found: Sequence[tuple[Layout, float]],
        *,
        shown: int,
    ) -> Iterator[Missing]:
        """Give the reason for each popular layout that is not among the first `shown`.

        found: layouts that fit, with the seconds of their steps, fastest first.
        """
        there = {sizes_of(layout) for layout, _ in found[:shown]}
        for sizes in _popular(run):
            if sizes in there:
                continue
            same = [seconds for layout, seconds in found if sizes_of(layout) == sizes]
            if any(devices % (sizes[0] * sizes[1] * size) for size in sizes[2:]):
                reason = f"does not divide {counted(devices, 'device')}"
            elif same:
                reason = _slower(same[0] / found[0][1] - 1)
            elif sizes in self._least:
                reason = _too_large(self._least[sizes], device)
            else:
                reason = self._refused.get(sizes) or _outside(sizes, run, device)
            yield Missing(_name(sizes), reason)


def way_out(
    run: PlannedRun,
    device: DeviceProfile,
    reasons: Reasons,
    fits: Callable[[int], bool],
    devices: int,
) -> str:
    """Return what makes a run fit of which no layout does; `fits`: on so many devices."""
    more = "" if device.kind == "cpu" else _fewest_devices(fits, devices)  # a CPU is one machine
    return f"{more} {_lower_needs(run, device, reasons.closest)}".strip()


def _fewest_devices(fits: Callable[[int], bool], devices: int) -> str:
    """Return the sentence on the least power of two of devices, beyond these, that fits."""
    sizes = [2**power for power in range(_MOST_DEVICES.bit_length()) if 2**power > devices]
    found = next((size for size in sizes if fits(size)), None)
    if found is not None:
        return f"{counted(found, 'device')} are the first power of two on which a layout fits."
    if not sizes:
        return ""
    return f"No layout fits on any power of two of devices up to {_MOST_DEVICES:,} either."


def _lower_needs(
    run: PlannedRun, device: DeviceProfile, closest: tuple[Choice, MemoryNeed] | None
) -> str:
    """Return the sentence on the keys that lower the need of the layout that is closest to fit.

    Smaller micro-batches and recomputation were tried.
    """
    if closest is None:
        return ""
    choice, need = closest
    changes: dict[str, PlannedRun] = {}
    if not run.is_distributed:
        changes["optimizer.distributed=true"] = replace(run, is_distributed=True)
    if run.precision == "fp32":
        changes["train.precision=bf16"] = replace(run, precision="bf16")
    if choice.teacher_layout is not None and not run.several:
        changes["teacher.shard_weights=true"] = replace(run, shards_teacher=True)
        if not run.shards_teacher:
            changes["teacher.offload=true"] = replace(run, rests=True)
        changes["teacher.offload_hidden=true"] = replace(run, offloads_hidden=True)
    found = []
    for key, other in changes.items():
        numbers = stage_numbers(other.student, choice.layout, choice.layers, width=other.width)
        total = memory_need(other, choice, device, numbers).total
        if total < 0.99 * need.total:
            found.append((total, key))
    if not found:
        return (
            f"The least need of a layout here, {need.total / 2**30:.1f} GiB, is with full "
            "recomputation and the smallest micro-batch, and no key of teacher or optimizer lowers "
            "it."
        )
    keys = ", ".join(f"{key} to {total / 2**30:.1f} GiB" for total, key in sorted(found))
    return f"Keys that lower the least need of a layout here, {need.total / 2**30:.1f} GiB: {keys}."


def _popular(run: PlannedRun) -> tuple[Sizes, ...]:
    return POPULAR + (_POPULAR_OF_EXPERTS if run.student.moe is not None else ())


def _slower(share: float) -> str:
    """Return by how much a step is longer than the fastest; equal ones are only not shown."""
    if share < 0.01:
        return "slower: less than 1% above the best"
    return f"slower: {share:.0%} above the best"


def _outside(sizes: Sizes, run: PlannedRun, device: DeviceProfile) -> str:
    """Return why a search does not try these sizes."""
    tensor, pipeline, context, expert = sizes
    moe, node = run.student.moe, device.node.devices
    if tensor > node:
        return f"tensor-parallel ranks on several nodes of {node}"
    if pipeline > run.student.num_layers:
        return f"more stages than the student's {run.student.num_layers} layers"
    if moe is not None and moe.num_experts % expert:
        return f"does not divide the student's {counted(moe.num_experts, 'expert')}"
    if context > 1 and run.sequence_length % (2 * context):
        return f"sequences of {run.sequence_length} do not divide by {2 * context}"
    if context > 1 and tensor * context > node:
        return f"context ranks leave a node only for more than {LONG:,} positions"
    size = run.global_batch_size
    return f"its replicas do not divide the global batch of {size} sequences"


def _too_large(need: MemoryNeed, device: DeviceProfile) -> str:
    parts = sorted(need.parts.items(), key=lambda item: -item[1])[:2]
    named = ", ".join(f"{name.replace('_', ' ')} {count / 2**30:.1f}" for name, count in parts)
    return (
        f"needs {need.total / 2**30:.1f} GiB of {USABLE * device.memory_gib:.1f} usable, "
        f"even with full recomputation and the smallest micro-batch ({named})"
    )


def sizes_of(layout: Layout) -> Sizes:
    """Return the tensor, pipeline, context and expert ranks of a layout."""
    return layout.tensor, layout.pipeline, layout.context, layout.expert


def _name(sizes: Sizes) -> str:
    """Return sizes in the usual abbreviations, without the context and expert ranks of one."""
    tensor, pipeline, context, expert = sizes
    parts = [f"TP{tensor}", f"PP{pipeline}"]
    parts += [f"CP{context}"] if context > 1 else []
    parts += [f"EP{expert}"] if expert > 1 else []
    return " ".join(parts)

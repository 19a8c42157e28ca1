"""Whether a job fits devices of a known memory, from descriptions of its models alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from megatron_distill.config import CaptureConfig, JobConfig, RunConfig, teacher_ranks
from megatron_distill.errors import ConfigError, counted
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.pipeline_stages import even_layers
from megatron_distill.planning.device import DeviceProfile, load_device
from megatron_distill.planning.memory import USABLE, MemoryNeed, teacher_rank_need
from megatron_distill.planning.missing import sizes_of
from megatron_distill.planning.report import changed_settings, choice_name, need_in_words
from megatron_distill.planning.run import Choice, PlannedRun
from megatron_distill.planning.search import Planned, Search, layout_name, planned
from megatron_distill.planning.tries.choices import Choices
from megatron_distill.runtime.layout import Layout
from megatron_distill.train.assemble.shapes import layout_of
from megatron_distill.train.reports.engine_rates import check_fp8_rate
from megatron_distill.train.reports.planned_run import (
    all_unplanned,
    assumed_roles,
    configured_choice,
    open_shapes,
    planned_run,
    shape_rule,
)

__all__ = [
    "RankMemory",
    "capture_memory_warning",
    "job_memory_warning",
    "memory_warning",
    "nearest",
    "refuse_beyond_device",
]

_WAYS = 3
# Planned over measured peaks of the recorded steps are at most this, as their tests ask.
_CERTAIN = 1.10
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@dataclass(frozen=True)
class RankMemory:
    """The memory of a rank's device, in a profile of `planning.device`.

    is_limit: a rank beyond it ends, as on a GPU or under a limit of the job. local: ranks of its
    node.
    """

    device: DeviceProfile
    is_limit: bool
    local: int = 1


def refuse_beyond_device(config: JobConfig, name: str, *, nodes: int, local: int) -> None:
    """Raise ConfigError where a job needs more memory than the devices of its nodes have.

    name: of a device, as for `plan`. local: ranks of each node. Reads descriptions of the models
    alone. Raises ConfigError, too, where nothing is known, or the device has no rate of FP8.
    """
    machine = load_device(name)
    check_fp8_rate(config, machine)
    device = machine.shared_by(local, threads=config.runtime.threads)
    memory = RankMemory(device, is_limit=True, local=local)
    warning = job_memory_warning(config, memory, nodes=nodes)
    if warning is not None:
        raise ConfigError(warning)


def job_memory_warning(config: JobConfig, memory: RankMemory, *, nodes: int) -> str | None:
    """Return the warning of the ranks of a job on nodes of such memory; raises as they do."""
    ranks = nodes * memory.local
    if isinstance(config, RunConfig):
        teachers = sum(count for _, count in teacher_ranks(config, ranks_per_node=memory.local))
        return memory_warning(config, memory, ranks=ranks - teachers)
    # The ranks of a capture read the size of a vocabulary that is only assumed here.
    assumed = assumed_roles(config.models, config.data.tokenizer)
    if isinstance(config, CaptureConfig) and not assumed:
        shape, layout = open_shapes(config)["teacher"], layout_of(config.parallel)
        return capture_memory_warning(config, shape, memory, layout=layout, ranks=ranks)
    return None


def memory_warning(config: RunConfig, memory: RankMemory, *, ranks: int) -> str | None:
    """Return a warning where the fullest rank needs more memory than there is, with ways out.

    ranks: of the student. Reads descriptions of the models only. Where one of several teachers has
    ranks, a layout or a tokenizer of its own, it says that nothing is predicted. Raises ConfigError
    of a GPU or a limit where what lives from step to step, both models' weights, the gradients and
    the optimizer state, alone exceeds it: these are exact, and nothing frees them. Also where the
    whole need is more than `_CERTAIN` times it: no recorded step needs so much less than planned.
    """
    unknown = list(dict.fromkeys(one.key for one in all_unplanned(config, only_memory=True)))
    if unknown:
        return (
            "memory: not predicted for several teachers in places of their own, "
            f"{', '.join(unknown)}; watch the memory of the first steps"
        )
    device, local = memory.device, memory.local
    shapes = open_shapes(config)
    run = planned_run(config, shapes)
    teachers = sum(count for _, count in teacher_ranks(config, ranks_per_node=local))
    choice = configured_choice(config, run, ranks=ranks + teachers, teachers=teachers)
    wanted = planned(run, choice, device)
    if wanted.fits(device):
        return None
    rule = shape_rule(config, shapes)
    search = Search(run, device, choice.devices, rule, (choice.place,))
    ways = nearest(search.ranking(shown=_WAYS).fitting, choice, count=_WAYS)
    text = _in_words(wanted, ways, device)
    if not ways and choice.place != "own ranks":  # whose ranks may be fewer or more
        text = f"{text}. {search.way_out()}".removesuffix(". ")
    least = _least_need(config, wanted, memory, teachers)
    if memory.is_limit and max(least.lasting, least.total / _CERTAIN) > device.memory_bytes:
        raise ConfigError(text)
    return text


def _least_need(
    config: RunConfig, wanted: Planned, memory: RankMemory, teachers: int
) -> MemoryNeed:
    """Return what the fullest rank needs in any case.

    A vocabulary whose size is assumed may be smaller: then without its rows but one.
    """
    assumed = assumed_roles(config.models, config.data.tokenizer)
    if not assumed:
        return wanted.memory
    run = planned_run(config, open_shapes(config, rows=dict.fromkeys(assumed, 1)))
    choice = configured_choice(config, run, ranks=wanted.choice.devices, teachers=teachers)
    return planned(run, choice, memory.device).memory


def capture_memory_warning(
    config: CaptureConfig, shape: Architecture, memory: RankMemory, *, layout: Layout, ranks: int
) -> str | None:
    """Return a warning where a rank of a capture needs more memory than there is, with ways out.

    Raises ConfigError where the teacher's weights alone exceed a GPU's memory or a limit.
    """
    device, size = memory.device, config.capture.micro_batch_size
    teacher = config.models["teacher"]
    run = PlannedRun(
        student=shape,
        teacher=shape,
        sequence_length=teacher.sequence_length or config.data.sequence_length,
        global_batch_size=size,
        precision=config.capture.precision,
        chunk_tokens=config.capture.chunk_tokens,
        sent_ids=config.store.k,
    )

    def need_in(one: Layout) -> MemoryNeed:
        layers = even_layers(shape.num_layers, one.pipeline)
        return teacher_rank_need(run, _capture_choice(one, layers, ranks, size), device)

    wanted = need_in(layout)
    if wanted.total <= USABLE * device.memory_bytes:
        return None
    rule = shape_rule(config, {"teacher": shape})
    others = Choices(run, device, ranks, rule).teacher_layouts(ranks)
    needs = {one: need_in(one) for one in others}
    fitting = [one for one in needs if needs[one].total <= USABLE * device.memory_bytes]
    ways = ". Layouts that fit:" if fitting else _no_layout(ranks)
    lines = [_too_much("capture", wanted, device) + ways]
    # The fewest ranks of a replica first.
    for one in sorted(fitting, key=lambda one: one.model_ranks)[:_WAYS]:
        name = layout_name(one, ranks // one.model_ranks)
        lines.append(
            f"  {name}: {_size(needs[one].total)}; set parallel.tensor={one.tensor} "
            f"parallel.pipeline={one.pipeline} parallel.expert={one.expert}"
        )
    text = "\n".join(lines)
    if memory.is_limit and wanted.teacher > device.memory_bytes:
        raise ConfigError(text)
    return text


def _capture_choice(layout: Layout, layers: tuple[int, ...], ranks: int, size: int) -> Choice:
    return Choice(
        layout=layout,
        ranks=ranks,
        micro_batch_size=size,
        layers=(),
        place="own ranks",
        teacher_layout=layout,
        teacher_layers=layers,
        teacher_ranks=ranks,
    )


def _in_words(wanted: Planned, ways: Sequence[Planned], device: DeviceProfile) -> str:
    text = _too_much("run", wanted.memory, device)
    if not ways:
        return text + _no_layout(wanted.choice.devices)
    lines = [f"{text}. The nearest layouts that fit:"]
    for way in ways:
        changes = " ".join(changed_settings(way.choice, wanted.choice))
        lines.append(f"  {choice_name(way.choice)}: {_size(way.memory.total)}; set {changes}")
    return "\n".join(lines)


def _no_layout(devices: int) -> str:
    known = counted(devices, "device")
    return f"; no layout of {known} fits: use more devices, or give each more memory"


def _too_much(job: str, need: MemoryNeed, device: DeviceProfile) -> str:
    return (
        f"memory: the fullest rank of this {job} needs {_need_in_words(need)}, and "
        f"{device.title} has {_size(device.memory_bytes)}, of which {USABLE:.0%} are usable"
    )


def _need_in_words(need: MemoryNeed) -> str:
    """Return the sum and the parts of a need, below a GiB in a unit that shows them."""
    _, size = _unit(need.total)
    if size == 2**30:
        return need_in_words(need)
    parts = ", ".join(
        f"{name.replace('_', ' ')} {count / size:.1f}"
        for name, count in need.parts.items()
        if count >= 0.05 * size
    )
    return f"{_size(need.total)} ({parts})"


def _size(count: float) -> str:
    unit, size = _unit(count)
    return f"{count / size:.1f} {unit}"


def _unit(count: float) -> tuple[str, int]:
    """Return the largest unit of which so many bytes are one or more, and its bytes."""
    return next((unit for unit in _UNITS if count >= unit[1]), _UNITS[-1])


def nearest(found: Sequence[Planned], wanted: Choice, *, count: int) -> list[Planned]:
    """Return the choices that differ least from `wanted`: sizes, micro-batch and recomputation."""

    def distance(one: Planned) -> tuple[float, float]:
        here, there = one.choice, wanted
        sizes = zip(
            (*sizes_of(here.layout), here.layout.virtual_pipeline or 1),
            (*sizes_of(there.layout), there.layout.virtual_pipeline or 1),
            strict=True,
        )
        far = sum(abs(log2(a / b)) for a, b in sizes)
        far += abs(log2(here.micro_batch_size / there.micro_batch_size)) / 2
        far += (here.recompute != there.recompute) / 2
        far += 2 * (here.place != there.place)
        far += here.teacher_layout != there.teacher_layout
        return far, one.time.total

    return sorted(found, key=distance)[:count]

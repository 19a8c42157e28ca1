"""Whether a run fits the memory of its devices, asked before anything large is built."""

from __future__ import annotations

import os
from collections.abc import Sequence

import psutil
import torch

from megatron_distill.config import CaptureConfig, RunConfig, teacher_ranks
from megatron_distill.errors import ConfigError
from megatron_distill.log import get_logger
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.pipeline_stages import even_layers
from megatron_distill.planning.device import DeviceProfile, load_device
from megatron_distill.planning.memory import MemoryNeed, teacher_rank_need
from megatron_distill.planning.report import changed_settings, choice_name, need_in_words
from megatron_distill.planning.run import Choice, PlannedRun
from megatron_distill.planning.search import (
    USABLE,
    Planned,
    Search,
    layout_name,
    nearest,
    planned,
)
from megatron_distill.runtime.collectives import from_first_rank
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.launch import Device
from megatron_distill.runtime.layout import Layout
from megatron_distill.train.reports.planned_run import (
    all_unplanned,
    configured_choice,
    open_shapes,
    planned_run,
    shape_rule,
)

__all__ = [
    "capture_memory_warning",
    "memory_warning",
    "warn_of_capture_memory",
    "warn_of_memory",
]

_LOGGER = get_logger(__name__)

# Rates only order the ways out, which the warning names without their times.
_RATES = "h100-80gb"
_WAYS = 3


def warn_of_memory(config: RunConfig, device: Device, *, ranks: int) -> None:
    """Log `memory_warning` on the first rank; raises as it does, on all ranks.

    Collective: world, one broadcast of a short object.
    """
    warning = from_first_rank(lambda: memory_warning(config, device, ranks=ranks))
    if warning is not None:
        _LOGGER.warning("%s", warning)


def memory_warning(config: RunConfig, rank_device: Device, *, ranks: int) -> str | None:
    """Return a warning where the fullest rank needs more memory than there is, with ways out.

    ranks: of the student. Reads descriptions of the models only. Where one of several teachers has
    ranks, a layout or a tokenizer of its own, it says that nothing is predicted. Raises ConfigError
    where the persistent states alone exceed a GPU's memory: these are exact, and nothing frees
    them.
    """
    unknown = list(dict.fromkeys(one.key for one in all_unplanned(config, only_memory=True)))
    if unknown:
        return (
            "memory: not predicted for several teachers in places of their own, "
            f"{', '.join(unknown)}; watch the memory of the first steps"
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = _machine(rank_device.torch_device, local)
    shapes = open_shapes(config)
    run = planned_run(config, shapes)
    teachers = sum(count for _, count in teacher_ranks(config, ranks_per_node=local))
    choice = configured_choice(config, run, ranks=ranks + teachers, teachers=teachers)
    wanted = planned(run, choice, device)
    if wanted.fits(device):
        return None
    rule = shape_rule(config, shapes)
    search = Search(run, device, choice.devices, rule, (choice.place,))
    found = search.ranking(shown=_WAYS).fitting
    text = _in_words(wanted, nearest(found, choice, count=_WAYS), device)
    certain = wanted.memory.weights + wanted.memory.gradients + wanted.memory.optimizer
    if device.kind == "gpu" and certain > device.memory_bytes:
        raise ConfigError(text)
    return text


def warn_of_capture_memory(
    config: CaptureConfig, shape: Architecture, device: Device, groups: Groups
) -> None:
    """Log `capture_memory_warning` on the first rank; raises as it does, on all ranks.

    Collective: world, one broadcast of a short object.
    """
    layout, ranks = groups.layout, groups.world.size()
    warning = from_first_rank(
        lambda: capture_memory_warning(config, shape, device, layout=layout, ranks=ranks)
    )
    if warning is not None:
        _LOGGER.warning("%s", warning)


def capture_memory_warning(
    config: CaptureConfig, shape: Architecture, rank_device: Device, *, layout: Layout, ranks: int
) -> str | None:
    """Return a warning where a rank of a capture needs more memory than there is, with ways out.

    Raises ConfigError where the teacher's weights alone exceed a GPU's memory.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device, size = _machine(rank_device.torch_device, local), config.capture.micro_batch_size
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
    others = Search(run, device, ranks, rule, ()).teacher_layouts(ranks)
    needs = {one: need_in(one) for one in others}
    fitting = [one for one in needs if needs[one].total <= USABLE * device.memory_bytes]
    ways = ". Layouts that fit:" if fitting else f"; no layout of {ranks} fits: use more devices"
    lines = [_too_much("capture", wanted, device) + ways]
    # The fewest ranks of a replica first.
    for one in sorted(fitting, key=lambda one: one.model_ranks)[:_WAYS]:
        name = layout_name(one, ranks // one.model_ranks)
        gib = needs[one].total / 2**30
        lines.append(
            f"  {name}: {gib:.1f} GiB; set parallel.tensor={one.tensor} "
            f"parallel.pipeline={one.pipeline} parallel.expert={one.expert}"
        )
    text = "\n".join(lines)
    if device.kind == "gpu" and wanted.teacher > device.memory_bytes:
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


def _machine(device: torch.device, local: int) -> DeviceProfile:
    """Return the device of this rank with its own memory."""
    rates = load_device(_RATES)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        update = {"title": properties.name, "memory_gib": properties.total_memory / 2**30}
        return rates.model_copy(update=update)
    memory = psutil.virtual_memory().total / local / 2**30
    title = f"the share of each of {local} ranks" if local > 1 else "this machine"
    update = {"title": title, "memory_gib": memory, "kind": "cpu", "reserved_gib": 0.0}
    return rates.model_copy(update=update)


def _in_words(wanted: Planned, ways: Sequence[Planned], device: DeviceProfile) -> str:
    text = _too_much("run", wanted.memory, device)
    if not ways:
        return f"{text}; no layout of {wanted.choice.devices} devices fits: use more devices"
    lines = [f"{text}. The nearest layouts that fit:"]
    for way in ways:
        changes = " ".join(changed_settings(way.choice, wanted.choice))
        gib = way.memory.total / 2**30
        lines.append(f"  {choice_name(way.choice)}: {gib:.1f} GiB; set {changes}")
    return "\n".join(lines)


def _too_much(job: str, need: MemoryNeed, device: DeviceProfile) -> str:
    return (
        f"memory: the fullest rank of this {job} needs {need_in_words(need)}, and "
        f"{device.title} has {device.memory_gib:.1f} GiB, of which {USABLE:.0%} are usable"
    )

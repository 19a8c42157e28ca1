"""Whether a run fits the memory of its devices, asked before anything large is built."""

from __future__ import annotations

import os
from collections.abc import Sequence

import psutil
import torch

from megatron_distill.config import RunConfig, teacher_ranks
from megatron_distill.errors import ConfigError
from megatron_distill.log import get_logger
from megatron_distill.planning.device import DeviceProfile, load_device
from megatron_distill.planning.report import changed_settings, choice_name, need_in_words
from megatron_distill.planning.search import USABLE, Planned, Search, nearest, planned
from megatron_distill.runtime.collectives import from_first_rank
from megatron_distill.runtime.launch import Device
from megatron_distill.train.reports.planned_run import (
    configured_choice,
    open_shapes,
    planned_run,
    shape_rule,
    unplanned,
)

__all__ = ["memory_warning", "warn_of_memory"]

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

    ranks: of the student. Reads descriptions of the models only. Nothing is predicted where one of
    several teachers has ranks, a layout or a tokenizer of its own. Raises ConfigError where the
    persistent states alone exceed a GPU's memory: these are exact, and nothing can free them.
    """
    if unplanned(config, only_memory=True) is not None:
        return None
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
    text = (
        f"memory: the fullest rank of this run needs {need_in_words(wanted.memory)}, and "
        f"{device.title} has {device.memory_gib:.1f} GiB, of which {USABLE:.0%} are usable"
    )
    if not ways:
        return f"{text}; no layout of {wanted.choice.devices} devices fits: use more devices"
    lines = [f"{text}. The nearest layouts that fit:"]
    for way in ways:
        changes = " ".join(changed_settings(way.choice, wanted.choice))
        gib = way.memory.total / 2**30
        lines.append(f"  {choice_name(way.choice)}: {gib:.1f} GiB; set {changes}")
    return "\n".join(lines)

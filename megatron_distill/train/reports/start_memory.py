"""The memory of this machine against the need of a job, asked before anything large is built."""

from __future__ import annotations

from contextlib import suppress

import torch

from megatron_distill.config import CaptureConfig, JobConfig, RunConfig
from megatron_distill.errors import TrainingError
from megatron_distill.launching.node_memory import NodeMemory, gpu_memory, host_memory
from megatron_distill.log import get_logger
from megatron_distill.models.architecture import Architecture
from megatron_distill.planning.device import load_device
from megatron_distill.runtime.collectives import from_first_rank
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.launch import Device, local_size
from megatron_distill.train.reports.memory_check import (
    RankMemory,
    capture_memory_warning,
    job_memory_warning,
    memory_warning,
)

__all__ = ["refuse_beyond_memory", "warn_of_capture_memory", "warn_of_memory"]

_LOGGER = get_logger(__name__)

# Rates only order the ways out, which the warning names without their times.
_RATES = "h100-80gb"


def refuse_beyond_memory(config: JobConfig, *, nodes: int, local: int) -> None:
    """Raise ConfigError where the ranks of a job would, asked before they start.

    local: ranks of each node. Reads descriptions of the models and the memory of this node, without
    a GPU context. Where ranks would only log a warning, or nothing is known here, that is left to
    them.
    """
    memory = _node_memory(config.runtime.device, local)
    if memory is not None and memory.is_limit:
        job_memory_warning(config, memory, nodes=nodes)


def warn_of_memory(config: RunConfig, device: Device, *, ranks: int) -> None:
    """Log `memory_warning` on the first rank; raises as it does, on all ranks.

    Collective: world, one broadcast of a short object.
    """
    warning = from_first_rank(
        lambda: memory_warning(config, _own_memory(device.torch_device), ranks=ranks)
    )
    if warning is not None:
        _LOGGER.warning("%s", warning)


def warn_of_capture_memory(
    config: CaptureConfig, shape: Architecture, device: Device, groups: Groups
) -> None:
    """Log `capture_memory_warning` on the first rank; raises as it does, on all ranks.

    Collective: world, one broadcast of a short object.
    """
    layout, ranks = groups.layout, groups.world.size()

    def compared() -> str | None:
        memory = _own_memory(device.torch_device)
        return capture_memory_warning(config, shape, memory, layout=layout, ranks=ranks)

    warning = from_first_rank(compared)
    if warning is not None:
        _LOGGER.warning("%s", warning)


def _own_memory(device: torch.device) -> RankMemory:
    """Return the memory of this rank's device, or its share of the host's."""
    local = local_size()
    if device.type != "cuda":
        return _share_of_host(local)
    properties = torch.cuda.get_device_properties(device)
    found = NodeMemory(properties.name, properties.total_memory, is_limit=True)
    return _rank_memory(found, local)


def _node_memory(wanted: str, local: int) -> RankMemory | None:
    """Return the memory of a rank on this node; None: its GPUs do not tell.

    wanted: `runtime.device`. nvidia-smi counts what the driver keeps for itself as well, which is
    less than a percent: a rank may refuse what fits here, but not the other way round.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return _share_of_host(local)
    with suppress(TrainingError):  # the checks of the nodes find an nvidia-smi that hangs
        if (found := gpu_memory()) is not None:
            return _rank_memory(found, local)
    return None


def _share_of_host(local: int) -> RankMemory:
    host = host_memory()
    title = f"each of {local} ranks of {host.title}" if local > 1 else host.title
    return _rank_memory(NodeMemory(title, host.count // local, host.is_limit), local, kind="cpu")


def _rank_memory(found: NodeMemory, local: int, *, kind: str = "gpu") -> RankMemory:
    update: dict[str, object] = {"title": found.title, "memory_gib": found.count / 2**30}
    if kind == "cpu":
        update |= {"kind": "cpu", "reserved_gib": 0.0}
    return RankMemory(load_device(_RATES).model_copy(update=update), found.is_limit, local)

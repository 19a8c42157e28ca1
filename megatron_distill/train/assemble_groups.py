"""From a configuration to process groups and to how models are executed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_distill.config import JobConfig
from megatron_distill.models.architecture import Execution
from megatron_distill.runtime.device import PRECISIONS, Device
from megatron_distill.runtime.groups import Groups, Layout, create_groups, destroy_groups
from megatron_distill.runtime.seed import seed_everything


@contextmanager
def job_groups(config: JobConfig, *, trains: bool) -> Iterator[Groups]:
    """Make the process groups of a job and the random state that goes with them.

    Only a job that trains cuts its stages into chunks. The groups are gone afterwards, so that
    another job may follow in the same processes. Raises ConfigError on all ranks.
    """
    parallel = config.parallel
    layout = Layout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline if trains else None,
        context=parallel.context,
        expert=parallel.expert,
        sequence=parallel.sequence,
    )
    groups = create_groups(layout, timeout_minutes=-(-config.runtime.timeout_seconds // 60))
    try:
        seed_everything(config.seed, groups)
        yield groups
    finally:
        destroy_groups()


def execution_on(device: Device, *, precision: str, recompute: str = "none") -> Execution:
    """Return how models are executed on this device."""
    return Execution(dtype=PRECISIONS[precision], device=device.torch_device, recompute=recompute)

"""The banner of an opened run, from its configuration and what has been built of it."""

from __future__ import annotations

from megatron_distill.config import RunConfig, run_heading, run_rows, sources_in_words, step_sizes
from megatron_distill.runtime.progress import size
from megatron_distill.train.assemble.distillation import OpenRun
from megatron_distill.train.reports.banner import memory_of_run, run_banner, steps_row
from megatron_distill.train.run_state import RunState

__all__ = ["opened_run_banner"]


def opened_run_banner(config: RunConfig, opened: OpenRun, state: RunState) -> str:
    """Return the banner of a run whose models are built."""
    teacher, site = opened.teacher, opened.site
    shapes = {"student": state.architecture, **teacher.shapes}
    layers = {role: shape.num_layers for role, shape in shapes.items()}
    memory = memory_of_run(
        state,
        [model.model for model in teacher.models.values()],
        site.execution,
        chunk_tokens=config.objective.chunk_tokens,
        micro_batch_size=config.train.micro_batch_size,
        is_distributed=config.optimizer.distributed,
        head_copy=teacher.held_values,
    )
    rows = run_rows(
        config,
        world_size=site.groups.world.size(),
        feature_pairs=len(state.features.pairs) if state.features else 0,
        moved=None if teacher.moved_bytes is None else size(teacher.moved_bytes),
        own_ranks={role: remote.ranks for role, remote in teacher.remotes.items()},
    )
    return run_banner(
        run_heading(config),
        shapes,
        sources_in_words(config.models, layers, teacher.stored_samples),
        [*rows, steps_row(**step_sizes(config), start_step=state.step)],
        memory,
        stages=config.parallel.pipeline,
    )

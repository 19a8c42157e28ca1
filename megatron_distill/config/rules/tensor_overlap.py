"""Rules on the overlap of tensor-parallel messages: which layouts, which device."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_distill.config.messages import Problem
from megatron_distill.config.rules.teacher_parallel import parallel_key, teacher_parallel
from megatron_distill.config.rules.teacher_ranks import has_own_ranks
from megatron_distill.config.schema import CaptureConfig, JobConfig, ParallelConfig, RunConfig

__all__ = ["tensor_overlap_problems"]

_KEY = "runtime.tp_comm_overlap"
_SETTING = f"{_KEY} = true"


def tensor_overlap_problems(job: JobConfig) -> Iterator[Problem]:
    """Find layouts and devices without messages that Transformer Engine can overlap."""
    if not job.runtime.tp_comm_overlap:
        return
    layouts = {key: one for key, one in _layouts(job) if one.tensor > 1}
    if not layouts:
        yield Problem(
            (_KEY, "parallel.tensor"),
            f"{_SETTING}: parallel.tensor = {job.parallel.tensor} has no tensor-parallel messages; "
            f"set {_KEY}=false or parallel.tensor to 2 or more",
        )
    for key, parallel in layouts.items():
        if not parallel.sequence:
            yield Problem(
                (_KEY, f"{key}.sequence"),
                f"{_SETTING}: needs sequence parallelism; set {key}.sequence=true or {_KEY}=false",
            )
    yield from _one_size(job, layouts)
    section = "capture" if isinstance(job, CaptureConfig) else "train"
    passes = job.capture if isinstance(job, CaptureConfig) else getattr(job, section)
    if passes.precision != "bf16":
        yield Problem(
            (_KEY, f"{section}.precision"),
            f"{_SETTING}: needs {section}.precision = 'bf16', not {passes.precision!r}; set "
            f"{section}.precision=bf16 or {_KEY}=false",
        )
    if job.runtime.transformer_engine == "off":
        yield Problem(
            (_KEY, "runtime.transformer_engine"),
            f"{_SETTING}: needs Transformer Engine, and runtime.transformer_engine = 'off'; set it "
            f"to auto or {_KEY}=false",
        )
    if job.runtime.device == "cpu":
        yield Problem(
            (_KEY, "runtime.device"),
            f"{_SETTING}: needs GPUs, and runtime.device = 'cpu'; set {_KEY}=false",
        )


def _layouts(job: JobConfig) -> Iterator[tuple[str, ParallelConfig]]:
    """Yield the layouts of the models that run, by their section."""
    for role, model in job.models.items():
        if role == "student":
            yield "parallel", job.parallel
        elif model.store is None:
            yield parallel_key(job, role), teacher_parallel(job, role)


def _one_size(job: JobConfig, layouts: dict[str, ParallelConfig]) -> Iterator[Problem]:
    """Compare the tensor-parallel sizes of the models of one process; 1 needs no buffers."""
    apart = isinstance(job, RunConfig) and has_own_ranks(job)
    sizes = {
        key: parallel.tensor
        for key, parallel in layouts.items()
        if not (apart and key == "teacher.parallel")
    }
    first = next(iter(sizes), None)
    for key, size in sizes.items():
        if first is not None and size != sizes[first]:
            yield Problem(
                (_KEY, f"{key}.tensor", f"{first}.tensor"),
                f"{_SETTING}: Transformer Engine has buffers for one tensor-parallel size, and "
                f"{key}.tensor = {size} differs from {first}.tensor = {sizes[first]}. Set one "
                f"size, give the teacher ranks of its own, or set {_KEY}=false",
            )

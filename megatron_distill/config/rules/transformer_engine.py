"""Rules on FP8 and on the overlap of tensor-parallel messages, both of Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_distill.config.messages import Problem, without_effect
from megatron_distill.config.rules.teacher_parallel import parallel_key, teacher_parallel
from megatron_distill.config.rules.teacher_ranks import has_own_ranks
from megatron_distill.config.schema import (
    CaptureConfig,
    CapturePassConfig,
    JobConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)

__all__ = ["fp8_problems", "tensor_overlap_problems"]

_MULTIPLE = 16  # of the rows of a matrix


def fp8_problems(job: JobConfig) -> Iterator[Problem]:
    """Find FP8 settings that no run could compute."""
    student = job.models.get("student")
    if student is not None and student.fp8 is not None:
        yield Problem(
            ("student.fp8", "train.fp8"),
            f"student.fp8 = {student.fp8!r}: of a teacher only; set train.fp8={student.fp8} and "
            "remove it",
        )
    teachers = {role: model for role, model in job.models.items() if role != "student"}
    if isinstance(job, RunConfig) and job.train.fp8 is not None:
        yield from _computed(job, "train.fp8", job.train.fp8)
    for role, teacher in teachers.items():
        if teacher.fp8 is not None and teacher.store is not None:
            yield without_effect(f"{role}.fp8", teacher.fp8, f"with {role}.store", instead=None)
        elif teacher.fp8 is not None:
            if teacher.shard_weights:
                yield Problem(
                    (f"{role}.shard_weights", f"{role}.fp8"),
                    f"{role}.shard_weights = true: with {role}.fp8 = {teacher.fp8!r} Transformer "
                    "Engine stores FP8 copies of all weights on each rank; set one of the two only",
                )
            yield from _computed(job, f"{role}.fp8", teacher.fp8)


def _computed(job: JobConfig, key: str, value: str) -> Iterator[Problem]:
    section, passes = _passes(job)
    setting = f"{key} = {value!r}"
    yield from _without_engine(job, key, setting, "a GPU", remedy=f"{key}=null")
    role, size = key.removesuffix(".fp8"), passes.micro_batch_size
    parallel = teacher_parallel(job, role) if role in job.models else job.parallel
    ranks = parallel.context * (parallel.tensor if parallel.sequence else 1)
    length_key, length = "data.sequence_length", job.data.sequence_length
    if role in job.models and job.models[role].sequence_length is not None:
        length_key, length = f"{role}.sequence_length", job.models[role].sequence_length or 0
    rows = length * size // ranks
    if rows % _MULTIPLE:
        yield Problem(
            (key, length_key, f"{section}.micro_batch_size"),
            f"{setting}: {rows} tokens of a micro-batch on a rank ({length_key} * "
            f"{section}.micro_batch_size / {ranks}); FP8 needs a multiple of {_MULTIPLE}",
        )


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
    yield from _without_engine(job, _KEY, _SETTING, "GPUs", remedy=f"{_KEY}=false")


def _passes(job: JobConfig) -> tuple[str, CapturePassConfig | TrainConfig]:
    """Return the section of a job's passes: its name and its settings."""
    if isinstance(job, CaptureConfig):
        return "capture", job.capture
    assert isinstance(job, RunConfig), "no other job has a model that runs"
    return "train", job.train


def _without_engine(
    job: JobConfig, key: str, setting: str, devices: str, *, remedy: str
) -> Iterator[Problem]:
    """Find what keeps a job's passes from Transformer Engine, which `setting` needs."""
    section, passes = _passes(job)
    if passes.precision != "bf16":
        yield Problem(
            (key, f"{section}.precision"),
            f"{setting}: needs {section}.precision = 'bf16', not {passes.precision!r}; set "
            f"{section}.precision=bf16 or {remedy}",
        )
    if job.runtime.transformer_engine == "off":
        yield Problem(
            (key, "runtime.transformer_engine"),
            f"{setting}: needs Transformer Engine, and runtime.transformer_engine = 'off'; set it "
            f"to auto or {remedy}",
        )
    if job.runtime.device == "cpu":
        yield Problem(
            (key, "runtime.device"),
            f"{setting}: needs {devices}, and runtime.device = 'cpu'; set {remedy}",
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

"""Rules on FP8: for which model, on which device, with which sizes."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_distill.config.messages import Problem, without_effect
from megatron_distill.config.rules.teacher_parallel import teacher_parallel
from megatron_distill.config.schema import CaptureConfig, JobConfig, RunConfig

__all__ = ["fp8_problems"]

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
    section = "capture" if isinstance(job, CaptureConfig) else "train"
    passes = job.capture if isinstance(job, CaptureConfig) else getattr(job, section)
    setting = f"{key} = {value!r}"
    if passes.precision != "bf16":
        yield Problem(
            (key, f"{section}.precision"),
            f"{setting}: needs {section}.precision = 'bf16', not {passes.precision!r}; set "
            f"{section}.precision=bf16 or {key}=null",
        )
    if job.runtime.transformer_engine == "off":
        yield Problem(
            (key, "runtime.transformer_engine"),
            f"{setting}: needs Transformer Engine, and runtime.transformer_engine = 'off'; set it "
            f"to auto or {key}=null",
        )
    if job.runtime.device == "cpu":
        yield Problem(
            (key, "runtime.device"),
            f"{setting}: needs a GPU, and runtime.device = 'cpu'; set {key}=null",
        )
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

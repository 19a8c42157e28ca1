"""Rules of a capture."""

from collections.abc import Iterator

from megatron_distill.config.problems import Problem
from megatron_distill.config.schema import CaptureConfig

__all__ = ["capture_problems"]


def capture_problems(config: CaptureConfig) -> Iterator[Problem]:
    """Say what of a capture contradicts itself."""
    store, teacher = config.store, config.teacher
    if teacher is None:
        yield Problem(
            ("teacher",), "teacher = null: nobody speaks; give teacher.hf or teacher.checkpoint"
        )
    elif teacher.store is not None:
        yield Problem(
            ("teacher.store",),
            "teacher.store: a store is captured from a model; give teacher.hf or "
            "teacher.checkpoint, and where the store goes in store.path",
        )
    if config.parallel.virtual_pipeline is not None:
        yield Problem(
            ("parallel.virtual_pipeline",),
            f"parallel.virtual_pipeline = {config.parallel.virtual_pipeline}: belongs to training; "
            "a teacher that only speaks runs without, leave it out",
        )
    if store.job >= store.jobs:
        yield Problem(
            ("store.job", "store.jobs"),
            f"store.job = {store.job}: jobs are counted from 0 and store.jobs = {store.jobs}; "
            "lower the first or raise the second",
        )
    if list(store.temperatures) != sorted(set(store.temperatures)) or any(
        temperature <= 0 or temperature == 1 for temperature in store.temperatures
    ):
        yield Problem(
            ("store.temperatures",),
            f"store.temperatures = {list(store.temperatures)}: list positive numbers other than 1, "
            "ascending",
        )
    if store.mode == "sampled" and (store.top_p is not None or store.temperatures):
        yield Problem(
            ("store.mode", "store.top_p", "store.temperatures"),
            "store.mode = 'sampled': draws are not cut and are of temperature 1; leave store.top_p "
            "and store.temperatures out",
        )

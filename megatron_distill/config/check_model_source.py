"""Rules on where one model comes from."""

from collections.abc import Iterator

from megatron_distill.config.problems import Problem
from megatron_distill.config.schema import ModelConfig

__all__ = ["source_problems"]


def source_problems(model: ModelConfig, role: str) -> Iterator[Problem]:
    """Find contradictions in where the model `role` ('student' or 'teacher') comes from."""
    hf, shape, checkpoint = f"{role}.hf", f"{role}.architecture", f"{role}.checkpoint"
    store = f"{role}.store"
    if role == "student" and model.store is not None:
        yield Problem((store,), f"{store}: a student is trained, a store only speaks; remove it")
    sources = (model.hf, model.architecture, model.checkpoint, model.store)
    if all(source is None for source in sources):
        yield Problem(
            (hf, shape, checkpoint),
            f"{role}: neither {hf} nor {shape} nor {checkpoint} is given; give a Hugging Face "
            "folder, the shape, a checkpoint, or shape and checkpoint",
        )
    for key, value in ((shape, model.architecture), (checkpoint, model.checkpoint)):
        if model.hf is not None and value is not None:
            yield Problem(
                (hf, key), f"{hf} = {model.hf!r} and {key} are both given; give only one of the two"
            )
    yield from _kept_layers(model, role)


def _kept_layers(model: ModelConfig, role: str) -> Iterator[Problem]:
    kept, count = f"{role}.keep_layers", f"{role}.num_layers"
    for key, value in ((kept, model.keep_layers), (count, model.num_layers)):
        if value is None:
            continue
        said = f"{key} = {list(value) if isinstance(value, tuple) else value}"
        if role == "teacher":
            yield Problem((key,), f"{said}: a teacher keeps all its layers; remove it")
        elif model.architecture is not None or (model.hf is None and model.checkpoint is None):
            yield Problem(
                (key, f"{role}.architecture", f"{role}.hf", f"{role}.checkpoint"),
                f"{said}: needs {role}.hf or {role}.checkpoint to take layers from, and no "
                f"{role}.architecture",
            )
    layers = model.keep_layers
    if layers is not None and model.num_layers is not None:
        yield Problem((kept, count), f"{kept} and {count} are both given; give only one of the two")
    if layers is not None and (layers[0] < 0 or list(layers) != sorted(set(layers))):
        yield Problem(
            (kept,), f"{kept} = {list(layers)}: list layers from 0 upwards, each at most once"
        )

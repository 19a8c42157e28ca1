"""Which layers a feature entry means, and the rules of feature losses."""

from collections.abc import Iterator

from megatron_distill.config.problems import Problem
from megatron_distill.config.schema import FeatureConfig, ModelConfig, ProjectorConfig, RunConfig

__all__ = ["feature_problems", "layer_problems", "matched_layers"]

Layers = tuple[int, int]


def matched_layers(
    entry: FeatureConfig, student_layers: int, teacher_layers: int
) -> tuple[Layers, ...]:
    """Return the layers that an entry pairs, (student's, teacher's), from 1.

    `uniform` pairs layer i of the student with the teacher's layer i * teacher_layers /
    student_layers, rounded half up, at least 1; `last` with the one as far from the end.
    """
    if entry.match is None:
        assert entry.student is not None
        assert entry.teacher is not None
        return ((entry.student, entry.teacher),)
    layers = range(1, student_layers + 1)
    if entry.match == "last":
        return tuple((layer, teacher_layers - student_layers + layer) for layer in layers)
    return tuple(
        (layer, max(1, (2 * layer * teacher_layers + student_layers) // (2 * student_layers)))
        for layer in layers
    )


def feature_problems(config: RunConfig) -> Iterator[Problem]:
    """Say what of the feature losses contradicts itself or the rest."""
    objective = config.objective
    features, teacher = objective.features, config.teacher
    if features and teacher is None:
        yield Problem(
            ("objective.features", "teacher"),
            f"objective.features: {len(features)} feature loss(es) but teacher = null; give a "
            "teacher or set objective.features=[]",
        )
    if features and teacher is not None and teacher.store is not None:
        yield Problem(
            ("objective.features", "teacher.store"),
            f"objective.features: {len(features)} feature loss(es), but a teacher.store holds no "
            "hidden states; use a live teacher (teacher.hf or teacher.checkpoint) or set "
            "objective.features=[]",
        )
    for index, entry in enumerate(features):
        yield from _entry(f"objective.features.{index}", entry)
    yield from _projector(objective.projector, has_features=bool(features))
    layers = [_layers(model) for model in (config.student, teacher) if model is not None]
    if len(layers) == 2:
        yield from layer_problems(features, *layers)


def _layers(model: ModelConfig) -> int | None:
    """Return a model's number of layers, or None where the file does not tell."""
    return model.architecture.num_layers if model.architecture is not None else None


def _entry(path: str, entry: FeatureConfig) -> Iterator[Problem]:
    given = {name: getattr(entry, name) for name in ("student", "teacher")}
    keys = (f"{path}.student", f"{path}.teacher", f"{path}.match")
    if entry.match is None and None in given.values():
        yield Problem(
            keys, f"{path}: give {path}.student and {path}.teacher, or {path}.match for all layers"
        )
    for name, layer in given.items():
        if entry.match is not None and layer is not None:
            yield Problem(
                keys,
                f"{path}.match = {entry.match!r} pairs all layers, but {path}.{name} = {layer}; "
                "give only one of the two",
            )


def _projector(projector: ProjectorConfig, *, has_features: bool) -> Iterator[Problem]:
    path = "objective.projector"
    if projector.kind == "linear" and projector.hidden_size is not None:
        yield Problem(
            (f"{path}.hidden_size", f"{path}.kind"),
            f"{path}.hidden_size = {projector.hidden_size} belongs to {path}.kind = 'mlp', here "
            "'linear'; leave it out",
        )
    if not has_features and projector != ProjectorConfig():
        yield Problem(
            (path, "objective.features"),
            f"{path}: settings are given but objective.features is empty; add a feature loss or "
            "leave them out",
        )


def layer_problems(
    features: tuple[FeatureConfig, ...], student_layers: int | None, teacher_layers: int | None
) -> Iterator[Problem]:
    """Say which layers the models do not have, and which pairs there are twice.

    A depth of None is not known yet. Entries that contradict themselves are passed over.
    """
    seen: dict[tuple[int, int, str], str] = {}
    repeated: set[tuple[str, str]] = set()
    for index, entry in enumerate(features):
        path = f"objective.features.{index}"
        if any(_entry(path, entry)):
            continue
        for role, depth in (("student", student_layers), ("teacher", teacher_layers)):
            layer = getattr(entry, role)
            if layer is not None and depth is not None and layer > depth:
                yield Problem(
                    (f"{path}.{role}", f"{role}.architecture.num_layers"),
                    f"{path}.{role} = {layer}: the {role} has layers 1 to {depth}; lower it",
                )
        if student_layers is None or teacher_layers is None:
            continue
        if entry.match == "last" and teacher_layers < student_layers:
            yield Problem(
                (f"{path}.match", "teacher.architecture.num_layers"),
                f"{path}.match = 'last': the teacher has {teacher_layers} layers, fewer than the "
                f"student's {student_layers}; use 'uniform' or name the layers",
            )
            continue
        for pair in matched_layers(entry, student_layers, teacher_layers):
            first = seen.setdefault((*pair, entry.loss), path)
            if first != path and (path, first) not in repeated:
                repeated.add((path, first))
                yield Problem(
                    (path, first),
                    f"{path} and {first} both have the {entry.loss} loss between layer {pair[0]} "
                    f"of the student and layer {pair[1]} of the teacher; add the weights up in one "
                    "of them",
                )

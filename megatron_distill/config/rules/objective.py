"""Rules on the objective: terms, feature losses, loss balancing, schedules."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_distill.config.messages import Problem, without_effect
from megatron_distill.config.rules.teacher_stores import stored_teachers_of
from megatron_distill.config.rules.teachers import TARGET_KEYS, target_of
from megatron_distill.config.schema import (
    PARAMETERS,
    BalanceConfig,
    FeatureConfig,
    ModelConfig,
    ProjectorConfig,
    RunConfig,
    TermConfig,
    ValueScheduleConfig,
)
from megatron_distill.errors import counted

__all__ = [
    "balance_problems",
    "feature_problems",
    "layer_problems",
    "matched_layers",
    "objective_problems",
]


# Keys that only modes with ratios use, and their defaults.
_OF_RATIOS: dict[str, object] = {
    "raw_losses": "exact",
    "ema": 0.0,
    "clamp": None,
    "epsilon": 1e-8,
    "per_microbatch": False,
}


def balance_problems(config: RunConfig) -> Iterator[Problem]:
    """Find contradictions in `objective.balance` and the schedules."""
    balance = config.objective.balance
    schedules = dict(_schedules(config))
    for key, schedule in schedules.items():
        yield from _schedule(key, schedule, balance)
    if balance.mode in ("magnitude", "gradient_norm"):
        yield from _ratio_targets(config)
        yield from _ratio_settings(balance)
    else:
        for name, nothing in _OF_RATIOS.items():
            value = getattr(balance, name)
            if value != nothing:
                key, reason = f"objective.balance.{name}", f"with {_mode(balance)}"
                yield without_effect(key, value, reason, instead=nothing)
    yield from _temperatures(config)


def _mode(balance: BalanceConfig) -> str:
    return f"objective.balance.mode = {balance.mode!r}"


def _schedules(config: RunConfig) -> Iterator[tuple[str, ValueScheduleConfig]]:
    """Every schedule that the objective sets, with its key."""
    objective = config.objective
    given = {
        "objective.ce_weight_schedule": objective.ce_weight_schedule,
        "objective.balance.alpha_schedule": objective.balance.alpha_schedule,
    }
    for index, term in enumerate(objective.terms):
        given[f"objective.terms.{index}.weight_schedule"] = term.weight_schedule
        given[f"objective.terms.{index}.temperature_schedule"] = term.temperature_schedule
    for key, schedule in given.items():
        if schedule is not None:
            yield key, schedule


def _schedule(key: str, schedule: ValueScheduleConfig, balance: BalanceConfig) -> Iterator[Problem]:
    if balance.mode == "fixed":
        value = schedule.model_dump(exclude_defaults=True)
        yield without_effect(key, value, f"with {_mode(balance)}", instead=None)
    elif schedule.kind == "constant" and schedule.steps is not None:
        reason = f"with {key}.kind = 'constant', which changes at {key}.start_step"
        yield without_effect(f"{key}.steps", schedule.steps, reason, instead=None)
    elif schedule.kind != "constant" and schedule.steps is None:
        yield Problem(
            (f"{key}.steps", f"{key}.kind"),
            f"{key}.steps is required with {key}.kind = {schedule.kind!r}; set the number of "
            "optimizer steps of the change",
        )


def _ratio_targets(config: RunConfig) -> Iterator[Problem]:
    """Find losses that a ratio cannot scale, or cannot use as its reference."""
    objective = config.objective
    mode = objective.balance.mode
    if not objective.terms and not objective.features:
        reason = "without objective.terms and objective.features"
        yield without_effect("objective.balance.mode", mode, reason, instead="schedule")
        return
    end = objective.ce_weight_schedule
    if objective.ce_weight == 0 or (end is not None and end.to == 0):
        key = "objective.ce_weight" + ("" if objective.ce_weight == 0 else "_schedule.to")
        yield Problem(
            ("objective.balance.mode", key),
            f"{key} = 0.0: objective.balance.mode = {mode!r} scales distillation to the "
            "cross-entropy; raise it, or set objective.balance.mode=schedule",
        )
    for index, term in enumerate(objective.terms):
        if mode == "magnitude" and term.support == "raw":
            yield Problem(
                ("objective.balance.mode", f"objective.terms.{index}.support"),
                f"objective.terms.{index}.support = 'raw': this loss can be negative, and "
                f"objective.balance.mode = {mode!r} needs positive ones; use 'tail' or "
                "'renormalized', or objective.balance.mode=gradient_norm",
            )
        if mode == "magnitude" and term.published:
            key = f"objective.terms.{index}.published"
            yield Problem(
                ("objective.balance.mode", key),
                f"{key} = true: the published loss can be zero or negative, and "
                f"objective.balance.mode = {mode!r} divides by it; set {key}=false, or "
                "objective.balance.mode=gradient_norm",
            )
    for index, feature in enumerate(objective.features):
        if mode == "gradient_norm" and feature.loss == "attention":
            yield Problem(
                ("objective.balance.mode", f"objective.features.{index}.loss"),
                f"objective.features.{index}.loss = 'attention' has gradients at queries and keys; "
                f"objective.balance.mode = {mode!r} compares gradients at hidden states; use "
                "'mse' or 'cosine', or objective.balance.mode=magnitude",
            )


def _ratio_settings(balance: BalanceConfig) -> Iterator[Problem]:
    if balance.mode == "gradient_norm":
        settings: dict[str, object] = {"raw_losses": "exact", "per_microbatch": False}
        for name, default in settings.items():
            value = getattr(balance, name)
            if value != default:
                key, reason = f"objective.balance.{name}", f"with {_mode(balance)}"
                yield without_effect(key, value, reason, instead=default)
        return
    if not balance.per_microbatch:
        return
    if balance.raw_losses == "previous":
        yield Problem(
            ("objective.balance.per_microbatch", "objective.balance.raw_losses"),
            "objective.balance.raw_losses = 'previous': with objective.balance.per_microbatch = "
            "true a micro-batch has no losses of an earlier step; use 'exact'",
        )
    if balance.ema:
        yield Problem(
            ("objective.balance.per_microbatch", "objective.balance.ema"),
            f"objective.balance.ema = {balance.ema} averages over steps, but "
            "objective.balance.per_microbatch = true takes the ratios of each micro-batch alone; "
            "set only one of the two",
        )


def _temperatures(config: RunConfig) -> Iterator[Problem]:
    for index, term in enumerate(config.objective.terms):
        path = f"objective.terms.{index}"
        schedule = term.temperature_schedule
        if schedule is None:
            continue
        if schedule.to == 0:
            yield Problem(
                (f"{path}.temperature_schedule.to",),
                f"{path}.temperature_schedule.to = 0.0: a temperature must be above 0; raise it",
            )
        # The temperature of likelihood is of chunks, and needs nothing of a store.
        is_of_labels = term.alignment == "likelihood"
        stored = stored_teachers_of(config, term)
        if stored and term.support != "renormalized" and not is_of_labels:
            yield Problem(
                (f"{path}.temperature_schedule", f"{path}.support", f"{stored[0]}.store"),
                f"{path}.temperature_schedule: a store has the temperatures of its capture only, "
                f"unless {path}.support = 'renormalized' (here {term.support!r}); set that, or "
                "remove the schedule",
            )


Layers = tuple[int, int]


def matched_layers(
    entry: FeatureConfig, student_layers: int, teacher_layers: int
) -> tuple[Layers, ...]:
    """Return the layers that an entry pairs, (student's, teacher's), from 1.

    `uniform` pairs layer i of the student with the teacher's layer i * teacher_layers /
    student_layers, rounded half up, at least 1. `last` pairs layers at the same distance from
    the end.
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
    """Find contradictions in the feature losses."""
    objective = config.objective
    features, teacher = objective.features, config.teacher
    if features and config.teachers:
        pass  # a rule of several teachers
    elif features and teacher is None and is_declined(config):
        reason = "with teacher = null"
        yield without_effect("objective.features", _names(features), reason, instead=[])
    elif features and teacher is None:
        yield Problem(
            ("objective.features", "teacher"),
            f"objective.features: {_losses(features)} but teacher = null; set teacher.hf or "
            "teacher.checkpoint, or objective.features=[]",
        )
    if features and teacher is not None and teacher.store is not None:
        yield Problem(
            ("objective.features", "teacher.store"),
            f"objective.features: {_losses(features)}, but teacher.store has no hidden states; set "
            "teacher.hf or teacher.checkpoint in its place, or objective.features=[]",
        )
    for index, entry in enumerate(features):
        yield from _entry(f"objective.features.{index}", entry)
    yield from _projector(objective.projector, has_features=bool(features))
    layers = [_layers(model) for model in (config.student, teacher) if model is not None]
    if len(layers) == 2:
        yield from layer_problems(features, *layers)


def is_declined(config: RunConfig) -> bool:
    """Whether the file sets `teacher: null` explicitly instead of omitting the section."""
    return not config.has_teacher and bool({"teacher", "teachers"} & config.model_fields_set)


def _losses(features: tuple[FeatureConfig, ...]) -> str:
    return counted(len(features), "feature loss", "feature losses")


def _names(features: tuple[FeatureConfig, ...]) -> list[str]:
    return [feature.loss for feature in features]


def _layers(model: ModelConfig) -> int | None:
    """Return a model's number of layers; None if the file does not give it."""
    return model.architecture.num_layers if model.architecture is not None else None


def _entry(path: str, entry: FeatureConfig) -> Iterator[Problem]:
    given = {name: getattr(entry, name) for name in ("student", "teacher")}
    keys = (f"{path}.student", f"{path}.teacher", f"{path}.match")
    if entry.match is None and None in given.values():
        yield Problem(
            keys, f"{path}: set {path}.student and {path}.teacher, or {path}.match for all layers"
        )
    for name, layer in given.items():
        if entry.match is not None and layer is not None:
            yield Problem(
                keys,
                f"{path}.match = {entry.match!r} pairs all layers, but {path}.{name} = {layer}; "
                "set only one of the two",
            )


def _projector(projector: ProjectorConfig, *, has_features: bool) -> Iterator[Problem]:
    path = "objective.projector"
    if not has_features and projector != ProjectorConfig():
        value = projector.model_dump(exclude_defaults=True)
        yield without_effect(path, value, "without objective.features", instead={})
    elif projector.kind == "linear" and projector.hidden_size is not None:
        reason = f"with {path}.kind = 'linear'"
        yield without_effect(f"{path}.hidden_size", projector.hidden_size, reason, instead=None)


def layer_problems(
    features: tuple[FeatureConfig, ...], student_layers: int | None, teacher_layers: int | None
) -> Iterator[Problem]:
    """Find layers that the models do not have, and repeated pairs.

    A depth of None is unknown as yet. Entries with contradictions are skipped.
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
                    f"{path}.{role} = {layer}: the {role} has layers 1 to {depth}, counted from 1; "
                    "lower it",
                )
        if student_layers is None or teacher_layers is None:
            continue
        if entry.match == "last" and teacher_layers < student_layers:
            yield Problem(
                (f"{path}.match", "teacher.architecture.num_layers"),
                f"{path}.match = 'last': the teacher has {counted(teacher_layers, 'layer')}, fewer "
                f"than the student's {student_layers}; use 'uniform', or set {path}.student and "
                f"{path}.teacher",
            )
            continue
        for pair in matched_layers(entry, student_layers, teacher_layers):
            first = seen.setdefault((*pair, entry.loss), path)
            if first != path and (path, first) not in repeated:
                repeated.add((path, first))
                yield Problem(
                    (path, first),
                    f"{path} and {first} both have the {entry.loss} loss of student layer "
                    f"{pair[0]} and teacher layer {pair[1]}. Keep one of them, with the sum of "
                    "the weights",
                )


# Two terms that differ only in these keys would share one name in the log.
_SAME_TERM = {
    "weight",
    "weight_schedule",
    "temperature_schedule",
    "scale_by_temperature_squared",
    *TARGET_KEYS,
}


def objective_problems(config: RunConfig) -> Iterator[Problem]:
    """Find contradictions in the objective."""
    objective = config.objective
    if objective.terms and is_declined(config):
        names = [term.divergence for term in objective.terms]
        yield without_effect("objective.terms", names, "with teacher = null", instead=[])
    elif objective.terms and not config.has_teacher:
        yield Problem(
            ("objective.terms", "teacher"),
            f"objective.terms: {counted(len(objective.terms), 'distillation term')} but teacher = "
            "null; set teacher.hf, teacher.checkpoint or teacher.store, or objective.terms=[]",
        )
    if objective.ce_weight == 0 and not objective.terms and not objective.features:
        yield Problem(
            ("objective.ce_weight", "objective.terms", "objective.features"),
            "objective.ce_weight = 0.0 and objective.terms = []: there is no loss; raise "
            "objective.ce_weight or add a term",
        )
    yield from feature_problems(config)
    for index, term in enumerate(objective.terms):
        is_dense = not stored_teachers_of(config, term)
        yield from _term(f"objective.terms.{index}", term, is_dense=is_dense)
    seen: dict[tuple[object, ...], int] = {}
    for index, term in enumerate(objective.terms):
        last = term.temperature_schedule and term.temperature_schedule.to
        identity = (*term.model_dump(exclude=_SAME_TERM).values(), last, target_of(term))
        first = seen.setdefault(identity, index)
        if first != index:
            yield Problem(
                (f"objective.terms.{index}", f"objective.terms.{first}"),
                f"objective.terms.{index} differs from objective.terms.{first} in its weight at "
                "most; keep one of them, with the sum of the weights",
            )


def _term(path: str, term: TermConfig, *, is_dense: bool) -> Iterator[Problem]:
    if term.weight == 0 and (term.weight_schedule is None or term.weight_schedule.to == 0):
        reason = "on the student: the term is measured but not trained"
        yield without_effect(f"{path}.weight", term.weight, reason, instead=term.weight)
    for name, divergences in PARAMETERS.items():
        value = getattr(term, name)
        if value is not None and term.divergence not in divergences:
            reason = f"with {path}.divergence = {term.divergence!r}"
            yield without_effect(f"{path}.{name}", value, reason, instead=None)
    if term.support != "tail" and term.top_k is None and is_dense:
        reason = f"with {path}.top_k = null, which compares the whole vocabulary"
        yield without_effect(f"{path}.support", term.support, reason, instead="tail")

"""Rules of what balances the losses, and of schedules of weights and temperatures."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_distill.config.messages import Problem, shown
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

__all__ = [
    "balance_problems",
    "feature_problems",
    "layer_problems",
    "matched_layers",
    "objective_problems",
]


# What only ratios have, and the value that asks for nothing.
_OF_RATIOS: dict[str, object] = {
    "raw_losses": "exact",
    "ema": 0.0,
    "clamp": None,
    "epsilon": 1e-8,
    "per_microbatch": False,
}


def balance_problems(config: RunConfig) -> Iterator[Problem]:
    """Say what of `objective.balance` and of the schedules contradicts itself or the rest."""
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
                yield Problem(
                    (f"objective.balance.{name}", "objective.balance.mode"),
                    f"objective.balance.{name} = {shown(value)} is of ratios, and "
                    f"objective.balance.mode = {balance.mode!r} has none; leave it "
                    "out, or choose 'magnitude' or 'gradient_norm'",
                )
    yield from _temperatures(config)


def _schedules(config: RunConfig) -> Iterator[tuple[str, ValueScheduleConfig]]:
    """Every schedule of the objective that is given, under its key."""
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
        yield Problem(
            (key, "objective.balance.mode"),
            f"{key} is given, but objective.balance.mode = 'fixed' changes nothing; set "
            "objective.balance.mode=schedule, or leave the schedule out",
        )
    if (schedule.kind == "constant") != (schedule.steps is None):
        remedy = (
            f"{key}.kind = {schedule.kind!r} needs {key}.steps; give it"
            if schedule.steps is None
            else f"{key}.steps = {schedule.steps}, but {key}.kind = 'constant' jumps at "
            f"{key}.start_step; leave it out"
        )
        yield Problem((f"{key}.steps", f"{key}.kind"), remedy)


def _ratio_targets(config: RunConfig) -> Iterator[Problem]:
    """Find what has no size to be scaled, or to scale to."""
    objective = config.objective
    mode = objective.balance.mode
    if not objective.terms and not objective.features:
        yield Problem(
            ("objective.balance.mode", "objective.terms", "objective.features"),
            f"objective.balance.mode = {mode!r} but objective.terms and objective.features are "
            "empty: there is nothing to scale; add a term, or set objective.balance.mode=fixed",
        )
    end = objective.ce_weight_schedule
    if objective.ce_weight == 0 or (end is not None and end.to == 0):
        key = "objective.ce_weight" + ("" if objective.ce_weight == 0 else "_schedule.to")
        yield Problem(
            ("objective.balance.mode", key),
            f"{key} = 0.0: objective.balance.mode = {mode!r} scales distillation to the "
            "cross-entropy, and there is none; raise it, or set objective.balance.mode=schedule",
        )
    for index, term in enumerate(objective.terms):
        if mode == "magnitude" and term.support == "raw":
            yield Problem(
                ("objective.balance.mode", f"objective.terms.{index}.support"),
                f"objective.terms.{index}.support = 'raw' can be negative, which has no magnitude "
                "to scale by; use 'tail' or 'renormalized', or "
                "objective.balance.mode=gradient_norm",
            )
    for index, feature in enumerate(objective.features):
        if mode == "gradient_norm" and feature.loss == "attention":
            yield Problem(
                ("objective.balance.mode", f"objective.features.{index}.loss"),
                f"objective.features.{index}.loss = 'attention' has gradients on queries and keys, "
                "and objective.balance.mode = 'gradient_norm' compares those on hidden states; use "
                "'mse' or 'cosine', or objective.balance.mode=magnitude",
            )


def _ratio_settings(balance: BalanceConfig) -> Iterator[Problem]:
    if balance.mode == "gradient_norm":
        if balance.raw_losses == "previous":
            yield Problem(
                ("objective.balance.raw_losses", "objective.balance.mode"),
                "objective.balance.raw_losses = 'previous', but with objective.balance.mode = "
                "'gradient_norm' a step leaves no norms of single losses behind; use 'exact'",
            )
        if balance.per_microbatch:
            yield Problem(
                ("objective.balance.per_microbatch", "objective.balance.mode"),
                "objective.balance.per_microbatch = true belongs to objective.balance.mode = "
                "'magnitude', here 'gradient_norm'; leave it out",
            )
        return
    if not balance.per_microbatch:
        return
    if balance.raw_losses == "previous":
        yield Problem(
            ("objective.balance.per_microbatch", "objective.balance.raw_losses"),
            "objective.balance.raw_losses = 'previous', but with objective.balance.per_microbatch "
            "= true no micro-batch has been seen before; use 'exact'",
        )
    if balance.ema:
        yield Problem(
            ("objective.balance.per_microbatch", "objective.balance.ema"),
            f"objective.balance.ema = {balance.ema} averages over steps, but with "
            "objective.balance.per_microbatch = true every micro-batch stands for itself; set "
            "one of the two",
        )


def _temperatures(config: RunConfig) -> Iterator[Problem]:
    is_stored = config.teacher is not None and config.teacher.store is not None
    for index, term in enumerate(config.objective.terms):
        path = f"objective.terms.{index}"
        schedule = term.temperature_schedule
        if schedule is None:
            continue
        if schedule.to == 0:
            yield Problem(
                (f"{path}.temperature_schedule.to",),
                f"{path}.temperature_schedule.to = 0.0: a temperature is above zero; raise it",
            )
        if is_stored and term.support != "renormalized":
            yield Problem(
                (f"{path}.temperature_schedule", f"{path}.support", "teacher.store"),
                f"{path}.temperature_schedule: a store knows its teacher at the temperatures of "
                f"the capture only, unless {path}.support = 'renormalized', here "
                f"{term.support!r}; set it so, or leave the schedule out",
            )


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


# What two terms may differ in and still be one: they would be reported under one name.
_SAME_TERM = {
    "weight",
    "weight_schedule",
    "temperature_schedule",
    "scale_by_temperature_squared",
}


def objective_problems(config: RunConfig) -> Iterator[Problem]:
    """Say what of the objective contradicts itself or the rest."""
    objective = config.objective
    if objective.terms and config.teacher is None:
        yield Problem(
            ("objective.terms", "teacher"),
            f"objective.terms: {len(objective.terms)} distillation term(s) but teacher = null; "
            "give a teacher or set objective.terms=[]",
        )
    if objective.ce_weight == 0 and not objective.terms and not objective.features:
        yield Problem(
            ("objective.ce_weight", "objective.terms", "objective.features"),
            "objective.ce_weight = 0.0 and objective.terms is empty: nothing is trained; raise "
            "objective.ce_weight or add a term",
        )
    yield from feature_problems(config)
    is_stored = config.teacher is not None and config.teacher.store is not None
    for index, term in enumerate(objective.terms):
        yield from _term(f"objective.terms.{index}", term, keeps_all=not is_stored)
    seen: dict[tuple[object, ...], int] = {}
    for index, term in enumerate(objective.terms):
        last = term.temperature_schedule and term.temperature_schedule.to
        what = (*term.model_dump(exclude=_SAME_TERM).values(), last)
        first = seen.setdefault(what, index)
        if first != index:
            yield Problem(
                (f"objective.terms.{index}", f"objective.terms.{first}"),
                f"objective.terms.{index} differs from objective.terms.{first} at most in its "
                "weight; add the weights up in one of them",
            )


def _term(path: str, term: TermConfig, *, keeps_all: bool) -> Iterator[Problem]:
    if term.weight == 0 and (term.weight_schedule is None or term.weight_schedule.to == 0):
        yield Problem(
            (f"{path}.weight", f"{path}.weight_schedule"),
            f"{path}.weight = 0.0: nothing is learned from this term; raise it, or leave the term "
            "out",
        )
    for name, divergences in PARAMETERS.items():
        if getattr(term, name) is not None and term.divergence not in divergences:
            yield Problem(
                (f"{path}.{name}", f"{path}.divergence"),
                f"{path}.{name} = {getattr(term, name)} belongs to {' and '.join(divergences)}, "
                f"here {path}.divergence = {term.divergence!r}; leave it out",
            )
    if term.support != "tail" and term.top_k is None and keeps_all:
        yield Problem(
            (f"{path}.support", f"{path}.top_k"),
            f"{path}.support = {term.support!r} says what becomes of tokens that are not kept, but "
            f"{path}.top_k = null keeps all; give {path}.top_k or leave the support out",
        )

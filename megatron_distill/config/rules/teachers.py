"""Rules on several teachers: their names, the term or sample of each, and stores among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from megatron_distill.config.messages import Problem, without_effect
from megatron_distill.config.rules.teacher_ranks import has_own_ranks
from megatron_distill.config.rules.teacher_stores import several_stores_problems
from megatron_distill.config.rules.teacher_tokenizers import (
    teacher_tokenizer_problems,
)
from megatron_distill.config.schema import (
    ModelConfig,
    RunConfig,
    SourceConfig,
    TermConfig,
)
from megatron_distill.config.schema.data import ConversationFormat

__all__ = ["TARGET_KEYS", "named_teachers", "routed_terms", "target_of", "teacher_problems"]

_WITH_ROWS = get_args(ConversationFormat)
_LISTS = ("sources", "validation_sources")
TARGET_KEYS = ("teacher", "teachers", "mixture", "score", "score_alpha")


def target_of(term: TermConfig) -> tuple[object, ...]:
    """The teachers of a term as its name in the log has them: with rounded shares."""
    weights = {term.teacher: 1.0} if term.teacher else term.teachers or {}
    total = sum(weights.values()) or 1.0
    shares = {name: f"{weight / total:.3g}" for name, weight in sorted(weights.items()) if weight}
    if term.mixture == "lowest_loss":
        return (*shares, term.mixture)
    if len(shares) < 2:
        return tuple(shares.items())
    score = None if term.score is None else (term.score, f"{term.score_alpha:g}")
    return (*shares.items(), term.mixture, score)


def named_teachers(terms: Sequence[TermConfig]) -> set[str]:
    """The teachers that a term names with a weight, and that serve every sample for it."""
    return {
        name
        for term in terms
        for name, weight in ({term.teacher: 1.0} if term.teacher else term.teachers or {}).items()
        if weight
    }


def routed_terms(config: RunConfig) -> list[int]:
    """The numbers of the terms that are trained on the teacher of each sample."""
    if not config.teachers:
        return []
    terms = enumerate(config.objective.terms)
    return [index for index, term in terms if term.teacher is None and term.teachers is None]


def teacher_problems(config: RunConfig) -> Iterator[Problem]:
    """Find contradictions between `teachers` and the keys that refer to them."""
    teachers = config.teachers
    if not teachers:
        yield from _without(config)
        return
    if config.teacher is not None:
        yield Problem(
            ("teacher", "teachers"),
            f"teacher and teachers ({', '.join(teachers)}) are both given; move the first into "
            "teachers under a name of its own, or remove one of the two",
        )
    if not config.objective.terms:
        yield Problem(
            ("objective.terms", "teachers"),
            "objective.terms = []: several teachers serve distillation terms only; add a term, or "
            "remove teachers",
        )
    if not config.data.sources:
        yield Problem(
            ("data.sources", "teachers"),
            "data.sources = []: with several teachers the samples come from a corpus; add a source",
        )
    for index, term in enumerate(config.objective.terms):
        yield from _term(f"objective.terms.{index}", term, teachers)
    yield from _other_losses(config)
    for name, model in teachers.items():
        yield from _model(config, f"teachers.{name}", model)
    routed = routed_terms(config)
    yield from _routing_weights(config, teachers)
    for key, source in _sources(config):
        yield from _source(key, source, config, routed)
    yield from teacher_tokenizer_problems(config, routed)
    yield from several_stores_problems(config)
    yield from _unused(config, routed)


def _without(config: RunConfig) -> Iterator[Problem]:
    """Find keys that refer to teachers which the file does not have."""
    if config.teacher is not None and config.teacher.offload and config.objective.features:
        yield Problem(
            ("teacher.offload", "objective.features"),
            "teacher.offload = true: with objective.features the teacher runs with the student, "
            "layer by layer; set teacher.offload=false",
        )
    alone = config.teacher
    if alone is not None and alone.offload and alone.parallel and not has_own_ranks(config):
        yield Problem(
            ("teacher.offload", "teacher.parallel"),
            "teacher.offload = true: a teacher with a layout of its own keeps its weights on the "
            "GPU; set teacher.offload=false, or divide them further by teacher.parallel",
        )
    reason = "without the section teachers"
    for index, term in enumerate(config.objective.terms):
        path = f"objective.terms.{index}"
        for name in ("teacher", "teachers"):
            value = getattr(term, name)
            if value is not None and config.has_teacher:
                yield Problem(
                    (f"{path}.{name}", "teachers"),
                    f"{path}.{name} = {value!r}: there is no teacher of that name; move teacher "
                    f"into the section teachers, under a name, or remove {path}.{name}",
                )
            elif value is not None:
                yield without_effect(f"{path}.{name}", value, reason, instead=None)
        if term.mixture != "arithmetic" and term.teachers is None:
            yield without_effect(f"{path}.mixture", term.mixture, reason, instead="arithmetic")
        if term.score is not None and term.teachers is None:
            yield without_effect(f"{path}.score", term.score, reason, instead=None)
        yield from _alpha(path, term)
    weights = config.objective.routing_weights
    if weights is not None:
        yield without_effect("objective.routing_weights", weights, reason, instead=None)
    for key, source in _sources(config):
        for name in ("teacher", "teacher_field"):
            value = getattr(source, name)
            if value is not None:
                yield without_effect(f"{key}.{name}", value, reason, instead=None)


def _sources(config: RunConfig) -> Iterator[tuple[str, SourceConfig]]:
    for name in _LISTS:
        for index, source in enumerate(getattr(config.data, name)):
            yield f"data.{name}.{index}", source


def _term(path: str, term: TermConfig, teachers: Mapping[str, ModelConfig]) -> Iterator[Problem]:
    if term.teacher is not None and term.teachers is not None:
        yield Problem(
            (f"{path}.teacher", f"{path}.teachers"),
            f"{path}.teacher = {term.teacher!r} and {path}.teachers = {term.teachers}: set only "
            "one of the two",
        )
    yield from _unknown(f"{path}.teacher", [term.teacher] if term.teacher else [], teachers)
    yield from _unknown(f"{path}.teachers", term.teachers or (), teachers)
    if term.teachers is None or len(term.teachers) < 2:
        if term.mixture != "arithmetic":
            reason = f"without several teachers in {path}.teachers"
            yield without_effect(f"{path}.mixture", term.mixture, reason, instead="arithmetic")
        if term.score is not None:
            reason = f"without several teachers in {path}.teachers"
            yield without_effect(f"{path}.score", term.score, reason, instead=None)
        if term.teachers is None:
            return
    yield from _alpha(path, term)
    yield from _weights(f"{path}.teachers", term.teachers)
    if term.mixture == "lowest_loss" and term.score is not None and len(term.teachers) > 1:
        yield Problem(
            (f"{path}.score", f"{path}.mixture"),
            f"{path}.score = {term.score!r}: with mixture = 'lowest_loss' one teacher is chosen "
            f"and no weight is used; remove {path}.score, or set {path}.mixture=arithmetic",
        )
    if term.mixture == "lowest_loss" and len(set(term.teachers.values())) > 1:
        yield Problem(
            (f"{path}.teachers", f"{path}.mixture"),
            f"{path}.teachers = {term.teachers}: with mixture = 'lowest_loss' one teacher is "
            f"chosen and no weight is used; list the names: {path}.teachers="
            f"[{', '.join(term.teachers)}]",
        )


def _alpha(path: str, term: TermConfig) -> Iterator[Problem]:
    if term.score is None and term.score_alpha != 1.0:
        key = f"{path}.score_alpha"
        yield without_effect(key, term.score_alpha, f"without {path}.score", instead=1.0)


def _unknown(
    key: str, names: Mapping[str, float] | list[str] | tuple[()], teachers: Mapping[str, object]
) -> Iterator[Problem]:
    for name in names:
        if name not in teachers:
            yield Problem(
                (key, "teachers"),
                f"{key}: {name!r} is none of the teachers {', '.join(teachers)}; correct the name, "
                f"or add teachers.{name}",
            )


def _weights(key: str, weights: Mapping[str, float]) -> Iterator[Problem]:
    if min(weights.values()) < 0 or not sum(weights.values()):
        yield Problem(
            (key,),
            f"{key} = {dict(weights)}: weights must be 0 or more, with one above 0; correct them",
        )


def _other_losses(config: RunConfig) -> Iterator[Problem]:
    if config.objective.features:
        yield Problem(
            ("objective.features", "teachers"),
            "objective.features pair the student's layers with those of one teacher; set teacher "
            "in place of teachers, or objective.features=[]",
        )


def _model(config: RunConfig, key: str, model: ModelConfig) -> Iterator[Problem]:
    is_shared = model.store is None and not has_own_ranks(config, key)
    if model.offload and model.parallel and is_shared:
        yield Problem(
            (f"{key}.offload", f"{key}.parallel"),
            f"{key}.offload = true: a teacher with a layout of its own keeps its weights on the "
            f"GPU; set {key}.offload=false, or divide them further by {key}.parallel",
        )


def _routing_weights(config: RunConfig, teachers: Mapping[str, object]) -> Iterator[Problem]:
    key, weights = "objective.routing_weights", config.objective.routing_weights
    if weights is None:
        return
    yield from _unknown(key, weights, teachers)
    yield from _weights(key, weights)
    if not routed_terms(config):
        reason = "because every term names its teachers"
        yield without_effect(key, weights, reason, instead=None)


def _source(
    key: str, source: SourceConfig, config: RunConfig, routed: list[int]
) -> Iterator[Problem]:
    assert config.teachers is not None
    if not routed:
        reason = "because every term names its teachers"
        for name in ("teacher", "teacher_field"):
            value = getattr(source, name)
            if value is not None:
                yield without_effect(f"{key}.{name}", value, reason, instead=None)
        return
    if source.teacher is not None:
        yield from _unknown(f"{key}.teacher", [source.teacher], config.teachers)
    if source.teacher is not None and source.teacher_field is not None:
        yield Problem(
            (f"{key}.teacher", f"{key}.teacher_field"),
            f"{key}.teacher = {source.teacher!r} and {key}.teacher_field = "
            f"{source.teacher_field!r}: set only one of the two",
        )
    if source.teacher_field is not None and source.format not in _WITH_ROWS:
        yield Problem(
            (f"{key}.teacher_field", f"{key}.format"),
            f"{key}.teacher_field: format {source.format} has no rows with fields, only "
            f"{', '.join(_WITH_ROWS)}; set {key}.teacher, or change {key}.format",
        )
    is_known = source.teacher or source.teacher_field or config.objective.routing_weights
    if not is_known:
        yield Problem(
            (f"{key}.teacher", f"{key}.teacher_field", "objective.routing_weights"),
            f"{key}: objective.terms.{routed[0]} names no teacher, so each sample needs one; set "
            f"{key}.teacher or {key}.teacher_field, or objective.routing_weights for all sources "
            "without them",
        )


def _unused(config: RunConfig, routed: list[int]) -> Iterator[Problem]:
    assert config.teachers is not None
    used: set[str] = set()
    for term in config.objective.terms:
        used |= {term.teacher} if term.teacher else set()
        used |= {name for name, weight in (term.teachers or {}).items() if weight}
    if routed:
        used |= {name for name, share in (config.objective.routing_weights or {}).items() if share}
        for _, source in _sources(config):
            used |= {source.teacher} if source.teacher else set()
            used |= set(config.teachers) if source.teacher_field else set()
    if not used <= set(config.teachers):
        return  # a misspelt name, which is reported, may mean any of them
    for name in config.teachers:
        if name not in used:
            yield Problem(
                (f"teachers.{name}",),
                f"teachers.{name}: no term, source or routing weight uses this teacher; remove it, "
                "or name it in one of them",
            )

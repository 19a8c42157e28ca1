"""Rules on several teachers of which one has a tokenizer of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_distill.config.messages import Problem
from megatron_distill.config.schema import JobConfig, ModelConfig, RunConfig

__all__ = ["aligned_role", "own_tokenizers", "teacher_tokenizer_problems"]

_KEYS = ("tokenizer", "sequence_length")


def own_tokenizers(config: RunConfig) -> tuple[str, ...]:
    """The names of the teachers with a tokenizer of their own.

    A term with an alignment names them, or they have the key `tokenizer` or `sequence_length`.
    """
    named = {
        name
        for index, names in _named(config).items()
        if config.objective.terms[index].alignment is not None and len(names) == 1
        for name in names
    }
    return tuple(
        name for name, model in (config.teachers or {}).items() if name in named or _own_keys(model)
    )


def aligned_role(config: JobConfig) -> str:
    """The role of the model with a tokenizer of its own, in a job that is aligned."""
    names = own_tokenizers(config) if isinstance(config, RunConfig) else ()
    return f"teachers.{names[0]}" if names else "teacher"


def teacher_tokenizer_problems(config: RunConfig, routed: list[int]) -> Iterator[Problem]:
    """Find terms and samples that do not fit the tokenizers of `teachers`.

    `routed`: numbers of the terms that are trained on the teacher of each sample.
    """
    own = own_tokenizers(config)
    if len(own) > 1:
        yield Problem(
            tuple(f"teachers.{name}" for name in own),
            f"teachers.{', teachers.'.join(own)}: have tokenizers of their own, and samples are "
            "aligned with one of them; give one of them a run of its own, under teacher",
        )
        return
    yield from _terms(config, own)
    trains = {
        is_aligned: [n for n in routed if _is_aligned(config, n) == is_aligned]
        for is_aligned in (True, False)
    }
    if trains[True] and not own:
        key = f"objective.terms.{trains[True][0]}"
        yield Problem(
            (f"{key}.alignment", "teachers"),
            f"{key}.alignment = {config.objective.terms[trains[True][0]].alignment!r}: no teacher "
            f"has a tokenizer of its own; name it by {key}.teacher, or set tokenizer.path of it",
        )
        return
    for name in own:
        if not any(term.alignment is not None for term in config.objective.terms):
            key = next(key for key in _KEYS if _given(config, name, key))
            yield Problem(
                (f"teachers.{name}.{key}", "objective.terms"),
                f"teachers.{name}.{key} is set, but no term of the objective has an alignment; set "
                f"alignment of the term of this teacher (docs/cross_tokenizer.md), or remove {key}",
            )
            return
    if own and routed:
        yield from _samples(config, own[0], trains)


def _terms(config: RunConfig, own: tuple[str, ...]) -> Iterator[Problem]:
    """Terms whose teachers do not fit their alignment."""
    for index, names in _named(config).items():
        key, term = f"objective.terms.{index}", config.objective.terms[index]
        foreign = [name for name in names if name in own]
        if len(names) > 1 and (foreign or term.alignment is not None):
            which = (
                f"{foreign[0]} has another tokenizer than the student"
                if foreign
                else (f"{key}.alignment is set")
            )
            yield Problem(
                (f"{key}.teachers", f"{key}.alignment"),
                f"{key}.teachers = {dict(term.teachers or {})}: {which}, and a mean or choice of "
                "teachers is defined within one vocabulary; give each teacher a term of its own",
            )
        elif foreign and term.alignment is None:
            yield Problem(
                (f"{key}.alignment", f"{key}.teacher"),
                f"{key}.alignment = null: teacher {foreign[0]!r} has a tokenizer of its own; set "
                f"an alignment (docs/cross_tokenizer.md), or name another teacher",
            )


def _samples(config: RunConfig, own: str, trains: Mapping[bool, list[int]]) -> Iterator[Problem]:
    """Samples whose teacher has no term."""
    targets: dict[str, set[str]] = {}
    for kind in ("sources", "validation_sources"):
        for index, source in enumerate(getattr(config.data, kind)):
            key = f"data.{kind}.{index}"
            if source.teacher is not None:
                targets[f"{key}.teacher"] = {source.teacher}
            elif source.teacher_field is not None:
                targets[f"{key}.teacher_field"] = set(config.teachers or ())
    weights = config.objective.routing_weights or {}
    if any(weights.values()):
        targets["objective.routing_weights"] = {name for name, w in weights.items() if w}
    for key, names in targets.items():
        for is_aligned, found in ((True, names & {own}), (False, names - {own})):
            if found and not trains[is_aligned]:
                name = sorted(found)[0]
                kind = "with an alignment" if is_aligned else "without an alignment"
                yield Problem(
                    (key, "objective.terms"),
                    f"{key}: gives samples to teacher {name!r}, and no term {kind} is without a "
                    "teacher of its own: nothing would be trained on them. Add such a term, or "
                    "name another teacher",
                )


def _named(config: RunConfig) -> dict[int, tuple[str, ...]]:
    """The teachers that each term names, by the term's number."""
    found: dict[int, tuple[str, ...]] = {}
    for index, term in enumerate(config.objective.terms):
        weights = {term.teacher: 1.0} if term.teacher else term.teachers or {}
        names = tuple(name for name, weight in weights.items() if weight)
        if names:
            found[index] = names
    return found


def _is_aligned(config: RunConfig, index: int) -> bool:
    return config.objective.terms[index].alignment is not None


def _own_keys(model: ModelConfig) -> bool:
    return any(getattr(model, key) is not None for key in _KEYS)


def _given(config: RunConfig, name: str, key: str) -> bool:
    return getattr((config.teachers or {})[name], key) is not None

"""Rules on stores among several teachers: their terms, their mixtures and their samples."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_distill.config.messages import Problem
from megatron_distill.config.rules.teacher_tokenizers import own_tokenizers
from megatron_distill.config.schema import ModelConfig, RunConfig, TermConfig

__all__ = ["several_stores_problems", "stored_teachers_of"]


def stored_teachers_of(config: RunConfig, term: TermConfig) -> list[str]:
    """Return the keys of the stored teachers that may serve a term."""
    if not config.teachers:
        is_stored = config.teacher is not None and config.teacher.store is not None
        return ["teacher"] if is_stored else []
    named = [term.teacher] if term.teacher else list(term.teachers or config.teachers)
    return [f"teachers.{name}" for name in named if _is_stored(config, name)]


def _is_stored(config: RunConfig, name: str) -> bool:
    model = (config.teachers or {}).get(name)
    return model is not None and model.store is not None


def several_stores_problems(config: RunConfig) -> Iterator[Problem]:
    """Find what stores among several teachers cannot serve."""
    stored = {name: model for name, model in (config.teachers or {}).items() if model.store}
    for name, model in stored.items():
        yield from _store(f"teachers.{name}", model)
    for index, term in enumerate(config.objective.terms):
        yield from _mixture(f"objective.terms.{index}", term, config)
    if not stored:
        return
    first = f"teachers.{next(iter(stored))}"
    for name in own_tokenizers(config):
        yield Problem(
            (f"{first}.store", f"teachers.{name}"),
            f"{first}.store has samples of one tokenizer, and beside teachers.{name}, which has "
            f"another one, they are packed for both; set {first}.hf in place of its store, or "
            f"remove teachers.{name}",
        )
    for index, source in enumerate(config.data.sources):
        if source.teacher_field is not None:
            key = f"data.sources.{index}.teacher_field"
            yield Problem(
                (key, f"{first}.store"),
                f"{key} = {source.teacher_field!r}: packs the rows of each teacher apart, and "
                f"{first}.store has samples of whole sources; divide the file by that field into "
                f"sources with a `teacher` each, or set {first}.hf in place of its store",
            )


def _store(key: str, model: ModelConfig) -> Iterator[Problem]:
    stores = model.store or ()
    if len(stores) > 1:
        yield Problem(
            (f"{key}.store",),
            f"{key}.store has {len(stores)} entries, but only one store can be joined with "
            "data.sources (by sample number); name one store",
        )


def _mixture(path: str, term: TermConfig, config: RunConfig) -> Iterator[Problem]:
    """Find mixtures that recorded ids do not determine."""
    members = [name for name, weight in (term.teachers or {}).items() if weight]
    stored = [f"teachers.{name}" for name in members if _is_stored(config, name)]
    if not stored or len(members) < 2:
        return
    keys = (f"{path}.teachers", f"{path}.mixture", *(f"{key}.store" for key in stored))
    mixture = f"{path}.mixture = {term.mixture!r}"
    if term.mixture == "lowest_loss":
        if term.top_k is None:
            yield Problem(
                (*keys, f"{path}.top_k"),
                f"{mixture}: compares losses over the whole vocabulary with those on the ids of "
                f"{stored[0]}.store, which are lower; set {path}.top_k for all of them",
            )
        return
    if len(stored) > 1:
        same = (
            f" with the same gradient: {path} with {path}.weight times the teacher's share"
            if term.mixture == "arithmetic" and term.divergence == "forward_kl"
            else ""
        )
        yield Problem(
            keys,
            f"{mixture} of {' and '.join(stored)}: each store has ids of its own, and none has its "
            "probabilities of the ids of another; give each of these teachers a term of its "
            f"own{same}",
        )
    if term.mixture == "geometric" and term.support != "renormalized":
        yield Problem(
            (*keys, f"{path}.support"),
            f"{mixture}: its normaliser is a sum over the whole vocabulary, of which "
            f"{stored[0]}.store has some ids; set {path}.support=renormalized, or "
            f"{path}.mixture=arithmetic",
        )
    if term.mixture == "arithmetic" and term.support == "renormalized":
        yield from _scheduled(path, term, stored[0])


def _scheduled(path: str, term: TermConfig, stored: str) -> Iterator[Problem]:
    if term.temperature_schedule is not None:
        key = f"{path}.temperature_schedule"
        yield Problem(
            (key, f"{path}.mixture", f"{stored}.store"),
            f"{key}: an arithmetic mean needs probabilities, which {stored}.store has at the "
            f"temperatures of its capture only; remove the schedule, or set {path}.mixture="
            "geometric",
        )

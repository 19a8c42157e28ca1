"""Rules on stores and sent top-k among several teachers: terms, mixtures and samples."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_distill.config.messages import Problem
from megatron_distill.config.rules.teacher_ranks import sends_top_k
from megatron_distill.config.rules.teacher_tokenizers import own_tokenizers
from megatron_distill.config.schema import ModelConfig, RunConfig, TermConfig

__all__ = ["several_stores_problems", "stored_teachers_of"]


def stored_teachers_of(config: RunConfig, term: TermConfig) -> list[str]:
    """Return the keys of the stored teachers that may serve a term."""
    if not config.teachers:
        is_stored = config.teacher is not None and config.teacher.store is not None
        return ["teacher"] if is_stored else []
    named = [term.teacher] if term.teacher else list(term.teachers or config.teachers)
    own, is_aligned = own_tokenizers(config), term.alignment is not None
    return [
        f"teachers.{name}"
        for name in named
        if (name in own) == is_aligned and _is_stored(config, name)
    ]


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
    for index, source in enumerate(config.data.sources):
        if source.teacher_field is not None:
            key = f"data.sources.{index}.teacher_field"
            yield Problem(
                (key, f"{first}.store"),
                f"{key} = {source.teacher_field!r}: packs each teacher's rows apart, and "
                f"{first}.store has samples of whole sources. Divide the file by that field into "
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


def _few_ids(config: RunConfig, name: str) -> str | None:
    """Return the key by which a teacher has few ids of each token; None: it has all of them."""
    model = (config.teachers or {}).get(name)
    if model is None:
        return None
    if model.store is not None:
        return f"teachers.{name}.store"
    return f"teachers.{name}.transfer.k" if sends_top_k(config, f"teachers.{name}") else None


def _mixture(path: str, term: TermConfig, config: RunConfig) -> Iterator[Problem]:
    """Find mixtures that few ids of a teacher do not determine."""
    members = [name for name, weight in (term.teachers or {}).items() if weight]
    few = [key for name in members if (key := _few_ids(config, name)) is not None]
    if not few or len(members) < 2:
        return
    keys = (f"{path}.teachers", f"{path}.mixture", *few)
    mixture = f"{path}.mixture = {term.mixture!r}"
    if term.mixture == "lowest_loss":
        stored = [key for key in few if key.endswith(".store")]
        if term.top_k is None and stored:  # sent ones ask for it themselves
            yield Problem(
                (*keys, f"{path}.top_k"),
                f"{mixture}: compares losses over the whole vocabulary with those on the ids of "
                f"{stored[0]}, which are lower; set {path}.top_k for all of them",
            )
        return
    if term.score == "top_probability":
        yield Problem(
            (f"{path}.score", *few),
            f"{path}.score = 'top_probability': {few[0]} gives ids at the term's temperature, and "
            "the score is of temperature one. Set score to cross_entropy or entropy, which it has "
            "of each token",
        )
    if len(few) > 1:
        same = (
            f" with the same gradient: {path} with {path}.weight times the teacher's share"
            if term.mixture == "arithmetic" and term.divergence == "forward_kl"
            else ""
        )
        yield Problem(
            keys,
            f"{mixture} of {' and '.join(few)}: none has probabilities of another's ids; give each "
            f"of these teachers a term of its own{same}",
        )
    if term.mixture == "geometric" and term.support != "renormalized":
        yield Problem(
            (*keys, f"{path}.support"),
            f"{mixture}: its normaliser is a sum over the whole vocabulary, of which "
            f"{few[0]} gives some ids; set {path}.support=renormalized, or "
            f"{path}.mixture=arithmetic",
        )
    if term.mixture == "arithmetic" and term.support == "renormalized":
        yield from _scheduled(path, term, few[0])


def _scheduled(path: str, term: TermConfig, few: str) -> Iterator[Problem]:
    if term.temperature_schedule is not None:
        key = f"{path}.temperature_schedule"
        yield Problem(
            (key, f"{path}.mixture", few),
            f"{key}: an arithmetic mean needs probabilities, which {few} gives at fixed "
            f"temperatures only; remove the schedule, or set {path}.mixture=geometric",
        )

"""Rules of the objective."""

from collections.abc import Iterator

from megatron_distill.config.check_features import feature_problems
from megatron_distill.config.problems import Problem
from megatron_distill.config.schema import PARAMETERS, RunConfig, TermConfig

__all__ = ["objective_problems"]

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

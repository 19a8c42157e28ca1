"""The teacher of each sample, and the share of each teacher, in a run with several."""

from __future__ import annotations

from megatron_distill.config import RunConfig, named_teachers, own_tokenizers, routed_terms
from megatron_distill.data.routing import Routing
from megatron_distill.train.assemble.stores.source import OneOfSeveral
from megatron_distill.train.teachers.serving import UnitShare

__all__ = ["members", "sample_routing", "share_of_units"]


def members(config: RunConfig) -> dict[str, OneOfSeveral]:
    """Return the teachers of `teachers` by role, in the order of their numbers in a batch."""
    named = named_teachers(config.objective.terms)
    own = own_tokenizers(config)
    # Their order in the file changes nothing.
    teachers = sorted((config.teachers or {}).items())
    stored = [name for name, model in teachers if model.store is not None and name not in own]
    drawn = config.objective.routing_weights or {}
    found = [
        OneOfSeveral(
            name,
            number,
            is_named=name in named,
            has_own_tokens=name in own,
            is_drawn=bool(drawn.get(name)),
            column=stored.index(name) if own and name in stored else None,
        )
        for number, (name, _) in enumerate(teachers)
    ]
    return {one.key: one for one in found}


def sample_routing(config: RunConfig) -> Routing | None:
    """Return the routing of samples to teachers; None where every term names its teachers."""
    if not routed_terms(config):
        return None
    names = tuple(sorted(config.teachers or ()))  # as their numbers
    shares = config.objective.routing_weights
    weights = None if shares is None else tuple(shares.get(name, 0.0) for name in names)
    return Routing(names, weights, config.seed)


def share_of_units(teacher: OneOfSeveral | None) -> UnitShare:
    """Return the units that a teacher on ranks of its own runs; None: it is the only one."""
    return UnitShare() if teacher is None or teacher.is_named else UnitShare(teacher.number)

"""The bytes between the ranks of teachers and the student's, in words. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from megatron_distill.config import RunConfig
from megatron_distill.errors import counted
from megatron_distill.models.architecture import Architecture
from megatron_distill.runtime.launch import PRECISIONS
from megatron_distill.runtime.progress import shortened, size
from megatron_distill.runtime.roles import Role, Roles
from megatron_distill.train.assemble.answers.plan import answer_plan, sent_records
from megatron_distill.train.assemble.routing import members, share_of_units
from megatron_distill.train.teachers.answers import AnswerPlan

__all__ = ["exchange_report", "movement_report"]

_OF_LAYER: Final = {"query": "queries", "key": "keys"}


def exchange_report(
    config: RunConfig, roles: Roles, shapes: Mapping[str, Architecture]
) -> Iterator[str]:
    """Yield the answers that each teacher on ranks of its own sends in a step.

    shapes: of the models by role. Raises ConfigError: the ranks do not divide the work.
    """
    precision = PRECISIONS[config.train.precision]
    for role in roles.teachers:
        shape, records = shapes[role.name], sent_records(config, role.name)
        plan = answer_plan(config, role, roles, shape, shapes["student"], precision, records)
        own = members(config).get(role.name)
        is_routed = share_of_units(own).number is not None
        yield from _exchange(plan, roles, is_routed=is_routed)


def _exchange(plan: AnswerPlan, roles: Roles, *, is_routed: bool) -> Iterator[str]:
    routes = plan.step_bytes()
    last = plan.outputs[0]
    several = "" if plan.role == "teacher" else f" of {plan.role}"
    most = "at most " if is_routed else ""
    yield (
        f"answers{several}: {most}{size(sum(routes.values()))} per step, "
        f"{last.bytes_per_token:,} bytes per token and receiving rank; "
        f"{counted(plan.units.micro_batches, 'unit')} per step and replica of the student"
    )
    for output in plan.outputs[1:]:
        kind = "" if output.kind == "output" else f"{_OF_LAYER[output.kind]} of "
        yield (
            f"  {kind}layer {output.layer} of the teacher: from its stage {output.source} to the "
            f"student's stage {output.destination}, {output.bytes_per_token:,} bytes per token"
        )
    yield from shortened(
        [
            f"  {roles.name(source)} to {roles.name(destination)}: {most}{size(count)} per step"
            for (source, destination), count in sorted(routes.items())
        ]
    )
    for stage in sorted({output.destination for output in plan.outputs}):
        where = "last stage" if stage == last.destination else f"stage {stage}"
        held = plan.slot_bytes(plan.student.rank(stage=stage))
        yield (
            f"slots{several}: {size(held)} on each rank of the student's {where}, for "
            f"{counted(plan.blocks, 'step')} ({plan.role}.steps_ahead = {plan.steps_ahead})"
        )


def movement_report(
    config: RunConfig, name: str, roles: Roles, shapes: Mapping[str, Architecture]
) -> Iterator[str]:
    """Yield what a teacher with its own layout moves between the student's ranks in a step.

    name: of the teacher. shapes: of the models by role. Raises ConfigError: a feature loss names a
    layer that its model does not have.
    """
    precision, records = PRECISIONS[config.train.precision], sent_records(config, name)
    role = Role(name, 0, roles.student.size)
    plan = answer_plan(config, role, roles, shapes[name], shapes["student"], precision, records)
    # Positions that a rank has in both layouts stay there.
    moved = {route: count for route, count in plan.step_bytes().items() if route[0] != route[1]}
    most = "at most " if share_of_units(members(config).get(name)).number is not None else ""
    what = "hidden states" if records is None else f"the {records.k} most probable ids"
    yield (
        f"movement of {name}: {most}{size(sum(moved.values()))} of {what} per step from its "
        f"layout to the student's, {plan.outputs[0].bytes_per_token:,} bytes per token of another "
        "rank"
    )
    yield from shortened(
        [
            f"  {roles.name(source)} to {roles.name(destination)}: {most}{size(count)} per step"
            for (source, destination), count in sorted(moved.items())
        ]
    )

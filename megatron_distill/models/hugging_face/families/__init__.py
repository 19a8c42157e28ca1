"""The known families: each is one module of this package with a `FAMILY`."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from megatron_distill.errors import CheckpointError
from megatron_distill.models.hugging_face.family import Family


@cache
def families() -> dict[str, Family]:
    """Return every family by its `model_type`, in alphabetical order."""
    modules = sorted(module.name for module in iter_modules(__path__))
    found = [import_module(f"{__name__}.{name}").FAMILY for name in modules]
    return {family.model_type: family for family in found}


def family_named(model_type: object, *, where: str) -> Family:
    """Return a family by name; for an unknown one raises CheckpointError with the known ones."""
    known = families()
    if not isinstance(model_type, str) or model_type not in known:
        raise CheckpointError(
            f"{where}: model_type {model_type!r} is not supported; supported are "
            f"{', '.join(known)}. docs/extending/adding_a_model_family.md shows how to add one"
        )
    return known[model_type]

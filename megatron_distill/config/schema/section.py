"""Base class of the sections of a configuration file."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["SOURCE_NAME", "Section", "name_of_path"]


class Section(BaseModel):
    """One section of the file: immutable, unknown keys refused, no silent conversion of types.

    Only single values are checked here (type, range, choice). A rule over several keys is a named
    function of `megatron_distill.config.rules.run`. A required key carries an example, which the
    reference page shows and which replaces a wrong value while the rules are checked.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )

    def values_for(self, kind: type[DataclassInstance]) -> dict[str, Any]:
        """Return the values of the keys that are fields of the dataclass `kind` as well."""
        return self.model_dump(include={field.name for field in fields(kind)})


SOURCE_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"


def name_of_path(path: str) -> str:
    """The file's name without its extensions; for a pattern, the name of its folder."""
    for part in reversed(re.split(r"[/\\]", path)):
        name = re.sub(r"[^A-Za-z0-9_-]", "_", part.split(".")[0])
        if not re.search(r"[*?\[]", part) and re.match(SOURCE_NAME, name):
            return name
    return "source"

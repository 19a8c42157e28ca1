"""Base class of the sections of a configuration file."""

from __future__ import annotations

import re
from typing import Final

from pydantic import BaseModel, ConfigDict

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


SOURCE_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"


def name_of_path(path: str) -> str:
    """The file's name without its extensions; for a pattern, the name of its folder."""
    for part in reversed(re.split(r"[/\\]", path)):
        name = re.sub(r"[^A-Za-z0-9_-]", "_", part.split(".")[0])
        if not re.search(r"[*?\[]", part) and re.match(SOURCE_NAME, name):
            return name
    return "source"

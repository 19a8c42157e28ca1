"""What every section of a configuration file has in common."""

from pydantic import BaseModel, ConfigDict

__all__ = ["Section"]


class Section(BaseModel):
    """One section of the file: immutable, unknown keys refused, no silent conversion of types.

    Only single values are checked here (type, range, choice). A rule over several keys is a named
    function of `megatron_distill.config.check`. A required key carries an example, which the
    reference page shows and which stands in for a wrong value while the rules look for more.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )

"""The objective's section knows what the table of divergences knows."""

from __future__ import annotations

import inspect
from typing import get_args

from megatron_distill.config.schema.objective import PARAMETERS, DivergenceName, TermConfig
from megatron_distill.ops.divergences import DIVERGENCES
from megatron_distill.signals import Support


def test_divergences_are_those_of_the_table() -> None:
    assert get_args(DivergenceName) == tuple(DIVERGENCES)
    assert get_args(TermConfig.model_fields["support"].annotation) == get_args(Support)


def test_parameters_are_those_of_the_rows() -> None:
    taken = {
        parameter: tuple(
            name
            for name, make in DIVERGENCES.items()
            if parameter in inspect.signature(make).parameters
        )
        for make in DIVERGENCES.values()
        for parameter in inspect.signature(make).parameters
    }
    assert taken == PARAMETERS


def test_given_parameters_are_handed_on() -> None:
    assert TermConfig().parameters == {}
    assert TermConfig(divergence="js_divergence", beta=0.2).parameters == {"beta": 0.2}

"""Terms: names, the one place of the T^2 convention, and refused values."""

import math

import pytest

from megatron_distill.losses import Term
from megatron_distill.losses.terms import weighted_divergences


def test_temperature_squared_enters_coefficients_once() -> None:
    plain, scaled = (
        Term(weight=0.5, temperature=3.0, scale_by_temperature_squared=scale)
        for scale in (False, True)
    )
    assert weighted_divergences([plain])[0].coefficient == 0.5
    assert weighted_divergences([scaled])[0].coefficient == 4.5
    assert (plain.temperature_factor, scaled.temperature_factor) == (1.0, 9.0)


def test_names_tell_temperatures_apart_and_repetition_is_refused() -> None:
    terms = [Term(), Term(temperature=2.0), Term(temperature=0.5)]
    assert [term.name for term in terms] == ["forward_kl", "forward_kl_t2", "forward_kl_t0.5"]
    assert len(weighted_divergences(terms)) == 3
    with pytest.raises(ValueError, match="terms repeat forward_kl_t2; add their weights up"):
        weighted_divergences([*terms, Term(weight=3.0, temperature=2.0)])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"divergence": "kl"}, "unknown divergence 'kl'"),
        ({"temperature": 0.0}, "temperature of forward_kl is 0.0"),
        ({"temperature": math.inf}, "temperature of forward_kl is inf"),
        ({"weight": math.nan}, "weight of forward_kl is nan"),
    ],
)
def test_impossible_terms_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Term(**values)  # type: ignore[arg-type]

"""Terms: names, the one place of the T^2 convention, and refused values."""

import math
from typing import Any

import pytest

from megatron_distill.losses import Term
from megatron_distill.losses.terms import check_distinct


def test_temperature_squared_enters_coefficients_once() -> None:
    plain, scaled = (
        Term(weight=0.5, temperature=3.0, scale_by_temperature_squared=scale)
        for scale in (False, True)
    )
    assert plain.weighted.coefficient == 0.5
    assert scaled.weighted.coefficient == 4.5
    assert (plain.temperature_factor, scaled.temperature_factor) == (1.0, 9.0)


def test_names_tell_terms_apart_and_repetition_is_refused() -> None:
    terms = [
        Term(),
        Term(temperature=2.0),
        Term(temperature=0.5),
        Term(top_k=8),
        Term(top_k=8, support="raw"),
        Term("js_divergence"),
        Term("js_divergence", parameters={"beta": 0.2}),
    ]
    assert [term.name for term in terms] == [
        "forward_kl",
        "forward_kl_t2",
        "forward_kl_t0.5",
        "forward_kl_top8",
        "forward_kl_top8_raw",
        "js_divergence",
        "js_divergence_beta0.2",
    ]
    check_distinct(terms)
    with pytest.raises(ValueError, match="terms repeat forward_kl_t2; add their weights up"):
        check_distinct([*terms, Term(weight=3.0, temperature=2.0)])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"divergence": "kl"}, "unknown divergence 'kl'"),
        ({"temperature": 0.0}, "temperature of forward_kl is 0.0"),
        ({"temperature": math.inf}, "temperature of forward_kl is inf"),
        ({"weight": math.nan}, "weight of forward_kl is nan"),
        ({"top_k": 0}, "top_k of forward_kl is 0"),
        ({"support": "ghost"}, "support of forward_kl is 'ghost'; known: tail, renorm"),
        ({"parameters": {"beta": 0.5}}, "forward_kl takes no parameter, not 'beta'"),
        (
            {"divergence": "adaptive_kl", "parameters": {"alpha": 0.5}},
            "adaptive_kl takes adaptive_alpha, not 'alpha'",
        ),
        (
            {"divergence": "skewed_reverse_kl", "parameters": {"skew_lambda": 1.0}},
            "skew_lambda is 1.0; it must be at least 0 and less than 1",
        ),
    ],
)
def test_impossible_terms_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Term(**values)

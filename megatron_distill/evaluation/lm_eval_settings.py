"""Settings of generated texts by the names of lm-evaluation-harness, whose import they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from lm_eval.models.utils import normalize_gen_kwargs

from megatron_distill.errors import ConfigError
from megatron_distill.evaluation.requests import GREEDY
from megatron_distill.models.generation import Sampling

__all__ = ["Writing", "writing_settings"]

# Settings of generation that leave the draws of single tokens as they are, with these values.
_NEUTRAL: Final[Mapping[str, Any]] = {
    "num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1, "length_penalty": 1,
    "presence_penalty": 0, "frequency_penalty": 0, "early_stopping": False,
}  # fmt: skip


class Writing(NamedTuple):
    """The settings of a generated text."""

    stops: tuple[str, ...]
    limit: int
    sampling: Sampling


def writing_settings(given: Mapping[str, Any], seed: int) -> Writing:
    """Return the settings of a request: the harness's names, sampling where it samples.

    Raises ConfigError for a setting that the sampler does not have.
    """
    try:
        found: dict[str, Any] = dict(normalize_gen_kwargs(dict(given)))
        stops = tuple(str(stop) for stop in found.pop("until") if stop)
        limit, is_drawn = _whole(found.pop("max_gen_toks")), bool(found.pop("do_sample"))
        temperature = float(found.pop("temperature", 0.0))
        top_k = _whole(_given(found.pop("top_k", None), 0))
        top_p = float(_given(found.pop("top_p", None), 1.0))
        min_p = float(_given(found.pop("min_p", None), 0.0))
        own_seed = _whole(_given(found.pop("seed", None), seed))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"lm-eval: gen_kwargs = {dict(given)}: {error}; correct them") from error
    if limit < 1:
        raise ConfigError(f"lm-eval: max_gen_toks = {limit} in gen_kwargs; give 1 or more")
    if is_drawn and not temperature > 0:
        raise ConfigError(
            f"lm-eval: do_sample = true and temperature = {temperature:g} in gen_kwargs; give a "
            "temperature above 0, or set do_sample to false"
        )
    drawn = Sampling(
        temperature=temperature,
        top_k=top_k if top_k > 0 else None,  # 0 and -1: all tokens
        top_p=top_p,
        min_p=min_p,
        seed=own_seed,
    )
    found.pop("use_cache", None)  # its texts are the same
    for key, value in found.items():
        if value is not None and value != _NEUTRAL.get(key):
            remedy = "give max_gen_toks" if key == "max_length" else "leave it out"
            raise ConfigError(
                f"lm-eval: {key} = {value!r} in gen_kwargs is none of the sampler's settings "
                f"(temperature, top_k, top_p, min_p, seed); {remedy}"
            )
    return Writing(stops, limit, drawn if is_drawn else GREEDY)


def _whole(value: Any) -> int:
    number = int(value)
    if not isinstance(value, int) and number != float(value):
        raise ValueError(f"{value!r} is no whole number")
    return number


def _given(value: Any, default: float) -> Any:
    return default if value is None else value

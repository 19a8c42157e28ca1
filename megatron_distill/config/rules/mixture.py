"""Rules on a mixture of experts: within itself, and against the layout."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_distill.config.messages import Problem, divisors, shown, without_effect
from megatron_distill.config.schema import ArchitectureConfig, MoeConfig, ParallelConfig

__all__ = ["expert_problems"]


def expert_problems(
    shape: ArchitectureConfig, name: str, parallel: ParallelConfig
) -> Iterator[Problem]:
    """Find problems of a model's experts, within themselves and on the layout."""
    if shape.moe is None:
        return
    yield from _layers(shape, shape.moe, f"{name}.moe")
    yield from _shared(shape, shape.moe, f"{name}.moe")
    yield from _routing(shape.moe, f"{name}.moe")
    if shape.moe.top_k > shape.moe.num_experts:
        yield Problem(
            (f"{name}.moe.top_k", f"{name}.moe.num_experts"),
            f"{name}.moe.top_k = {shape.moe.top_k}: more than {name}.moe.num_experts = "
            f"{shape.moe.num_experts}",
        )
    if shape.moe.top_k == 1 and shape.moe.renormalize:
        yield Problem(
            (f"{name}.moe.top_k", f"{name}.moe.renormalize"),
            f"{name}.moe.top_k = 1: with renormalize = true the weight of the expert is always 1, "
            "and the router gets no gradient; set renormalize=false or top_k=2",
        )
    if shape.moe.num_experts % parallel.expert:
        yield Problem(
            ("parallel.expert", f"{name}.moe.num_experts"),
            f"parallel.expert = {parallel.expert}: does not divide {name}.moe.num_experts = "
            f"{shape.moe.num_experts}; use {divisors(shape.moe.num_experts)}",
        )
    if parallel.tensor > 1 and not parallel.sequence:
        yield Problem(
            ("parallel.sequence", "parallel.tensor", f"{name}.moe"),
            f"parallel.sequence = false: {name}.moe with parallel.tensor = {parallel.tensor} "
            "needs sequence parallelism; set parallel.sequence=true",
        )


def _layers(shape: ArchitectureConfig, moe: MoeConfig, name: str) -> Iterator[Problem]:
    key, dense = f"{name}.dense_layers", moe.dense_layers
    depth = f"{name.removesuffix('.moe')}.num_layers"
    if list(dense) != sorted({layer for layer in dense if 0 <= layer < shape.num_layers}):
        yield Problem(
            (key, depth),
            f"{key} = {list(dense)}: list layers in ascending order, counted from 0; the last is "
            f"{shape.num_layers - 1}",
        )
    elif len(dense) == shape.num_layers:
        yield Problem(
            (key, depth),
            f"{key} = {list(dense)}: all layers, so that none has experts; set {name}=null",
        )


def _shared(shape: ArchitectureConfig, moe: MoeConfig, name: str) -> Iterator[Problem]:
    width = f"{name}.shared_ffn_hidden_size"
    if moe.shared_ffn_hidden_size is None:
        if moe.shared_gate:
            yield without_effect(f"{name}.shared_gate", True, f"with {width} = null", instead=False)
    elif shape.linear_bias:
        key = f"{name.removesuffix('.moe')}.linear_bias"
        yield Problem(
            (width, key),
            f"{width} = {moe.shared_ffn_hidden_size}: a shared expert has no biases; set "
            f"{key}=false",
        )


def _routing(moe: MoeConfig, name: str) -> Iterator[Problem]:
    score = f"{name}.score"
    if moe.score == "softmax" and moe.correction_bias:
        yield Problem(
            (f"{name}.correction_bias", score),
            f"{name}.correction_bias = true: needs scores between 0 and 1 for each expert; set "
            "score=sigmoid",
        )
    if moe.score == "sigmoid" and moe.top_k > 1 and not moe.renormalize:
        yield Problem(
            (score, f"{name}.renormalize"),
            f"{name}.renormalize = false: sigmoid scores are always normalised; set "
            "renormalize=true",
        )
    if moe.bias_update_rate and not moe.correction_bias:
        reason = f"with {name}.correction_bias = false"
        key = f"{name}.bias_update_rate"
        yield without_effect(key, moe.bias_update_rate, reason, instead=0.0)
    yield from _groups(moe, name)


def _groups(moe: MoeConfig, name: str) -> Iterator[Problem]:
    key, per_token = f"{name}.groups", f"{name}.groups_per_token"
    groups, chosen = moe.groups, moe.groups_per_token
    if groups is None and chosen is None:
        return
    if groups is None or chosen is None:
        yield Problem(
            (key, per_token),
            f"{key} = {shown(groups)} and {per_token} = {shown(chosen)}: set both or neither",
        )
    elif moe.num_experts % groups:
        yield Problem(
            (key, f"{name}.num_experts"),
            f"{key} = {groups}: does not divide {name}.num_experts = {moe.num_experts}; use "
            f"{divisors(moe.num_experts)}",
        )
    elif chosen > groups or moe.top_k % chosen or moe.top_k // chosen > moe.num_experts // groups:
        yield Problem(
            (per_token, f"{name}.top_k"),
            f"{per_token} = {chosen}: must be at most {key} = {groups} and divide {name}.top_k = "
            f"{moe.top_k}, at most {moe.num_experts // groups} experts in each group",
        )

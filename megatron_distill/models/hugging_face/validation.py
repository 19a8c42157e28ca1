"""What a configuration may say at all, and how `transformers` refuses one."""

from __future__ import annotations

from megatron_distill.errors import CheckpointError
from megatron_distill.models.architecture import Architecture

_COUNTS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_kv_heads",
    "head_size",
    "vocab_size",
    "max_position_embeddings",
)


def config_errors() -> tuple[type[Exception], ...]:
    """Return what `transformers` raises for values that its configurations cannot have."""
    from huggingface_hub.errors import StrictDataclassError

    return (
        StrictDataclassError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
        OSError,
    )


def one_line(error: Exception) -> str:
    """Return an error of `transformers`, whose messages have several lines, as one."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def check_values(architecture: Architecture) -> None:
    """Raise CheckpointError for sizes that no model can have."""
    for name in _COUNTS:
        _check_count(name, getattr(architecture, name))
    heads, groups = architecture.num_attention_heads, architecture.num_kv_heads
    if heads % groups:
        raise CheckpointError(
            f"num_attention_heads = {heads} is no multiple of num_kv_heads = {groups}"
        )
    if architecture.sliding_window is not None:
        _check_count("sliding_window", architecture.sliding_window)
    moe = architecture.moe
    if moe is not None:
        for name in ("num_experts", "top_k", "ffn_hidden_size"):
            _check_count(f"moe.{name}", getattr(moe, name))
        if moe.top_k > moe.num_experts:
            raise CheckpointError(f"{moe.top_k} of {moe.num_experts} experts cannot be chosen")


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{name} is {value!r}; it is an integer of at least 1")

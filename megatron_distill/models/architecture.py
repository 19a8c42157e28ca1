"""The shape of a GPT, as plain values: neither torch nor Megatron-Core is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

# Rows of a grouped product begin at multiples of this.
_ROW_BYTES: Final = 16
# Activations with a gate; the rest are GELUs.
_GATED: Final = ("swiglu", "geglu", "geglu_tanh")


@dataclass(frozen=True)
class MixtureOfExperts:
    """Mixture of experts in the feed-forward layers; one auxiliary loss per sequence."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    aux_loss_coefficient: float = 0.0
    renormalize: bool = True  # the chosen experts' probabilities sum to one
    dense_layers: tuple[int, ...] = ()  # from 0, with the model's dense feed-forward instead
    shared_ffn_hidden_size: int | None = None  # of the expert that sees every token; None: none
    shared_gate: bool = False  # the shared expert's output times the sigmoid of a projection
    score: str = "softmax"  # or "sigmoid", each expert by itself
    correction_bias: bool = False  # added to the scores where experts are chosen, not to weights
    bias_update_rate: float = 0.0  # change of that bias per step, towards equal loads
    groups: int | None = None  # of neighbouring experts; a token's experts are in few of them
    groups_per_token: int | None = None
    weight_scale: float = 1.0  # factor of the chosen experts' weights


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the positions of pretraining.

    `linear` divides all of them by `factor`; `llama3` only the low ones, with a smooth transition
    between the wavelengths `original_positions / low_frequency_factor` and `.../high_...`.
    """

    kind: str  # "linear" or "llama3"
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True)
class Architecture:
    """The fields that determine the parameters and the function of a GPT."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int  # rows of the weights; the tokenizer may have fewer tokens
    max_position_embeddings: int
    norm: str = "rmsnorm"
    norm_epsilon: float = 1e-5
    activation: str = "swiglu"
    positions: str = "rope"
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_fraction: float = 1.0  # of each head, from its start
    sliding_window: int | None = None  # keys that a query sees, itself included
    sliding_layers: tuple[int, ...] | None = None  # None: all, where there is a window
    sliding_rope_base: float | None = None  # unscaled, of the sliding layers; None: rope_base
    attention_scalar: float | None = None  # scores are divided by its square root; None: head_size
    attention_softcap: float | None = None
    post_norms: bool = False  # also after attention and feed-forward, before the residual sum
    embedding_scale: float = 1.0
    qkv_bias: bool = False
    linear_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    init_std: float = 0.02
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    vocab_divisible_by: int = 128
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    moe: MixtureOfExperts | None = None

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward has a gate: three matrices instead of two."""
        return self.activation in _GATED

    @property
    def has_mixed_layers(self) -> bool:
        """Whether some layers have experts and some a dense feed-forward."""
        return self.moe is not None and bool(self.moe.dense_layers)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers with experts, from 0."""
        if self.moe is None:
            return ()
        return tuple(i for i in range(self.num_layers) if i not in self.moe.dense_layers)

    @property
    def is_zero_centered(self) -> bool:
        """Whether a norm's weight is stored as its distance from one."""
        return self.norm == "zero_centered_rmsnorm"

    @property
    def num_sliding_layers(self) -> int:
        """Layers with the sliding window."""
        if self.sliding_window is None:
            return 0
        return self.num_layers if self.sliding_layers is None else len(set(self.sliding_layers))

    def groups_experts(self, width: int, *, tensor: int) -> bool:
        """Return whether a grouped product computes the experts: no biases, aligned rows.

        width: bytes of a weight. tensor: ranks that share one expert.
        """
        if self.moe is None or self.linear_bias:
            return False
        sizes = (self.hidden_size, self.moe.ffn_hidden_size // tensor)
        return all(size * width % _ROW_BYTES == 0 for size in sizes)

    def padded_vocab_size(self, tensor_size: int) -> int:
        """Rows of the embedding over all tensor-parallel ranks: a multiple of the padding unit."""
        unit = self.vocab_divisible_by * tensor_size
        return -(-self.vocab_size // unit) * unit

    def of_layers(self, layers: Sequence[int]) -> Architecture:
        """Return the architecture of a model that has some of the layers."""
        sliding, moe = self.sliding_layers, self.moe
        if sliding is not None:
            sliding = tuple(index for index, layer in enumerate(layers) if layer in sliding)
        if moe is not None:
            dense = tuple(index for index, layer in enumerate(layers) if layer in moe.dense_layers)
            moe = replace(moe, dense_layers=dense)
        return replace(self, num_layers=len(layers), sliding_layers=sliding, moe=moe)

    def as_dict(self) -> dict[str, object]:
        """Return plain values, for a checkpoint's metadata."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> Architecture:
        """Rebuild an architecture from `as_dict`."""
        fields: dict[str, Any] = dict(values)
        if fields.get("moe"):
            moe = dict(fields["moe"])
            moe["dense_layers"] = tuple(moe.get("dense_layers") or ())
            fields["moe"] = MixtureOfExperts(**moe)
        if fields.get("rope_scaling"):
            fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
        if fields.get("sliding_layers") is not None:
            fields["sliding_layers"] = tuple(fields["sliding_layers"])
        return cls(**fields)


# Padding, regularisation and initialisation: a further run may change them.
_NOT_THE_MODEL = frozenset(
    {
        "vocab_divisible_by",
        "attention_dropout",
        "hidden_dropout",
        "init_std",
        "moe.aux_loss_coefficient",
        "moe.bias_update_rate",
    }
)


def architecture_differences(there: Architecture, here: Architecture) -> list[str]:
    """Return the differences between two architectures, by dotted field."""
    theirs, ours = model_fields(there), model_fields(here)
    return [
        f"{key} {theirs.get(key)!r} vs {ours.get(key)!r}"
        for key in {**ours, **theirs}
        if theirs.get(key) != ours.get(key)
    ]


def model_fields(architecture: Architecture) -> dict[str, object]:
    """Flatten an architecture to dotted names, without fields that do not change the model."""
    flat: dict[str, object] = {}
    fields = architecture.as_dict()
    if architecture.sliding_layers == tuple(range(architecture.num_layers)):
        fields["sliding_layers"] = None  # two spellings of all layers
    for key, value in fields.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{name}": inner for name, inner in value.items()})
        else:
            flat[key] = value
    return {key: value for key, value in flat.items() if key not in _NOT_THE_MODEL}

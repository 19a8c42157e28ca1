"""The sections `student` and `teacher`."""

from typing import Literal

from pydantic import Field

from megatron_distill.config.schema.base import Section

__all__ = ["Activation", "ArchitectureConfig", "ModelConfig", "MoeConfig", "Norm", "Positions"]

Norm = Literal["rmsnorm", "layernorm"]
Activation = Literal["swiglu", "geglu", "gelu"]
Positions = Literal["rope", "learned"]


class MoeConfig(Section):
    """Experts in place of the dense feed-forward block of every layer."""

    num_experts: int = Field(ge=2, examples=[8], description="Experts in each layer.")
    top_k: int = Field(default=2, ge=1, description="Experts that each token is sent to.")
    ffn_hidden_size: int | None = Field(
        default=None,
        ge=1,
        description="Inner width of one expert; null takes the `ffn_hidden_size` of the model.",
    )
    aux_loss_coefficient: float = Field(
        default=0.0, ge=0, description="Weight of the load-balancing loss of the router."
    )


class ArchitectureConfig(Section):
    """The shape of a GPT."""

    num_layers: int = Field(ge=1, examples=[16], description="Transformer layers.")
    hidden_size: int = Field(ge=1, examples=[2048], description="Width of the residual stream.")
    ffn_hidden_size: int = Field(
        ge=1, examples=[8192], description="Inner width of the feed-forward block."
    )
    num_attention_heads: int = Field(ge=1, examples=[32], description="Query heads.")
    num_kv_heads: int | None = Field(
        default=None,
        ge=1,
        description="Key/value heads (grouped-query attention); null: one per query head.",
    )
    head_size: int | None = Field(
        default=None,
        ge=1,
        description="Width of one head; null: `hidden_size / num_attention_heads`.",
    )
    vocab_size: int | None = Field(
        default=None,
        ge=2,
        description="Real vocabulary size, before padding; null: the size of the tokenizer.",
    )
    max_position_embeddings: int | None = Field(
        default=None,
        ge=1,
        description="Longest sequence the model may see; null: `data.sequence_length`.",
    )
    norm: Norm = Field(default="rmsnorm", description="Normalisation layers.")
    norm_epsilon: float = Field(default=1e-5, gt=0, description="Epsilon inside the norms.")
    activation: Activation = Field(
        default="swiglu", description="Feed-forward activation; the `glu` ones are gated."
    )
    positions: Positions = Field(default="rope", description="How positions enter the model.")
    rope_base: float = Field(default=10000.0, gt=1, description="Base of the rotary frequencies.")
    qkv_bias: bool = Field(default=False, description="Bias in the query/key/value projection.")
    linear_bias: bool = Field(default=False, description="Bias in all other linear layers.")
    qk_norm: bool = Field(default=False, description="Normalise queries and keys per head.")
    tied_embeddings: bool = Field(
        default=False, description="Use the embedding matrix as the output head."
    )
    init_std: float = Field(
        default=0.02, gt=0, description="Standard deviation of the initial weights."
    )
    attention_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout on attention probabilities."
    )
    hidden_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout on what enters the residual stream."
    )
    vocab_divisible_by: int = Field(
        default=128,
        ge=1,
        description="The vocabulary is padded to a multiple of this times `parallel.tensor`; "
        "padding columns never carry probability.",
    )
    logit_scale: float = Field(
        default=1.0, gt=0, description="Factor on the head's outputs, before any soft cap."
    )
    logit_softcap: float | None = Field(
        default=None, gt=0, description="Soft cap c: logits become `c tanh(logits / c)`."
    )
    moe: MoeConfig | None = Field(default=None, description="Experts; null: a dense model.")

    @property
    def kv_heads(self) -> int:
        """Key/value heads with the null default resolved."""
        return self.num_attention_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        """Width of one head with the null default resolved."""
        if self.head_size is None:
            return self.hidden_size // self.num_attention_heads
        return self.head_size


class ModelConfig(Section):
    """A model: its shape, its initial weights, or both; at least one of them."""

    architecture: ArchitectureConfig | None = Field(
        default=None, description="The shape; null: read from `checkpoint`."
    )
    checkpoint: str | None = Field(
        default=None,
        min_length=1,
        description="Run folder or checkpoint folder with the initial weights; null: random.",
    )

"""The sections `student` and `teacher`."""

from typing import Literal

from pydantic import Field, field_validator

from megatron_distill.config.schema.section import SOURCE_NAME, Section, name_of_path

__all__ = [
    "Activation",
    "ArchitectureConfig",
    "ModelConfig",
    "MoeConfig",
    "Norm",
    "Positions",
    "RopeScalingConfig",
    "StoreSourceConfig",
]

Norm = Literal["rmsnorm", "layernorm", "zero_centered_rmsnorm"]
Activation = Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh"]
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
    renormalize: bool = Field(
        default=True, description="Scale the chosen experts' probabilities to a sum of one."
    )


class RopeScalingConfig(Section):
    """How rotary frequencies are stretched beyond the positions of pretraining."""

    kind: Literal["linear", "llama3"] = Field(
        examples=["llama3"],
        description="`linear` divides every frequency by `factor`, `llama3` only the slow ones.",
    )
    factor: float = Field(ge=1, examples=[32.0], description="What frequencies are divided by.")
    low_frequency_factor: float = Field(
        default=1.0,
        gt=0,
        description="llama3: wavelengths above `original_positions` / this are stretched fully.",
    )
    high_frequency_factor: float = Field(
        default=4.0,
        gt=0,
        description="llama3: wavelengths below `original_positions` / this are left alone.",
    )
    original_positions: int = Field(
        default=8192, ge=1, description="llama3: sequence length of the pretraining."
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
    rope_scaling: RopeScalingConfig | None = Field(
        default=None, description="Stretching of the rotary frequencies; null: none."
    )
    rotary_fraction: float = Field(
        default=1.0, gt=0, le=1, description="Part of each head that rotary positions turn."
    )
    sliding_window: int | None = Field(
        default=None,
        ge=1,
        description="Keys that a query sees, itself included, in `sliding_layers`; null: all.",
    )
    sliding_layers: tuple[int, ...] | None = Field(
        default=None,
        strict=False,
        examples=[[0, 2, 4]],
        description="Layers with the window, from 0; null: all, where there is a window.",
    )
    sliding_rope_base: float | None = Field(
        default=None,
        gt=1,
        description="Rotary base of the sliding layers, unscaled; null: that of the others.",
    )
    attention_scalar: float | None = Field(
        default=None,
        gt=0,
        description="Attention scores are divided by its square root; null: the head size.",
    )
    attention_softcap: float | None = Field(
        default=None, gt=0, description="Soft cap c: scores become `c tanh(scores / c)`."
    )
    post_norms: bool = Field(
        default=False,
        description="Norms behind attention and feed-forward too, before the residual sum.",
    )
    embedding_scale: float = Field(
        default=1.0, gt=0, description="Factor on the token embeddings as they enter the model."
    )
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


class StoreSourceConfig(Section):
    """Teacher stores that are read."""

    path: str = Field(
        min_length=1, examples=["stores/teacher"], description="A store's folder, or a glob."
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        description="Share of the samples of these stores, relative to the other weights.",
    )
    name: str | None = Field(
        default=None,
        pattern=SOURCE_NAME,
        examples=["wiki"],
        description="What the log calls these samples; left out: the folder, for a pattern the "
        "one above it.",
    )

    @property
    def log_name(self) -> str:
        """`name`, or what the path calls itself."""
        return self.name or name_of_path(self.path)


class ModelConfig(Section):
    """A model: its shape, or where it comes from; `hf` and `checkpoint` bring weights along."""

    hf: str | None = Field(
        default=None,
        min_length=1,
        description="Hugging Face folder with config.json and safetensors: shape and weights.",
    )
    architecture: ArchitectureConfig | None = Field(
        default=None, description="The shape; null: read from `hf` or `checkpoint`."
    )
    checkpoint: str | None = Field(
        default=None,
        min_length=1,
        description="Run folder or checkpoint folder with the initial weights; null: random, "
        "where `hf` gives none.",
    )
    keep_layers: tuple[int, ...] | None = Field(
        default=None,
        min_length=1,
        strict=False,
        examples=[[0, 1, 4, 7]],
        description="Student only: the layers of `hf` or `checkpoint`, from 0, that the student "
        "starts with; null: all.",
    )
    num_layers: int | None = Field(
        default=None,
        ge=1,
        description="Student only: keep this many layers, evenly spread, first and last included.",
    )
    store: tuple[StoreSourceConfig, ...] | None = Field(
        default=None,
        min_length=1,
        strict=False,
        description="Teacher only: folder of what it has said (`launch/cache_teacher.py`), a glob, "
        "or a list of `path` and `weight`. No teacher is built then; what else is given of it is "
        "compared with the store's.",
    )

    @field_validator("store", mode="before")
    @classmethod
    def _paths_are_sources(cls, store: object) -> object:
        entries = [store] if isinstance(store, str) else store
        if isinstance(entries, list | tuple):
            return tuple({"path": entry} if isinstance(entry, str) else entry for entry in entries)
        return entries

"""The sections `student` and `teacher`."""

from typing import Any, Literal

from pydantic import Field, field_validator

from megatron_distill.config.schema.data import TokenizerConfig
from megatron_distill.config.schema.section import SOURCE_NAME, Section, name_of_path

__all__ = [
    "Activation",
    "ArchitectureConfig",
    "ModelConfig",
    "MoeConfig",
    "NormName",
    "Positions",
    "RopeScalingConfig",
    "StoreSourceConfig",
    "TeacherParallelConfig",
    "TransferConfig",
]

NormName = Literal["rmsnorm", "layernorm", "zero_centered_rmsnorm"]
Activation = Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh"]
Positions = Literal["rope", "learned"]


class MoeConfig(Section):
    """Mixture of experts in place of the dense feed-forward block."""

    num_experts: int = Field(ge=2, examples=[8], description="Experts per layer.")
    top_k: int = Field(default=2, ge=1, description="Experts per token.")
    ffn_hidden_size: int | None = Field(
        default=None,
        ge=1,
        description="Inner width of one expert; null: the model's `ffn_hidden_size`.",
    )
    aux_loss_coefficient: float = Field(
        default=0.0, ge=0, description="Weight of the router's load-balancing loss."
    )
    renormalize: bool = Field(
        default=True,
        description="Normalise the probabilities of the selected experts to a sum of 1.",
    )
    dense_layers: tuple[int, ...] = Field(
        default=(),
        strict=False,
        examples=[[0]],
        description="Layers without experts, counted from 0; they have the dense block of the "
        "model's `ffn_hidden_size`.",
    )
    shared_ffn_hidden_size: int | None = Field(
        default=None,
        ge=1,
        description="Inner width of a shared expert, which sees every token; null: none.",
    )
    shared_gate: bool = Field(
        default=False,
        description="Multiply the shared expert's output by the sigmoid of a learned projection.",
    )
    score: Literal["softmax", "sigmoid"] = Field(
        default="softmax", description="Function of the router's logits."
    )
    correction_bias: bool = Field(
        default=False,
        description="Add a bias per expert to the scores when experts are selected, not to their "
        "weights (DeepSeek-V3, section 2.1.2).",
    )
    bias_update_rate: float = Field(
        default=0.0,
        ge=0,
        description="Change of that bias per step of the student: up for experts with fewer tokens "
        "than the mean, else down; 0: fixed.",
    )
    groups: int | None = Field(
        default=None,
        ge=2,
        description="Groups of neighbouring experts; a token's experts are in `groups_per_token` "
        "of them. null: no groups.",
    )
    groups_per_token: int | None = Field(
        default=None,
        ge=1,
        description="Groups per token: those with the highest sums of their "
        "`top_k / groups_per_token` best scores.",
    )
    weight_scale: float = Field(
        default=1.0, gt=0, description="Factor of the weights of the selected experts."
    )


class RopeScalingConfig(Section):
    """Scaling of rotary frequencies for sequences longer than in pretraining."""

    kind: Literal["linear", "llama3"] = Field(
        examples=["llama3"],
        description="`linear` divides every frequency by `factor`, `llama3` only low frequencies.",
    )
    factor: float = Field(ge=1, examples=[32.0], description="Divisor of the frequencies.")
    low_frequency_factor: float = Field(
        default=1.0,
        gt=0,
        description="llama3: wavelengths above `original_positions` / this are scaled fully.",
    )
    high_frequency_factor: float = Field(
        default=4.0,
        gt=0,
        description="llama3: wavelengths below `original_positions` / this are not scaled.",
    )
    original_positions: int = Field(
        default=8192, ge=1, description="llama3: sequence length of pretraining."
    )


class ArchitectureConfig(Section):
    """The shape of a GPT."""

    num_layers: int = Field(ge=1, examples=[16], description="Number of transformer layers.")
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
        description="Rows of the embedding and of the output head, at least as many as the "
        "tokenizer has tokens; further rows are padding without probability. null: the tokens of "
        "the tokenizer.",
    )
    max_position_embeddings: int | None = Field(
        default=None,
        ge=1,
        description="Maximum sequence length; null: `data.sequence_length`.",
    )
    norm: NormName = Field(default="rmsnorm", description="Type of the normalisation layers.")
    norm_epsilon: float = Field(default=1e-5, gt=0, description="Epsilon inside the norms.")
    activation: Activation = Field(
        default="swiglu",
        description="Feed-forward activation; `swiglu`, `geglu` and `geglu_tanh` are gated.",
    )
    positions: Positions = Field(default="rope", description="Type of position encoding.")
    rope_base: float = Field(default=10000.0, gt=1, description="Base of the rotary frequencies.")
    rope_scaling: RopeScalingConfig | None = Field(
        default=None, description="Scaling of the rotary frequencies; null: none."
    )
    rotary_fraction: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Fraction of the dimensions of each head that are rotated.",
    )
    sliding_window: int | None = Field(
        default=None,
        ge=1,
        description="Attention window of `sliding_layers` in keys, including the query's own; "
        "null: full attention.",
    )
    sliding_layers: tuple[int, ...] | None = Field(
        default=None,
        strict=False,
        examples=[[0, 2, 4]],
        description="Layers with the window, counted from 0; null: all layers.",
    )
    sliding_rope_base: float | None = Field(
        default=None,
        gt=1,
        description="Rotary base of the layers with the window, without scaling; null: "
        "`rope_base`.",
    )
    attention_scalar: float | None = Field(
        default=None,
        gt=0,
        description="Attention scores are divided by the square root of this; null: the head size.",
    )
    attention_softcap: float | None = Field(
        default=None,
        gt=0,
        description="Soft cap c: scores become `c tanh(scores / c)`; null: none.",
    )
    post_norms: bool = Field(
        default=False,
        description="Add norms after attention and feed-forward, before the residual sum; not "
        "with `moe`.",
    )
    embedding_scale: float = Field(default=1.0, gt=0, description="Factor on the token embeddings.")
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
        default=0.0,
        ge=0,
        lt=1,
        description="Dropout on attention probabilities; not with `attention_softcap`.",
    )
    hidden_dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Dropout before each residual sum and on the embeddings.",
    )
    vocab_divisible_by: int = Field(
        default=128,
        ge=1,
        description="The vocabulary is padded to a multiple of this times `parallel.tensor`; "
        "padding columns have probability 0.",
    )
    logit_scale: float = Field(
        default=1.0, gt=0, description="Factor on the logits, before any soft cap."
    )
    logit_softcap: float | None = Field(
        default=None,
        gt=0,
        description="Soft cap c: logits become `c tanh(logits / c)`; null: none.",
    )
    moe: MoeConfig | None = Field(default=None, description="Experts; null: a dense model.")

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads with the null default resolved."""
        return self.num_attention_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        """Width of one head with the null default resolved."""
        if self.head_size is None:
            return self.hidden_size // self.num_attention_heads
        return self.head_size

    def resolved(self, sequence_length: int, vocab_size: int) -> dict[str, Any]:
        """The fields as plain values, with the null defaults of this length and vocabulary."""
        fields = self.model_dump()
        defaults = {
            "num_kv_heads": self.kv_heads,
            "head_size": self.head_width,
            "vocab_size": vocab_size,
            "max_position_embeddings": sequence_length,
        }
        if self.moe is not None and self.moe.ffn_hidden_size is None:
            fields["moe"]["ffn_hidden_size"] = self.ffn_hidden_size
        return {**fields, **{name: x for name, x in defaults.items() if fields[name] is None}}


class StoreSourceConfig(Section):
    """Teacher stores to read."""

    path: str = Field(
        min_length=1,
        examples=["stores/teacher"],
        description="Folder of a store, or a glob of such folders.",
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        description="Share of these samples in the blend, relative to the other weights.",
    )
    name: str | None = Field(
        default=None,
        pattern=SOURCE_NAME,
        examples=["wiki"],
        description="Name of these samples in the log; null: the folder's name, for a glob that "
        "of the folder above.",
    )

    @property
    def log_name(self) -> str:
        """`name`, or a name derived from the path."""
        return self.name or name_of_path(self.path)


class TeacherParallelConfig(Section):
    """A layout of the teacher that differs from the student's."""

    tensor: int = Field(default=1, ge=1, description="Tensor-parallel size.")
    pipeline: int = Field(default=1, ge=1, description="Pipeline-parallel size.")
    context: int = Field(default=1, ge=1, description="Context-parallel size.")
    expert: int = Field(default=1, ge=1, description="Expert-parallel size.")
    sequence: bool = Field(default=False, description="Sequence parallelism.")
    virtual_pipeline: int | None = Field(
        default=None, description="Always null: a forward pass gains nothing from virtual stages."
    )


class TransferConfig(Section):
    """Answers of a teacher on ranks or in a layout of its own, on their way to the student."""

    what: Literal["hidden", "top_k"] = Field(
        default="hidden",
        description="`hidden`: the last hidden states, for exact losses over the whole vocabulary. "
        "`top_k`: the `k` most probable ids of each token, for terms that a store of them serves.",
    )
    k: int | None = Field(
        default=None, ge=1, examples=[64], description="Ids per token, with `what: top_k`."
    )
    backend: Literal["auto", "nccl", "ipc", "gloo"] = Field(
        default="auto",
        description="With ranks of its own. `gloo`: through host memory and the network. `nccl`: "
        "between GPUs. `ipc`: within one machine, the teacher writes into the student's memory, by "
        "CUDA IPC between GPUs. `auto`: `nccl` where `runtime.backend` is that, `ipc` on a CPU "
        "where all ranks that exchange answers are on one machine, else `gloo`.",
    )


class ModelConfig(Section):
    """A model: its shape, or the source of its weights (`hf` or `checkpoint`)."""

    hf: str | None = Field(
        default=None,
        min_length=1,
        description="Hugging Face folder (config.json and safetensors): shape and weights.",
    )
    architecture: ArchitectureConfig | None = Field(
        default=None, description="Shape of the model; null: that of `hf` or `checkpoint`."
    )
    checkpoint: str | None = Field(
        default=None,
        min_length=1,
        description="Run folder or checkpoint folder with the initial weights; null: those of "
        "`hf`, else random.",
    )
    keep_layers: tuple[int, ...] | None = Field(
        default=None,
        min_length=1,
        strict=False,
        examples=[[0, 1, 4, 7]],
        description="Student only: layers of `hf` or `checkpoint` that are kept, counted from 0 "
        "over the whole model, not per stage; null: all.",
    )
    num_layers: int | None = Field(
        default=None,
        ge=1,
        description="Student only: number of layers of `hf` or `checkpoint` to keep, evenly "
        "spaced, including the first and the last.",
    )
    store: tuple[StoreSourceConfig, ...] | None = Field(
        default=None,
        min_length=1,
        strict=False,
        description="Teacher only: stores of its outputs (`megatron-distill capture`) to read "
        "instead of running a model: folder, glob, or list of `path` and `weight`. Other "
        "keys of `teacher` are compared with the store. One of several teachers has one store.",
    )

    tokenizer: TokenizerConfig | None = Field(
        default=None,
        examples=[{"path": "tokenizers/qwen3"}],
        description="Teacher only: its tokenizer where that is not `data.tokenizer`; null: that "
        "of `teacher.hf`. Used by terms with `alignment`. One of several `teachers` may have it.",
    )
    sequence_length: int | None = Field(
        default=None,
        ge=2,
        description="Teacher only, with terms that have `alignment`: tokens of its own in one "
        "packed sequence; null: `data.sequence_length`. Samples are cut where both are full.",
    )
    fp8: Literal["e4m3", "hybrid"] | None = Field(
        default=None,
        description="Teacher only: the number format of its matrix products, as `train.fp8`.",
    )
    offload_hidden: bool = Field(
        default=False,
        description="Teacher only: keep its hidden states and features of a step in pinned host "
        "memory until the student needs them. Used with pipeline stages, `offload`, or losses "
        "measured in the step (`objective.balance`). Otherwise they wait on the GPU. A hidden "
        "state takes 2 bytes times hidden size per token of the step and replica, divided by "
        "`tensor` with `sequence`. An attention map has the queries and whole-sequence keys of the "
        "rank's heads.",
    )
    parallel: TeacherParallelConfig | None = Field(
        default=None,
        examples=[{"tensor": 8, "pipeline": 4}],
        description="Teacher only: its layout; null: that of `parallel`. The remaining factor is "
        "data-parallel: replicas of the teacher, of any number.",
    )
    offload: bool = Field(
        default=False,
        description="Teacher only: keep the weights of its layers in pinned host memory, as many "
        "bytes for each rank as they have, and copy them to the GPU once in each step that needs "
        "them. The teacher runs before the student; its hidden states of the step then wait on the "
        "GPU.",
    )
    shard_weights: bool = Field(
        default=False,
        description="Teacher only: shard the weights of its layers over its data-parallel and "
        "context ranks. Each layer is gathered while the one before it runs.",
    )
    ranks: int | None = Field(
        default=None,
        ge=1,
        examples=[8],
        description="Teacher only: the last ranks of the launch run the teacher and no student; "
        "null: all ranks run both.",
    )
    nodes: int | None = Field(
        default=None,
        ge=1,
        examples=[1],
        description="Teacher only: ranks as whole machines; null: see ranks.",
    )
    steps_ahead: int = Field(
        default=1,
        ge=0,
        description="Teacher only, on ranks of its own: steps that it may be ahead of the student. "
        "The student's last stage holds the answers of one more step.",
    )
    transfer: TransferConfig = Field(
        default=TransferConfig(),
        description="Teacher only, on ranks of its own or in another layout than the student's: "
        "what it sends to the student, and how.",
    )

    @property
    def has_model(self) -> bool:
        """Whether the section names a model, and not only stores."""
        return self.has_weights or self.architecture is not None

    @property
    def has_weights(self) -> bool:
        """Whether the model's weights are saved ones, and not random."""
        return self.hf is not None or self.checkpoint is not None

    @field_validator("store", mode="before")
    @classmethod
    def _paths_are_sources(cls, store: object) -> object:
        entries = [store] if isinstance(store, str) else store
        if isinstance(entries, list | tuple):
            return tuple({"path": entry} if isinstance(entry, str) else entry for entry in entries)
        return entries

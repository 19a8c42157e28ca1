"""The families of `transformers` that our architecture describes, and their names of weights.

Values are such that each feature bites within the tests' few tokens: windows shorter than the
sequence, soft caps among the scores, rotary wavelengths on both sides of the stretching.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.distributed.megatron_world import SMALL

Weights = dict[str, Tensor]

LLAMA_LIKE = {
    "hidden_size": SMALL["hidden_size"],
    "intermediate_size": SMALL["ffn_hidden_size"],
    "num_hidden_layers": SMALL["num_layers"],
    "num_attention_heads": SMALL["num_attention_heads"],
    "num_key_value_heads": SMALL["num_kv_heads"],
    "vocab_size": SMALL["vocab_size"],
    "max_position_embeddings": SMALL["max_position_embeddings"],
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def split_groups(qkv: Tensor, shape: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values from rows in groups: a group's queries, its key, its value."""
    size, groups = shape["head_size"], shape["num_kv_heads"]
    per_group = shape["num_attention_heads"] // groups
    rows = qkv.view(groups, per_group + 2, size, *qkv.shape[1:])
    parts = (rows[:, :per_group], rows[:, per_group], rows[:, per_group + 1])
    q, k, v = (part.reshape(-1, *qkv.shape[1:]) for part in parts)
    return q, k, v


def llama_names(own: Weights, shape: dict[str, Any]) -> Weights:
    """Our weights, or gradients, under the names of the Llama-like families."""
    found: Weights = {}
    experts: dict[str, list[Tensor]] = {}
    for name, value in own.items():
        new = name.replace("decoder.layers.", "model.layers.").replace(
            "self_attention", "self_attn"
        )
        if "linear_qkv" in name:
            for letter, part in zip("qkv", split_groups(value, shape), strict=True):
                found[new.replace("linear_qkv", f"{letter}_proj")] = part
        elif "local_experts" in name:
            layer = new.split(".experts.")[0]
            kind = "gate_up_proj" if "linear_fc1" in name else "down_proj"
            experts.setdefault(f"{layer}.experts.{kind}", []).append(value)
        elif ".experts.weight" in name:
            grouped = new.replace("weight1", "gate_up_proj").replace("weight2", "down_proj")
            found[grouped] = value
        elif "linear_fc1" in name:
            gate, up = value.chunk(2)
            found[new.replace("linear_fc1", "gate_proj")] = gate
            found[new.replace("linear_fc1", "up_proj")] = up
        else:
            for old, fresh in (
                ("embedding.word_embeddings", "model.embed_tokens"),
                ("decoder.final_layernorm", "model.norm"),
                ("output_layer", "lm_head"),
                ("pre_mlp_layernorm", "post_attention_layernorm"),
                ("linear_proj", "o_proj"),
                ("linear_fc2", "down_proj"),
                ("q_layernorm", "q_norm"),
                ("k_layernorm", "k_norm"),
                ("mlp.router", "mlp.gate"),
                ("expert_bias", "e_score_correction_bias"),
            ):
                new = new.replace(old, fresh)
            found[new] = value
    return found | {name: torch.stack(parts) for name, parts in experts.items()}


def qwen2_moe_names(own: Weights, shape: dict[str, Any]) -> Weights:
    """Our weights, or gradients, under Qwen2-MoE's names: one shared expert and its gate."""
    return {
        name.replace("shared_experts.gate_weight", "shared_expert_gate.weight").replace(
            "shared_experts", "shared_expert"
        ): value
        for name, value in llama_names(own, shape).items()
    }


def gpt2_names(own: Weights, shape: dict[str, Any]) -> Weights:
    """Our weights, or gradients, under GPT-2's names; its matrices lie transposed."""
    found: Weights = {}
    for name, value in own.items():
        part = torch.cat(split_groups(value, shape)) if "linear_qkv" in name else value
        new = name
        for old, fresh in (
            ("embedding.word_embeddings", "transformer.wte"),
            ("embedding.position_embeddings", "transformer.wpe"),
            ("decoder.layers", "transformer.h"),
            ("decoder.final_layernorm", "transformer.ln_f"),
            ("input_layernorm", "ln_1"),
            ("pre_mlp_layernorm", "ln_2"),
            ("self_attention.linear_qkv", "attn.c_attn"),
            ("self_attention.linear_proj", "attn.c_proj"),
            ("linear_fc1", "c_fc"),
            ("linear_fc2", "c_proj"),
        ):
            new = new.replace(old, fresh)
        found[new] = part.t() if ".c_" in new and part.dim() == 2 else part
    return found


def gemma_names(own: Weights, shape: dict[str, Any]) -> Weights:
    """Our weights, or gradients, under the names of Gemma 2 and 3: four norms a layer."""
    renamed = {
        name.replace("pre_mlp_layernorm", "pre_feedforward_layernorm")
        .replace("mlp.post_norm", "post_feedforward_layernorm")
        .replace("self_attention.post_norm", "post_attention_layernorm"): value
        for name, value in own.items()
    }
    return llama_names(renamed, shape)


def phi_names(own: Weights, shape: dict[str, Any]) -> Weights:
    """Our weights, or gradients, under Phi-3's names, which fuse projections."""
    found = llama_names({name: v for name, v in own.items() if not _is_together(name)}, shape)
    for name, value in own.items():
        new = name.replace("decoder.layers.", "model.layers.")
        if "linear_qkv" in name:
            together = torch.cat(split_groups(value, shape))
            found[new.replace("self_attention.linear_qkv", "self_attn.qkv_proj")] = together
        elif "linear_fc1" in name:
            found[new.replace("linear_fc1", "gate_up_proj")] = value
    return found


def _is_together(name: str) -> bool:
    return "linear_qkv" in name or "linear_fc1" in name


@dataclass(frozen=True)
class Family:
    """One family: its class in `transformers`, that class's settings, and our architecture."""

    kind: str
    settings: dict[str, Any]
    changes: dict[str, Any]
    names: Callable[[Weights, dict[str, Any]], Weights] = llama_names

    def reference(self) -> torch.nn.Module:
        """Build the family's own model, randomly initialised."""
        import transformers

        config = getattr(transformers, f"{self.kind}Config")(**self.settings)
        kind = self.kind.removesuffix("Text")
        model_class = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
        return getattr(transformers, model_class)(config).float().eval()  # type: ignore[no-any-return]


def llama_like(
    kind: str,
    settings: dict[str, Any],
    changes: dict[str, Any],
    names: Callable[[Weights, dict[str, Any]], Weights] = llama_names,
) -> Family:
    """Return a family whose configuration has Llama's names."""
    return Family(kind, {**LLAMA_LIKE, **settings}, changes, names)


def rope(kind: str = "default", base: float = 1e4, **more: float) -> dict[str, Any]:
    """Return rotary parameters in the form of `transformers`."""
    return {"rope_type": kind, "rope_theta": base, **more}


GPT2 = {
    "n_embd": 32, "n_inner": 48, "n_layer": 4, "n_head": 4, "n_positions": 32,
    "vocab_size": 200, "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "eager",
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
GPT2_LIKE = {
    "norm": "layernorm", "positions": "learned", "num_kv_heads": 4,
    "qkv_bias": True, "linear_bias": True, "tied_embeddings": True,
}  # fmt: skip
GEMMA = {
    "head_dim": 12, "pad_token_id": None, "tie_word_embeddings": True, "sliding_window": 5,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
GEMMA_LIKE = {
    "norm": "zero_centered_rmsnorm", "activation": "geglu_tanh", "post_norms": True,
    "embedding_scale": SMALL["hidden_size"] ** 0.5, "head_size": 12, "tied_embeddings": True,
    "sliding_window": 5,
}  # fmt: skip
QWEN3_MOE = {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24}


QWEN2_MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
GLM4_MOE = {
    "head_dim": 12, "num_experts_per_tok": 4, "n_routed_experts": 8, "moe_intermediate_size": 24,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    "rope_parameters": rope(partial_rotary_factor=0.5), "num_mtp_layers": 0,
}  # fmt: skip
GLM4_LIKE = {"head_size": 12, "rotary_fraction": 0.5}
GLM4_EXPERTS = {
    "num_experts": 8, "top_k": 4, "ffn_hidden_size": 24, "dense_layers": (0,),
    "shared_ffn_hidden_size": 48, "score": "sigmoid", "correction_bias": True, "weight_scale": 1.5,
}  # fmt: skip


def experts(top_k: int, *, renormalize: bool, **more: Any) -> dict[str, Any]:
    """Return our experts in the size of the tables."""
    return {
        "num_experts": 4,
        "top_k": top_k,
        "ffn_hidden_size": 24,
        "renormalize": renormalize,
        **more,
    }


FAMILIES: dict[str, Family] = {
    "Llama": llama_like("Llama", {}, {}),
    "Llama, tied, long rotary base": llama_like(
        "Llama",
        {"tie_word_embeddings": True, "rope_parameters": rope(base=5e5)},
        {"tied_embeddings": True, "rope_base": 5e5},
    ),
    "Llama, one head per group, wide heads": llama_like(
        "Llama",
        {"num_key_value_heads": 4, "head_dim": 12},
        {"num_kv_heads": 4, "head_size": 12},
    ),
    "Llama 3, stretched": llama_like(
        "Llama",
        {
            "head_dim": 16,
            "rope_parameters": rope(
                "llama3", factor=6.0, low_freq_factor=1.0, high_freq_factor=3.0,
                original_max_position_embeddings=24,
            ),
        },
        {
            "head_size": 16,
            "rope_scaling": {
                "kind": "llama3", "factor": 6.0, "low_frequency_factor": 1.0,
                "high_frequency_factor": 3.0, "original_positions": 24,
            },
        },
    ),
    "Llama, interpolated": llama_like(
        "Llama",
        {"rope_parameters": rope("linear", factor=3.0)},
        {"rope_scaling": {"kind": "linear", "factor": 3.0}},
    ),
    "Mistral": llama_like("Mistral", {"sliding_window": 5}, {"sliding_window": 5}),
    "Qwen2": llama_like("Qwen2", {}, {"qkv_bias": True}),
    "Qwen3": llama_like("Qwen3", {"head_dim": 12}, {"qk_norm": True, "head_size": 12}),
    "Phi-3": llama_like(
        "Phi3",
        {"pad_token_id": None, "rope_parameters": rope(partial_rotary_factor=0.5)},
        {"rotary_fraction": 0.5},
        phi_names,
    ),
    "Gemma 2": llama_like(
        "Gemma2",
        {
            **GEMMA, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 6.0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {
            **GEMMA_LIKE, "sliding_layers": (0, 2), "attention_scalar": 7.0,
            "attention_softcap": 1.5, "logit_softcap": 6.0,
        },
        gemma_names,
    ),
    "Gemma 3": llama_like(
        "Gemma3Text",
        {
            **GEMMA, "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": rope("linear", base=1e5, factor=8.0),
                "sliding_attention": rope(base=1e3),
            },
        },
        {
            **GEMMA_LIKE, "sliding_layers": (0, 1, 3), "qk_norm": True, "rope_base": 1e5,
            "rope_scaling": {"kind": "linear", "factor": 8.0}, "sliding_rope_base": 1e3,
        },
        gemma_names,
    ),
    "Mixtral": llama_like(
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
        {"moe": experts(2, renormalize=True)},
    ),
    "Qwen3-MoE": llama_like(
        "Qwen3Moe",
        {**QWEN3_MOE, "num_experts_per_tok": 2, "norm_topk_prob": True},
        {"qk_norm": True, "moe": experts(2, renormalize=True)},
    ),
    "Qwen3-MoE, weights of all experts": llama_like(
        "Qwen3Moe",
        {**QWEN3_MOE, "num_experts_per_tok": 2, "norm_topk_prob": False},
        {"qk_norm": True, "moe": experts(2, renormalize=False)},
    ),
    "Qwen3-MoE, one expert": llama_like(
        "Qwen3Moe",
        {**QWEN3_MOE, "num_experts_per_tok": 1, "norm_topk_prob": False},
        {"qk_norm": True, "moe": experts(1, renormalize=False)},
    ),
    "Qwen2-MoE": llama_like(
        "Qwen2Moe",
        QWEN2_MOE,
        {
            "qkv_bias": True,
            "moe": experts(2, renormalize=False, shared_ffn_hidden_size=40, shared_gate=True),
        },
        qwen2_moe_names,
    ),
    "Qwen2-MoE, every second layer": llama_like(
        "Qwen2Moe",
        {**QWEN2_MOE, "norm_topk_prob": True, "decoder_sparse_step": 2},
        {
            "qkv_bias": True,
            "moe": experts(
                2, renormalize=True, shared_ffn_hidden_size=40, shared_gate=True,
                dense_layers=(0, 2),
            ),
        },
        qwen2_moe_names,
    ),
    "GLM-4-MoE": llama_like("Glm4Moe", GLM4_MOE, {**GLM4_LIKE, "moe": GLM4_EXPERTS}),
    "GLM-4-MoE, biases and norms of queries, groups": llama_like(
        "Glm4Moe",
        {
            **GLM4_MOE, "attention_bias": True, "use_qk_norm": True, "n_group": 4, "topk_group": 2,
            "first_k_dense_replace": 2,
        },
        {
            **GLM4_LIKE, "qkv_bias": True, "qk_norm": True,
            "moe": {**GLM4_EXPERTS, "groups": 4, "groups_per_token": 2, "dense_layers": (0, 1)},
        },
    ),
    "GPT-2, exact GELU": Family(
        "GPT2",
        {**GPT2, "activation_function": "gelu"},
        {**GPT2_LIKE, "activation": "gelu"},
        gpt2_names,
    ),
    "GPT-2": Family(
        "GPT2",
        {**GPT2, "activation_function": "gelu_new"},
        {**GPT2_LIKE, "activation": "gelu_tanh"},
        gpt2_names,
    ),
}  # fmt: skip

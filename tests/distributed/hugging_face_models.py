"""Small models of every family, written to disk by `transformers` itself.

Shapes that break naive code: an odd number of layers, a head size that is not hidden / heads, a
vocabulary that no tensor size divides, windows shorter than the sequence, rotary wavelengths on
both sides of the stretching, norms and biases far from their initial ones and zeros.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 203
LENGTH = 24
_SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GEMMA = {"head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 16}


def _rope(kind: str = "default", base: float = 1e4, **more: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": base, **more}


# model_type in `transformers`, and its configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {**_SHAPE, "num_key_value_heads": 4}),
    "llama3.1": (
        "llama",
        {
            **_SHAPE, "head_dim": 12, "rms_norm_eps": 1e-5,
            "rope_parameters": _rope(
                "llama3", 5e5, factor=6.0, low_freq_factor=1.0, high_freq_factor=3.0,
                original_max_position_embeddings=24,
            ),
        },
    ),
    "llama3.2": (
        "llama",
        {
            **_SHAPE, "tie_word_embeddings": True,
            "rope_parameters": _rope("linear", factor=3.0),
        },
    ),
    "mistral": ("mistral", {**_SHAPE, "head_dim": 12, "sliding_window": 7}),
    "qwen2": ("qwen2", {**_SHAPE, "tie_word_embeddings": True}),
    "qwen2, windows": (
        "qwen2",
        {**_SHAPE, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**_SHAPE, "head_dim": 12}),
    "gemma2": (
        "gemma2",
        {**_SHAPE, **_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0},
    ),
    "gemma3": (
        "gemma3_text",
        {
            **_SHAPE, **_GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": _rope("linear", 1e5, factor=8.0),
                "sliding_attention": _rope(base=1e3),
            },
        },
    ),
    "phi3": (
        "phi3",
        {**_SHAPE, "sliding_window": 7, "rope_parameters": _rope(partial_rotary_factor=0.5)},
    ),
    "gpt2": (
        "gpt2",
        {
            "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY,
            "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
    "mixtral": (
        "mixtral",
        {**_SHAPE, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            **_SHAPE, "head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "norm_topk_prob": False,
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **_SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            **_SHAPE, "head_dim": 12, "use_qk_norm": True, "attention_bias": True,
            "rope_parameters": _rope(partial_rotary_factor=0.5), "num_mtp_layers": 0,
            "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "n_shared_experts": 2, "moe_intermediate_size": 24, "routed_scaling_factor": 1.5,
        },
    ),
}  # fmt: skip
WITH_EXPERTS = ("mixtral", "qwen3_moe", "qwen2_moe", "glm4_moe")


def save_model(
    folder: Path, name: str, *, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Write a random model of the table, and return its folder."""
    import transformers

    model_type, settings = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **{**settings, **changes})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    for name, bias in model.named_buffers():
        if "correction_bias" in name:
            bias += 0.2 * torch.randn_like(bias)
    model.to(dtype).save_pretrained(folder)
    return folder


def reference(folder: Path) -> Any:
    """Load a folder with `transformers`, in fp32, complete to the last name."""
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    return model.eval()


def tokens() -> Tensor:
    """Two sequences of the vocabulary."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor in a folder's files, by name."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)
        assert not part.keys() & found.keys()
        found |= part
    return found

"""Our GPTs against the same families in `transformers`: logits, loss, and every gradient.

Regimes: heads matched to the wrong group, rotary halves interleaved, a norm in another place or
with another epsilon, a bias left out, gate and up exchanged, an expert's weight normalised
otherwise, a tied embedding that gets half of its gradient.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.megatron_world import SMALL, megatron_groups, small_architecture
from tests.distributed.pool import Pool

LENGTH = 24
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
# Class in `transformers`, its configuration, and our architecture.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Llama": ("Llama", {}, {}),
    "Llama, tied, long rotary base": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
        {"tied_embeddings": True, "rope_base": 5e5},
    ),
    "Llama, one head per group, wide heads": (
        "Llama",
        {"num_key_value_heads": 4, "head_dim": 12},
        {"num_kv_heads": 4, "head_size": 12},
    ),
    "Qwen2": ("Qwen2", {}, {"qkv_bias": True}),
    "Qwen3": ("Qwen3", {"head_dim": 12}, {"qk_norm": True, "head_size": 12}),
    "Mixtral": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
        {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}},
    ),
    "GPT-2": (
        "GPT2",
        {
            "n_embd": 32, "n_inner": 48, "n_layer": 4, "n_head": 4, "n_positions": 32,
            "vocab_size": 200, "bos_token_id": 0, "eos_token_id": 0,
            "activation_function": "gelu", "attn_implementation": "eager",
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
        {
            "norm": "layernorm", "activation": "gelu", "positions": "learned", "num_kv_heads": 4,
            "qkv_bias": True, "linear_bias": True, "tied_embeddings": True,
        },
    ),
}  # fmt: skip


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, SMALL["vocab_size"], (2, LENGTH + 1), generator=generator)


def ours(rank: int, world: int, changes: dict[str, Any]) -> tuple[Any, ...]:
    """Weights, logits, loss and gradients by our own names; to be called in a pool worker."""
    with megatron_groups() as groups:
        from megatron_distill.losses import fused_linear_objective
        from megatron_distill.models.architecture import Execution
        from megatron_distill.models.gpt import build_gpt, hidden_for_head, run_model
        from megatron_distill.train.next_token import _whole_document

        shape = small_architecture(init_std=0.2, **changes)
        execution = Execution(torch.float32, torch.device("cpu"))
        (model,) = build_gpt(shape, groups=groups, execution=execution, seed=11)
        spread(model)
        batch = _whole_document(tokens()[:, :-1])
        hidden = hidden_for_head(run_model(model, batch, context_size=1), groups=groups)
        labels = tokens()[:, 1:].reshape(-1)
        mean = torch.full((labels.numel(),), 1 / labels.numel())
        loss, _ = fused_linear_objective(
            hidden, model.head_weight(), None, labels,
            ce_weights=mean, kd_weights=mean, terms=(), chunk_tokens=7,
        )  # fmt: skip
        loss.backward()
        logits = (hidden @ model.head_weight().t()).detach()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        gradients = {name: gradient_of(p) for name, p in model.named_parameters()}
        return weights, logits, float(loss), gradients


def spread(model: torch.nn.Module) -> None:
    """Make norms and biases, which start at one and zero, different from each other."""
    generator = torch.Generator().manual_seed(6)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


def split_groups(qkv: Tensor, shape: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values from rows in groups: a group's queries, its key, its value."""
    size, groups = shape["head_size"], shape["num_kv_heads"]
    per_group = shape["num_attention_heads"] // groups
    rows = qkv.view(groups, per_group + 2, size, *qkv.shape[1:])
    parts = (rows[:, :per_group], rows[:, per_group], rows[:, per_group + 1])
    q, k, v = (part.reshape(-1, *qkv.shape[1:]) for part in parts)
    return q, k, v


def llama_names(mine: dict[str, Tensor], shape: dict[str, Any]) -> dict[str, Tensor]:
    """Our weights, or gradients, under the names of the Llama-like families."""
    found: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for name, value in mine.items():
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
            ):
                new = new.replace(old, fresh)
            found[new] = value
    return found | {name: torch.stack(parts) for name, parts in experts.items()}


def gpt2_names(mine: dict[str, Tensor], shape: dict[str, Any]) -> dict[str, Tensor]:
    """Our weights, or gradients, under GPT-2's names; its matrices lie transposed."""
    found: dict[str, Tensor] = {}
    for name, value in mine.items():
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


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradients_are_those_of_transformers(pool: Pool, family: str) -> None:
    import transformers

    kind, settings, changes = FAMILIES[family]
    shape = {**SMALL, **changes}
    ((weights, logits, loss, gradients),) = pool.run(1, ours, changes)
    named = gpt2_names if kind == "GPT2" else llama_names
    common = {} if kind == "GPT2" else LLAMA_LIKE
    config = getattr(transformers, f"{kind}Config")(**{**common, **settings})
    model_class = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    reference = getattr(transformers, model_class)(config).float().eval()
    missing, surplus = reference.load_state_dict(named(weights, shape), strict=False)
    assert not surplus
    assert [name for name in missing if name != "lm_head.weight"] == []
    assert bool(missing) == shape.get("tied_embeddings", False)
    expected = reference(tokens()[:, :-1]).logits
    scale = float(expected.detach().abs().max())
    assert scale > 3, "logits so small would hide a mistake"
    torch.testing.assert_close(
        logits.view_as(expected), expected.detach(), atol=2e-6 * scale, rtol=0
    )
    expected_loss = torch.nn.functional.cross_entropy(
        expected.flatten(0, 1), tokens()[:, 1:].reshape(-1)
    )
    assert loss == pytest.approx(float(expected_loss.detach()), rel=2e-6)
    expected_loss.backward()
    parameters = dict(reference.named_parameters())
    found = named(gradients, shape)
    assert set(found) == set(parameters) - ({"lm_head.weight"} if missing else set())
    for name, gradient in found.items():
        theirs = parameters[name].grad
        assert theirs is not None
        bound = 2e-5 * float(theirs.abs().max())
        torch.testing.assert_close(
            gradient, theirs, atol=bound, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )

"""Our GPTs against the same models in `transformers`: logits, loss, and every gradient.

The gradients of `transformers` are saved in the place of weights and read under our names, by the
rules that read its weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.hugging_face_models import MODELS, reference, save_model, tokens
from tests.distributed.megatron_world import SMALL, build, megatron_groups, small_architecture
from tests.distributed.pool import Pool

# Of the same models, what decides which branch is computed.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "exact GELU": ("gpt2", {"activation_function": "gelu"}),
    "chosen experts' weights sum up to one": ("qwen3_moe", {"norm_topk_prob": True}),
    "one expert per token": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "experts in every second layer": (
        "qwen2_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
    "no biases and no norms of queries": (
        "glm4_moe", {"attention_bias": False, "use_qk_norm": False},
    ),
    "groups of experts": (
        "glm4_moe",
        {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
    ),
}  # fmt: skip
CASES = {**{name: (name, {}) for name in MODELS}, **VARIANTS}


def ours(
    rank: int, world: int, folder: Path, gradients: Path
) -> tuple[Tensor, float, dict[str, tuple[Tensor, Tensor]]]:
    """Logits, loss, and of each parameter our gradient beside that of `transformers`."""
    with megatron_groups() as groups:
        from megatron_distill.losses import fused_linear_objective
        from megatron_distill.models.gpt import (
            hidden_for_head,
            run_model,
            vocab_shard,
        )
        from megatron_distill.models.hugging_face.description import describe
        from megatron_distill.models.hugging_face.model import HuggingFaceWeights
        from megatron_distill.models.weights import fill
        from megatron_distill.ops import LogitRule
        from megatron_distill.runtime.batch import Batch

        shape = describe(folder).architecture
        rule = LogitRule(shape.logit_softcap, shape.logit_scale)
        (model,) = build(shape, groups, seed=None)
        fill([model], HuggingFaceWeights(folder, describe(folder)), groups=groups)
        model.eval()
        batch = Batch.untrained(tokens()[:, :-1])
        hidden = hidden_for_head(run_model(model, batch, context_size=1), groups=groups)
        labels = tokens()[:, 1:].reshape(-1)
        mean = torch.full((labels.numel(),), 1 / labels.numel())
        loss, _ = fused_linear_objective(
            hidden, model.head_weight(), None, labels,
            ce_weights=mean, kd_weights=mean, terms=(), chunk_tokens=7,
            shard=vocab_shard(shape, groups), student_softcap=shape.logit_softcap,
            student_scale=shape.logit_scale,
        )  # fmt: skip
        loss.backward()
        logits = rule.apply_((hidden @ model.head_weight().t()).detach())
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        fill([model], HuggingFaceWeights(gradients, describe(gradients)), groups=groups)
        both = {}
        for name, parameter in model.named_parameters():
            gradient = found[name]
            assert gradient is not None, name
            both[name] = gradient, parameter.detach()
        return logits[:, : shape.vocab_size], float(loss), both


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_are_those_of_transformers(
    pool: Pool, tmp_path: Path, case: str
) -> None:
    name, changes = CASES[case]
    folder = save_model(tmp_path / "model", name, **changes)
    model = reference(folder)
    expected = model(tokens()[:, :-1]).logits
    scale = float(expected.detach().abs().max())
    assert scale > 3, "logits so small would hide a mistake"
    expected_loss = torch.nn.functional.cross_entropy(
        expected.flatten(0, 1), tokens()[:, 1:].reshape(-1)
    )
    expected_loss.backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(tmp_path / "gradients")
    ((logits, loss, gradients),) = pool.run(1, ours, folder, tmp_path / "gradients")
    torch.testing.assert_close(
        logits.view_as(expected), expected.detach(), atol=2e-6 * scale, rtol=0
    )
    assert loss == pytest.approx(float(expected_loss.detach()), rel=2e-6)
    for key, (gradient, other) in gradients.items():
        bound = 2e-5 * float(other.abs().max())
        assert bound > 0, key
        torch.testing.assert_close(
            gradient, other, atol=bound, rtol=0, msg=lambda m, n=key: f"{n}: {m}"
        )


def _in_bf16(rank: int, world: int) -> tuple[float, Tensor, Tensor]:
    """The embedding's factor, and a norm's output and weight gradient, of a Gemma-like model."""
    with megatron_groups() as groups:
        from megatron_distill.models.execution import Execution
        from megatron_distill.models.gpt import build_gpt

        shape = small_architecture(
            norm="zero_centered_rmsnorm", embedding_scale=SMALL["hidden_size"] ** 0.5
        )
        execution = Execution(torch.bfloat16, torch.device("cpu"))
        (model,) = build_gpt(shape, groups=groups, execution=execution, seed=11)
        norm = model.decoder.final_layernorm
        generator = torch.Generator().manual_seed(6)
        norm.weight.data += 0.3 * torch.randn(norm.weight.shape, generator=generator)
        normed = norm(some_states())
        normed.sum().backward()
        return model.embedding_scale, normed.detach(), torch.stack((norm.weight, norm.weight.grad))


def some_states() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return (3 * torch.randn(5, 2, SMALL["hidden_size"], generator=generator)).bfloat16()


def test_gemma_rounds_where_its_own_code_does(pool: Pool) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    ((scale, normed, (weight, gradient)),) = pool.run(1, _in_bf16)
    assert scale == float(torch.tensor(SMALL["hidden_size"] ** 0.5).bfloat16())
    reference = Gemma3RMSNorm(SMALL["hidden_size"], eps=1e-5).bfloat16()
    reference.weight.data.copy_(weight)
    expected = reference(some_states())
    expected.sum().backward()
    assert torch.equal(normed, expected)
    assert reference.weight.grad is not None
    torch.testing.assert_close(gradient, reference.weight.grad, atol=0, rtol=2**-7)

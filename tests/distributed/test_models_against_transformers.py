"""Our GPTs against the same families in `transformers`: logits, loss, and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.megatron_world import SMALL, megatron_groups, small_architecture
from tests.distributed.pool import Pool
from tests.distributed.transformers_families import FAMILIES

LENGTH = 24


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, SMALL["vocab_size"], (2, LENGTH + 1), generator=generator)


def ours(rank: int, world: int, changes: dict[str, Any]) -> tuple[Any, ...]:
    """Weights, logits, loss and gradients by our own names; to be called in a pool worker."""
    with megatron_groups() as groups:
        from megatron_distill.losses import fused_linear_objective
        from megatron_distill.models.architecture import Execution
        from megatron_distill.models.gpt import build_gpt, hidden_for_head, run_model
        from megatron_distill.ops import LogitRule
        from megatron_distill.train.next_token import _whole_document

        shape = small_architecture(init_std=0.2, **changes)
        rule = LogitRule(shape.logit_softcap, shape.logit_scale)
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
            student_softcap=shape.logit_softcap, student_scale=shape.logit_scale,
        )  # fmt: skip
        loss.backward()
        logits = rule.apply_((hidden @ model.head_weight().t()).detach())
        state = model.state_dict().items()
        weights = {name: value.clone() for name, value in state if isinstance(value, Tensor)}
        gradients = {name: gradient_of(p) for name, p in model.named_parameters()}
        return weights, logits, float(loss), gradients


def spread(model: torch.nn.Module) -> None:
    """Make norms and biases, which start at one and zero, different from each other."""
    generator = torch.Generator().manual_seed(6)
    for value in model.state_dict().values():
        if isinstance(value, Tensor) and value.dim() == 1:
            value += 0.3 * torch.randn(value.shape, generator=generator)


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradients_are_those_of_transformers(pool: Pool, family: str) -> None:
    chosen = FAMILIES[family]
    shape = {**SMALL, **chosen.changes}
    ((weights, logits, loss, gradients),) = pool.run(1, ours, chosen.changes)
    reference = chosen.reference()
    missing, surplus = reference.load_state_dict(chosen.names(weights, shape), strict=False)
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
    found = chosen.names(gradients, shape)
    assert set(found) == set(parameters) - ({"lm_head.weight"} if missing else set())
    for name, gradient in found.items():
        other = parameters[name].grad
        assert other is not None
        bound = 2e-5 * float(other.abs().max())
        torch.testing.assert_close(
            gradient, other, atol=bound, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def _in_bf16(rank: int, world: int) -> tuple[float, Tensor, Tensor]:
    """The embedding's factor, and a norm's output and weight gradient, of a Gemma-like model."""
    with megatron_groups() as groups:
        from megatron_distill.models.architecture import Execution
        from megatron_distill.models.gpt import build_gpt

        shape = small_architecture(**FAMILIES["Gemma 3"].changes)
        execution = Execution(torch.bfloat16, torch.device("cpu"))
        (model,) = build_gpt(shape, groups=groups, execution=execution, seed=11)
        spread(model)
        norm = model.decoder.final_layernorm
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

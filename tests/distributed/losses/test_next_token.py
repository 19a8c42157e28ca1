"""Logits of the next token against a plain forward pass, in one process and in several."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.megatron_world import build, megatron_groups, small_architecture
from tests.distributed.pool import Pool

LENGTH = 11
VOCAB = 197
SCALE = 0.7
# Real ids of a vocabulary whose other rows are padding.
REAL = 203


def prompt() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(2))


def _changes(logit_softcap: float | None) -> dict[str, Any]:
    # Large weights, so that a cap bends the logits; a vocabulary with padding columns.
    scale = 1.0 if logit_softcap is None else SCALE
    changes = {"logit_softcap": logit_softcap, "logit_scale": scale}
    return {"vocab_size": VOCAB, "init_std": 0.5, **changes}


def _next(
    rank: int, world: int, layout: dict[str, Any], logit_softcap: float | None
) -> torch.Tensor:
    with megatron_groups(**layout) as groups:
        from megatron_distill.train.next_token import logits_after

        architecture = small_architecture(**_changes(logit_softcap))
        (model,) = build(architecture, groups, seed=11)
        found = logits_after(
            model,
            prompt(),
            positions=slice(LENGTH - 1, LENGTH),
            architecture=architecture,
            groups=groups,
            device=torch.device("cpu"),
        )
        return found[:, 0]


def _oracle(rank: int, world: int, logit_softcap: float | None) -> torch.Tensor:
    """Every position's logits [b, s, vocabulary] from the whole head in float64."""
    with megatron_groups() as groups:
        from megatron_distill.models.gpt import run_model
        from megatron_distill.runtime.batch import Batch

        architecture = small_architecture(**_changes(logit_softcap))
        (model,) = build(architecture, groups, seed=11)
        with torch.no_grad():
            hidden_sbh = run_model(model, Batch.untrained(prompt()), context_size=1)
            logits = hidden_sbh.transpose(0, 1).double() @ model.head_weight()[:VOCAB].double().T
            if logit_softcap is None:
                return logits
            return logit_softcap * (SCALE * logits / logit_softcap).tanh()


LAYOUTS: list[dict[str, Any]] = [
    {"tensor": 2, "sequence": True},
    {"pipeline": 2},
    {"tensor": 2, "pipeline": 2},
]


@pytest.mark.parametrize(
    ("layout", "logit_softcap"), [({}, None), *((one, 3.0) for one in LAYOUTS)], ids=str
)
def test_every_rank_of_every_layout_sees_the_last_positions_logits(
    pool: Pool, layout: dict[str, Any], logit_softcap: float | None
) -> None:
    (everywhere,) = pool.run(1, _oracle, logit_softcap)
    world = layout.get("tensor", 1) * layout.get("pipeline", 1)
    found = pool.run(world, _next, layout, logit_softcap)
    assert found[0].dtype == torch.float32
    for logits in found:
        assert torch.equal(logits, found[0]), "ranks would write different texts"
    torch.testing.assert_close(found[0].double(), everywhere[:, -1], atol=2e-5, rtol=2e-5)


def _padded(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the real ids, and of all rows, of a head whose padding is always the largest."""
    with megatron_groups(tensor=world) as groups:
        from megatron_distill.models.gpt import vocab_shard
        from megatron_distill.train.next_token import logits_after

        architecture = small_architecture(vocab_size=216)
        (model,) = build(architecture, groups, seed=11)
        shard = vocab_shard(architecture, groups, tokens=REAL)
        with torch.no_grad():
            head = model.head_weight()
            head[shard.real_width :] *= 50
        tokens = torch.arange(14).view(2, 7)
        real, every = (
            logits_after(
                model,
                tokens,
                positions=slice(6, 7),
                architecture=architecture,
                groups=groups,
                device=torch.device("cpu"),
                vocab_size=size,
            )[:, 0]
            for size in (REAL, None)
        )
        return real, every


@pytest.mark.parametrize("world", [1, 4])
def test_padding_is_never_the_next_token(pool: Pool, world: int) -> None:
    for real, every in pool.run(world, _padded):
        assert real.shape == (2, REAL)
        assert every.shape == (2, 216)
        assert torch.equal(real, every[:, :REAL])
        assert bool((every.argmax(-1) >= REAL).all()), "else this test shows nothing"

"""Log-probabilities of written ids by the forward pass of training, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed.generation.test_answer_scores import CAPPED, MOE, TOKENS, VOCAB, world_of
from tests.distributed.megatron_world import build, megatron_groups, small_architecture
from tests.distributed.pool import Pool

Texts = list[tuple[tuple[int, ...], tuple[int, ...]]]
LogProbs = list[tuple[float, ...]]
POSITIONS = 48


def texts() -> Texts:
    """Prompts from one id on, and written ids up to the last position; an odd number of them."""
    generator = torch.Generator().manual_seed(5)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(TOKENS, (count,), generator=generator).tolist())

    return [(ids(begun), ids(count)) for begun, count in ((1, 9), (30, POSITIONS - 30), (7, 1))]


def _architecture(changes: dict[str, Any]) -> Any:
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "init_std": 0.2}
    return small_architecture(**sizes, **changes)


def _dense(rank: int, world: int, changes: dict[str, Any]) -> LogProbs:
    """Each text alone, unpadded, with whole logits in float64."""
    with megatron_groups() as groups:
        from megatron_distill.models.gpt import run_model
        from megatron_distill.runtime.batch import Batch

        shape = _architecture(changes)
        (model,) = build(shape, groups, seed=11)
        model.eval()
        found = []
        for prompt, written in texts():
            batch = Batch.untrained(torch.tensor([[*prompt, *written]]))
            with torch.no_grad():
                hidden_sH = run_model(model, batch, context_size=1)[len(prompt) - 1 : -1, 0]
                logits = hidden_sH.double() @ model.head_weight()[:TOKENS].double().T
            logits = logits * shape.logit_scale
            if shape.logit_softcap is not None:
                logits = shape.logit_softcap * (logits / shape.logit_softcap).tanh()
            own = logits.log_softmax(-1).gather(1, torch.tensor(written)[:, None])
            found.append(tuple(own[:, 0].tolist()))
        return found


def _by_forward(
    rank: int, world: int, layout: dict[str, Any], changes: dict[str, Any]
) -> tuple[LogProbs, LogProbs]:
    """By the forward pass, and of the same ids by the cache."""
    with megatron_groups(**layout) as groups:
        from megatron_distill.models.generation import ScoreRow
        from megatron_distill.models.generation.model import CachedGPT
        from megatron_distill.train.evaluation.forward_log_probs import forward_log_probs

        shape = _architecture(changes)
        chunks = build(shape, groups, seed=11)
        model = CachedGPT(chunks, shape, groups, torch.device("cpu"), vocab_size=TOKENS)
        cached = model.score([ScoreRow(prompt, (written,)) for prompt, written in texts()])
        found = forward_log_probs(model, texts())
        assert all(chunk.training for chunk in chunks), "the mode stays"
        assert forward_log_probs(model, []) == []
        return found, [scores[0].log_probs for scores in cached]


LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"tensor": 2, "pipeline": 2}, CAPPED),
    ({"tensor": 2}, CAPPED),
    ({"tensor": 2, "sequence": True}, {}),
    ({"pipeline": 2, "virtual_pipeline": 2}, {"tied_embeddings": True}),
    ({"context": 2}, {"positions": "learned"}),
    ({"tensor": 2, "context": 2, "sequence": True}, {}),
    ({"expert": 2}, {"moe": MOE}),
    ({"pipeline": 2, "expert": 2}, {"moe": MOE}),
]
QUICK = LAYOUTS[:2]


@pytest.fixture(scope="module")
def dense(pool: Pool) -> Callable[[dict[str, Any]], LogProbs]:
    """The log-probabilities of a model's whole logits, computed once for each model."""
    known: dict[str, LogProbs] = {}

    def of(changes: dict[str, Any]) -> LogProbs:
        if str(changes) not in known:
            (known[str(changes)],) = pool.run(1, _dense, changes)
        return known[str(changes)]

    return of


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow, id=str(one))
        for one in LAYOUTS
    ],
)
def test_the_forward_pass_and_the_cache_equal_a_dense_log_softmax(
    pool: Pool,
    dense: Callable[[dict[str, Any]], LogProbs],
    layout: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    world = max(world_of(layout), layout.get("pipeline", 1) * layout.get("expert", 1))
    for both in pool.run(world, _by_forward, layout, changes):
        for found in both:
            for own, expected in zip(found, dense(changes), strict=True):
                assert own == pytest.approx(expected, abs=1e-5)

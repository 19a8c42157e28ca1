"""Scores of answers in every layout against a dense float64 log-softmax in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron_distill.evaluation.requests import Request, Score
from tests.distributed.megatron_world import build, megatron_groups, small_architecture
from tests.distributed.pool import Pool

# The last three rows of the head are no tokens, and tensor parallelism adds more.
VOCAB, TOKENS = 200, 197
POSITIONS = 24
MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}


def requests(seed: int = 5) -> list[Request]:
    """Answers of one and of several tokens, choices of one context, and contexts that are cut."""
    rng = np.random.default_rng(seed)

    def ids(count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return rng.integers(0, TOKENS, count).astype(np.int32)

    found = []
    for length in (3, 9, 17, 20):
        context = ids(length)
        found += [Request(context, ids(1)) for _ in range(4)]
        found += [Request(context, ids(count)) for count in (2, 5)]
    found += [Request(ids(POSITIONS + 9), ids(3)), Request(ids(1), ids(POSITIONS + 4))]
    found.append(Request(ids(4), ids(0)))
    examples = ids(12)  # that several contexts begin with
    for _ in range(5):
        context = np.concatenate([examples, ids(3)])
        found += [Request(context, ids(count)) for count in (1, 1, 3, 4)]
    return found


def _architecture(changes: dict[str, Any]) -> Any:
    # Large weights, so that a cap bends the logits.
    return small_architecture(vocab_size=VOCAB, init_std=0.5, **changes)


def _dense(
    rank: int, world: int, changes: dict[str, Any], greedy: bool = False
) -> list[tuple[float, bool]]:
    """Each request alone, unpadded, with whole logits in float64; or the greedy tokens."""
    with megatron_groups() as groups:
        from megatron_distill.evaluation.requests import model_input
        from megatron_distill.models.gpt import run_model
        from megatron_distill.runtime.batch import Batch

        architecture = _architecture(changes)
        (model,) = build(architecture, groups, seed=11)
        model.eval()
        found = []
        for request in requests():
            tokens, count = model_input(request, POSITIONS)
            batch = Batch.untrained(torch.from_numpy(tokens.astype(np.int64))[None])
            with torch.no_grad():
                hidden_sH = run_model(model, batch, context_size=1)[:, 0]
                logits = hidden_sH.double() @ model.head_weight()[:TOKENS].double().T
            logits = logits * architecture.logit_scale
            if architecture.logit_softcap is not None:
                logits = architecture.logit_softcap * (logits / architecture.logit_softcap).tanh()
            log_probs = logits.log_softmax(-1)[len(tokens) - count :]
            answer = torch.from_numpy(request.answer[len(request.answer) - count :].astype(int))
            own = log_probs.gather(1, answer[:, None]).sum()
            found.append((float(own), bool((log_probs.argmax(1) == answer).all())))
        return found


def _scored(
    rank: int,
    world: int,
    layout: dict[str, Any],
    changes: dict[str, Any],
    batch_tokens: int,
    order: int,
    by_passes: bool = False,
    count: int | None = None,
) -> tuple[list[tuple[float, bool]], list[int]]:
    """The scores of a layout, and the numbers of requests that were reported as done."""
    with megatron_groups(**layout) as groups:
        from megatron_distill.evaluation.requests import Scorer
        from megatron_distill.models.generation.model import CachedGPT
        from megatron_distill.models.gpt import vocab_shard
        from megatron_distill.train.evaluation.pass_scoring import PassScorer
        from megatron_distill.train.evaluation.scoring import ModelScorer

        architecture = _architecture(changes)
        chunks = build(architecture, groups, seed=11)
        for chunk in chunks:
            chunk.eval()
        device = torch.device("cpu")
        scorer: Scorer
        if by_passes:
            shard = vocab_shard(architecture, groups, tokens=TOKENS)
            scorer = PassScorer(
                chunks[0], architecture, shard, groups, device, POSITIONS, batch_tokens
            )
        else:
            model = CachedGPT(chunks, architecture, groups, device, vocab_size=TOKENS)
            scorer = ModelScorer(model, POSITIONS, batch_tokens)
        asked = requests()[:count]
        shuffled = np.random.default_rng(order).permutation(len(asked))
        done: list[int] = []
        scores = scorer.score([asked[place] for place in shuffled], advanced=done.append)
        found: list[Score] = [Score(0.0, False)] * len(asked)
        for place, score in zip(shuffled, scores, strict=True):
            found[place] = score
        return [tuple(score) for score in found], done


CAPPED = {"logit_softcap": 3.0, "logit_scale": 0.7}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"tensor": 2}, CAPPED),
    ({"tensor": 2, "sequence": True}, {}),
    ({"pipeline": 2}, {"tied_embeddings": True}),
    ({"pipeline": 2, "virtual_pipeline": 2}, CAPPED),
    ({"context": 2}, {"positions": "learned"}),
    ({"tensor": 2, "pipeline": 2}, CAPPED),
    ({"expert": 2}, {"moe": MOE}),
]


@pytest.fixture(scope="module")
def dense(pool: Pool) -> Callable[[dict[str, Any]], list[tuple[float, bool]]]:
    """The scores of a model's whole logits, computed once for each model."""
    known: dict[str, list[tuple[float, bool]]] = {}

    def of(changes: dict[str, Any]) -> list[tuple[float, bool]]:
        if str(changes) not in known:
            (known[str(changes)],) = pool.run(1, _dense, changes)
        return known[str(changes)]

    return of


# By the cache, and by the passes of models with sharded weights, on models without.
WAYS: list[Any] = [(CASES[0], 200, False)]
WAYS += [(case, (1, 200)[number % 2], False) for number, case in enumerate(CASES)]
WAYS += [
    pytest.param(case, 200, True, marks=() if case == CASES[1] else pytest.mark.slow)
    for case in CASES[1:2] + CASES[5:]
]


@pytest.mark.parametrize(("case", "batch_tokens", "by_passes"), WAYS, ids=str)
def test_scores_equal_a_dense_log_softmax(
    pool: Pool,
    dense: Callable[[dict[str, Any]], list[tuple[float, bool]]],
    case: tuple[dict[str, Any], dict[str, Any]],
    batch_tokens: int,
    by_passes: bool,
) -> None:
    layout, changes = case
    expected = dense(changes)
    world = max(
        layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("context", 1),
        layout.get("expert", 1),
    )
    for found, done in pool.run(world, _scored, layout, changes, batch_tokens, 3, by_passes):
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        for (log_prob, _), (own, _) in zip(found, expected, strict=True):
            assert log_prob == pytest.approx(own, abs=1e-5 * max(1.0, abs(own)))
        assert done == sorted(done)
        assert done[-1] == len(expected)


def test_scores_do_not_depend_on_ranks_order_or_batches(pool: Pool) -> None:
    """Four data ranks in another order and other batches; the numbers stay."""
    ((alone, _),) = pool.run(1, _scored, {}, {}, 200, 0)
    for found, _ in pool.run(4, _scored, {}, {}, 31, 1):
        assert [greedy for _, greedy in found] == [greedy for _, greedy in alone]
        np.testing.assert_allclose([one for one, _ in found], [one for one, _ in alone], rtol=1e-5)


@pytest.mark.parametrize("by_passes", [False, True])
@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=str)
def test_ranks_without_rows_take_part(
    pool: Pool,
    dense: Callable[[dict[str, Any]], list[tuple[float, bool]]],
    case: tuple[dict[str, Any], dict[str, Any]],
    by_passes: bool,
) -> None:
    """One question, of four answers, for four data ranks; with experts all ranks run the layers."""
    layout, changes = case
    expected = dense(changes)[:4]
    for found, done in pool.run(4, _scored, layout, changes, 200, 3, by_passes, 4):
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        np.testing.assert_allclose(
            [one for one, _ in found], [one for one, _ in expected], rtol=1e-5
        )
        assert done[-1] == 4


SUBJECTS, QUESTIONS = 3, 6


def _few_shot() -> list[Request]:
    """Subjects with 150 tokens of examples each, and questions with four answers."""
    rng = np.random.default_rng(2)

    def ids(count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return rng.integers(0, TOKENS, count).astype(np.int32)

    found = []
    for _ in range(SUBJECTS):
        examples = ids(150)
        for _ in range(QUESTIONS):
            context = np.concatenate([examples, ids(int(rng.integers(8, 20)))])
            found += [Request(context, ids(1)) for _ in range(4)]
    return found


def _positions(rank: int, world: int, layout: dict[str, Any]) -> tuple[int, list[float]]:
    """Positions that this rank computes in its layers, and the log-probabilities."""
    with megatron_groups(**layout) as groups, pytest.MonkeyPatch.context() as patch:
        from megatron_distill.models.generation.layer import Layer
        from megatron_distill.models.generation.model import CachedGPT
        from megatron_distill.train.evaluation.scoring import ModelScorer

        architecture = small_architecture(vocab_size=VOCAB, max_position_embeddings=192)
        chunks = build(architecture, groups, seed=11)
        counted = [0]
        plain = Layer.__call__

        def counting(layer: Layer, hidden_NH: torch.Tensor, *rest: Any) -> torch.Tensor:
            counted[0] += hidden_NH.shape[0]
            return plain(layer, hidden_NH, *rest)

        patch.setattr(Layer, "__call__", counting)
        model = CachedGPT(chunks, architecture, groups, torch.device("cpu"), vocab_size=TOKENS)
        scores = ModelScorer(model, 192, 1024).score(_few_shot())
        return counted[0] // architecture.num_layers, [score.log_prob for score in scores]


def test_the_examples_of_a_subject_are_computed_once(pool: Pool) -> None:
    contexts = {request.context.tobytes(): len(request.context) for request in _few_shot()}
    ((alone, expected),) = pool.run(1, _positions, {})
    assert alone == sum(contexts.values()) - 150 * SUBJECTS * (QUESTIONS - 1)
    assert sum(contexts.values()) >= 3 * alone
    for layout in ({}, {"pipeline": 2}):
        found = pool.run(2, _positions, layout)
        # Data ranks share the subjects; a subject that both have a part of is computed twice.
        most = alone if layout else alone + 150
        assert sum(positions for positions, _ in found) <= most
        for _, log_probs in found:
            np.testing.assert_allclose(log_probs, expected, atol=1e-5)

"""Scores of answers in every layout against a dense float64 log-softmax in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron_distill.evaluation.requests import Request, Score, Scorer, model_input
from tests.distributed.megatron_world import build, megatron_groups, small_architecture, writer_of
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
    # Logits of about one, which the cap bends. Larger weights: float32 itself rounds by 1e-5.
    return small_architecture(vocab_size=VOCAB, init_std=0.2, **changes)


def _dense(rank: int, world: int, changes: dict[str, Any]) -> list[tuple[float, bool]]:
    """Each request alone, unpadded, with whole logits in float64."""
    with megatron_groups() as groups:
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


Scores = list[tuple[float, bool]]
Case = tuple[dict[str, Any], dict[str, Any]]
OfModel = Callable[[dict[str, Any]], Scores]

CAPPED = {"logit_softcap": 1.0, "logit_scale": 0.7}
CASES: list[Case] = [
    ({}, {}),
    ({"tensor": 2}, CAPPED),
    ({"tensor": 2, "sequence": True}, {}),
    ({"pipeline": 2}, {"tied_embeddings": True}),
    ({"pipeline": 2, "virtual_pipeline": 2}, CAPPED),
    ({"context": 2}, {"positions": "learned"}),
    ({"tensor": 2, "pipeline": 2}, CAPPED),
    ({"expert": 2}, {"moe": MOE}),
]
DATA, TENSOR, CONTEXT, EXPERT = CASES[0], CASES[1], CASES[5], CASES[-1]
SEQUENCE, PIPELINE, VIRTUAL, TENSOR_PIPELINE = CASES[2], CASES[3], CASES[4], CASES[6]


def world_of(layout: dict[str, Any]) -> int:
    """The fewest ranks of a layout."""
    return max(
        layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("context", 1),
        layout.get("expert", 1),
    )


def same(found: Scores, expected: Scores) -> None:
    """Assert equal greedy flags, and log-probabilities that differ by 1e-5 per scored token."""
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    for (log_prob, _), (own, _), request in zip(found, expected, requests(), strict=False):
        _, count = model_input(request, POSITIONS)
        assert log_prob == pytest.approx(own, abs=1e-5 * count)


def of_each_model(score: OfModel) -> OfModel:
    """Scores of models by their changes, computed once for each."""
    known: dict[str, Scores] = {}

    def of(changes: dict[str, Any]) -> Scores:
        if str(changes) not in known:
            known[str(changes)] = score(changes)
        return known[str(changes)]

    return of


@pytest.fixture(scope="module")
def dense(pool: Pool) -> OfModel:
    """The scores of a model's whole logits."""
    return of_each_model(lambda changes: pool.run(1, _dense, changes)[0])


@pytest.fixture(scope="module")
def alone(pool: Pool) -> OfModel:
    """The scores of a model by one rank in large batches."""
    return of_each_model(lambda changes: pool.run(1, _scored, {}, changes, 200, 0)[0][0])


# By the cache, and by the passes of models with sharded weights, on models without.
WAYS: list[Any] = [pytest.param(CASES[0], 200, False, marks=pytest.mark.slow)]
WAYS += [(case, (1, 200)[number % 2], False) for number, case in enumerate(CASES)]
WAYS += [
    pytest.param(case, 200, True, marks=() if case == CASES[1] else pytest.mark.slow)
    for case in CASES[1:2] + CASES[5:]
]


@pytest.mark.parametrize(("case", "batch_tokens", "by_passes"), WAYS, ids=str)
def test_scores_equal_a_dense_log_softmax(
    pool: Pool, dense: OfModel, case: Case, batch_tokens: int, by_passes: bool
) -> None:
    layout, changes = case
    expected = dense(changes)
    arguments = (layout, changes, batch_tokens, 3, by_passes)
    for found, done in pool.run(world_of(layout), _scored, *arguments):
        same(found, expected)
        assert done == sorted(done)
        assert done[-1] == len(expected)


# A batch has room for 7 or 32 of the longest inputs; with one token it has one row.
ORDERS: list[Any] = [
    (4, DATA, 31, 1),
    (2, TENSOR, 1, 2),
    (2, CONTEXT, 7 * POSITIONS, 4),
    (2, EXPERT, 32 * POSITIONS, 5),
]
ORDERS += [
    pytest.param(4 if case == DATA else world_of(case[0]), case, tokens, 6, marks=pytest.mark.slow)
    for case, *others in (
        (DATA, 7 * POSITIONS, 32 * POSITIONS),
        (TENSOR, 7 * POSITIONS, 32 * POSITIONS),
        (CONTEXT, 1, 32 * POSITIONS),
        (EXPERT, 1, 7 * POSITIONS),
        *(
            (case, 1, 7 * POSITIONS, 32 * POSITIONS)
            for case in (SEQUENCE, PIPELINE, VIRTUAL, TENSOR_PIPELINE)
        ),
    )
    for tokens in others
]


@pytest.mark.parametrize(("world", "case", "batch_tokens", "order"), ORDERS, ids=str)
def test_scores_do_not_depend_on_ranks_order_or_batches(
    pool: Pool, alone: OfModel, world: int, case: Case, batch_tokens: int, order: int
) -> None:
    layout, changes = case
    for found, _ in pool.run(world, _scored, layout, changes, batch_tokens, order):
        same(found, alone(changes))


@pytest.mark.parametrize("by_passes", [False, True])
@pytest.mark.parametrize("case", [DATA, EXPERT], ids=str)
def test_ranks_without_rows_take_part(
    pool: Pool, dense: OfModel, case: Case, by_passes: bool
) -> None:
    """One question, of four answers, for four data ranks; with experts all ranks run the layers."""
    layout, changes = case
    for found, done in pool.run(4, _scored, layout, changes, 200, 3, by_passes, 4):
        same(found, dense(changes)[:4])
        assert done[-1] == 4


SUBJECTS, QUESTIONS = 3, 6


def _few_shot(subjects: int = SUBJECTS, questions: int = QUESTIONS) -> list[Request]:
    """Subjects with 150 tokens of examples each, and questions with four answers."""
    rng = np.random.default_rng(2)

    def ids(count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return rng.integers(0, TOKENS, count).astype(np.int32)

    found = []
    for _ in range(subjects):
        examples = ids(150)
        for _ in range(questions):
            context = np.concatenate([examples, ids(int(rng.integers(8, 20)))])
            found += [Request(context, ids(1)) for _ in range(4)]
    return found


def _positions(rank: int, world: int, layout: dict[str, Any]) -> tuple[int, list[float]]:
    """Positions that this rank computes in its layers, and the log-probabilities."""
    with megatron_groups(**layout) as groups, pytest.MonkeyPatch.context() as patch:
        from megatron_distill.models.generation.layer import Layer
        from megatron_distill.train.evaluation.scoring import ModelScorer

        architecture = small_architecture(vocab_size=VOCAB, max_position_embeddings=192)
        counted = [0]
        plain = Layer.__call__

        def counting(layer: Layer, hidden_NH: torch.Tensor, *rest: Any) -> torch.Tensor:
            counted[0] += hidden_NH.shape[0]
            return plain(layer, hidden_NH, *rest)

        patch.setattr(Layer, "__call__", counting)
        model = writer_of(architecture, groups, vocab_size=TOKENS)
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


def _seconds(rank: int, world: int) -> tuple[float, float]:
    """Seconds of the processor for 57 subjects: examples read once, and again by each question."""
    with megatron_groups() as groups, pytest.MonkeyPatch.context() as patch:
        from megatron_distill.models.generation import model as cached
        from megatron_distill.models.generation.families import PrefixFamily
        from megatron_distill.train.evaluation.scoring import ModelScorer

        sizes = {"hidden_size": 128, "ffn_hidden_size": 256, "max_position_embeddings": 192}
        shape = small_architecture(vocab_size=VOCAB, **sizes)
        chunks = build(shape, groups, seed=11)
        model = cached.CachedGPT(chunks, shape, groups, torch.device("cpu"), vocab_size=TOKENS)
        scorer, asked = ModelScorer(model, 192, 8192), _few_shot(57, 16)

        def once() -> float:
            began = time.process_time()
            scorer.score(asked)
            return time.process_time() - began

        shared = [once() for _ in range(3)]  # the first is slower
        patch.setattr(
            cached, "families_of", lambda rows, copies: [PrefixFamily((), tuple(range(len(rows))))]
        )
        return min(shared[1:]), min(once() for _ in range(2))


@pytest.mark.slow
def test_reading_the_examples_once_takes_a_third_of_the_time(pool: Pool) -> None:
    """Of one thread. The positions are a seventh; benchmarks/results/evaluate.md has more."""
    ((shared, again),) = pool.run(1, _seconds)
    assert again >= 3 * shared, (again, shared)

"""Figures of shards against whole vocabularies: comparisons, several teachers, the map."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_distill.align.map_file import load_map, map_bytes
from megatron_distill.errors import DataError
from megatron_distill.losses.comparison import compare_with_ids, compare_with_logits
from megatron_distill.ops import VocabShard, vocab_parallel_topk
from megatron_distill.signals import DenseLogits
from megatron_distill.train.assemble.alignment import open_vocabulary_map
from tests.distributed.pool import Pool
from tests.support.several_teachers import VOCABULARY, Inputs, Result, on_shard, solve
from tests.support.tokenizer_kinds import byte_level, tiktoken_of_bpe
from tests.unit.losses.test_comparison import _SIZE, _TOKENS, _logits, _reference, _softmax
from tests.unit.losses.test_recorded_among_several import CODE, LOWEST, MEANS
from tests.unit.losses.test_several_teachers import NAMES, TERMS


@pytest.mark.parametrize("world", [1, 2, 4])
def test_shards_make_the_oracle(pool: Pool, world: int) -> None:
    inputs, terms = Inputs.random(7), TERMS["all"]
    answers = pool.run(world, on_shard, inputs, terms, NAMES)
    oracle = solve(inputs, terms, NAMES)
    for answer in answers:
        assert torch.equal(answer.total, answers[0].total)
        assert torch.equal(answer.sums["math"].labels, answers[0].sums["math"].labels)
    assert_same(answers, oracle)


def assert_same(answers: list[Result], oracle: Result) -> None:
    """Compare the report of the first rank and the gradients of all with the whole answer."""
    for name, value in oracle.report.items():
        assert float(answers[0].report[name]) == pytest.approx(float(value), rel=1e-11), name
    hidden = torch.stack([answer.hidden_gradient for answer in answers]).sum(0)
    torch.testing.assert_close(hidden, oracle.hidden_gradient, rtol=1e-10, atol=1e-13)
    weight = torch.cat([answer.weight_gradient for answer in answers])[:VOCABULARY]
    whole = oracle.weight_gradient[:VOCABULARY]
    torch.testing.assert_close(weight, whole, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("world", [2, 4])
def test_a_mean_on_recorded_ids_is_the_same_on_shards(pool: Pool, world: int) -> None:
    inputs = Inputs.random(8)
    means = (term for kind in ("arithmetic", "geometric", "scored") for term in MEANS[kind])
    terms = [*means, LOWEST[0]]
    expected = on_shard(0, 1, inputs, terms, NAMES, stored=CODE)
    assert_same(pool.run(world, on_shard, inputs, terms, NAMES, torch.float64, CODE), expected)


PADDED = {1: 28, 2: 28, 4: 32}
TOP = 5


def _compared(rank: int, world: int) -> dict[str, torch.Tensor]:
    """The figures of a rank, from its columns of both models; padding has the largest logits."""
    padded = PADDED[world]
    shard = VocabShard.for_rank(_SIZE, padded, rank, world)
    student, teacher = (
        torch.nn.functional.pad(_logits(seed), (0, padded - _SIZE), value=50.0)[
            :, shard.start : shard.stop
        ]
        for seed in (1, 2)
    )
    labels, rows = torch.arange(_TOKENS) * 3, torch.tensor([0, 1, 3, 6])
    group = dist.group.WORLD
    split = {"shard": shard, "group": group}
    whole = compare_with_logits(
        DenseLogits(student), DenseLogits(teacher), labels, rows, chunk_tokens=3, **split
    )
    stored = vocab_parallel_topk(teacher, TOP, **split)
    few = compare_with_ids(DenseLogits(student), stored, labels, rows, **split)
    found = {name: value for name, value in vars(whole).items() if value is not None}
    assert few.overlap is not None
    assert few.overlap_most is not None
    of_ids = {f"stored_{name}": value for name, value in vars(few).items() if value is not None}
    itself = compare_with_logits(
        DenseLogits(student), DenseLogits(student), labels, rows, chunk_tokens=3, **split
    )
    own = {f"own_{name}": value for name, value in vars(itself).items() if value is not None}
    return {**found, **of_ids, **own}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_figures_of_shards_are_those_of_the_whole_softmaxes(pool: Pool, world: int) -> None:
    """Divergences, entropies, Brier score, tops, shared ids and acceptance, on every rank."""
    rows, labels = [0, 1, 3, 6], np.array([0, 1, 3, 6]) * 3
    q, p = _softmax(_logits(1))[rows], _softmax(_logits(2))[rows]
    wanted = _reference(q, p, labels)
    for found in pool.run(world, _compared):
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, atol=1e-6, rtol=0, err_msg=name)
        total_variation = np.abs(p - q).sum(1) / 2
        np.testing.assert_allclose(found["overlap"], 1 - total_variation, atol=1e-6, rtol=0)
        # Of a store's few ids, an interval that has the whole value.
        assert (found["stored_overlap"].numpy() <= wanted["overlap"] + 1e-6).all()
        assert (found["stored_overlap_most"].numpy() >= wanted["overlap"] - 1e-6).all()
        assert (found["stored_overlap"] < found["stored_overlap_most"]).any()
        divergence = wanted["js_divergence"]
        assert (found["stored_js_divergence"].numpy() <= divergence + 1e-6).all()
        assert (found["stored_js_divergence_most"].numpy() >= divergence - 1e-6).all()
        np.testing.assert_array_equal(found["stored_top5_overlap"], wanted["top5_overlap"])
        assert found["stored_top20_overlap"].isnan().all(), "it has five ids"
        assert not found["own_js_divergence"].any()
        for name in ("own_top5_overlap", "own_top20_overlap"):
            assert (found[name] == 1).all()


DEVICE = torch.device("cpu")


def _open(rank: int, world: int, folder: Path) -> tuple[bytes, str]:
    student, teacher = (byte_level(), tiktoken_of_bpe()) if rank == 0 else (None, None)
    own = folder / str(rank)  # the ranks share no disk
    found = open_vocabulary_map(student, teacher, folder=own, device=DEVICE)
    try:
        open_vocabulary_map(student, student, folder=own, device=DEVICE)
    except DataError as error:
        dist.barrier()  # still in step with each other
        return map_bytes(found), str(error)
    return map_bytes(found), "no error"


def test_every_rank_has_the_first_rank_s_map(pool: Pool, tmp_path: Path) -> None:
    (content, error), *more = pool.run(2, _open, tmp_path)
    assert more == [(content, error)]
    assert "are one tokenizer" in error
    (path,) = (tmp_path / "0").iterdir()
    assert map_bytes(load_map(path)) == content
    assert not (tmp_path / "1").exists()

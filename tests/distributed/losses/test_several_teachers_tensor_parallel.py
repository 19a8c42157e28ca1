"""Mixtures, choices and routes are the same on 1, 2 and 4 shards of the vocabulary."""

import pytest
import torch

from tests.distributed.pool import Pool
from tests.support.several_teachers import VOCABULARY, Inputs, on_shard, solve
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
    for name, value in oracle.report.items():
        assert float(answers[0].report[name]) == pytest.approx(float(value), rel=1e-11), name
    hidden = torch.stack([answer.hidden_gradient for answer in answers]).sum(0)
    torch.testing.assert_close(hidden, oracle.hidden_gradient, rtol=1e-10, atol=1e-13)
    weight = torch.cat([answer.weight_gradient for answer in answers])[:VOCABULARY]
    torch.testing.assert_close(weight, oracle.weight_gradient, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("world", [2, 4])
def test_a_mean_on_recorded_ids_is_the_same_on_shards(pool: Pool, world: int) -> None:
    inputs, terms = (
        Inputs.random(8),
        [
            *(term for kind in ("arithmetic", "geometric", "scored") for term in MEANS[kind]),
            LOWEST[0],
        ],
    )
    expected = on_shard(0, 1, inputs, terms, NAMES, stored=CODE)
    answers = pool.run(world, on_shard, inputs, terms, NAMES, torch.float64, CODE)
    for name, value in expected.report.items():
        assert float(answers[0].report[name]) == pytest.approx(float(value), rel=1e-11), name
    hidden = torch.stack([answer.hidden_gradient for answer in answers]).sum(0)
    torch.testing.assert_close(hidden, expected.hidden_gradient, rtol=1e-10, atol=1e-13)
    weight = torch.cat([answer.weight_gradient for answer in answers])[:VOCABULARY]
    whole = expected.weight_gradient[:VOCABULARY]
    torch.testing.assert_close(weight, whole, rtol=1e-10, atol=1e-13)

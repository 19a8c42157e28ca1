"""Paired bootstrap: its interval against exact errors, its seed, and items that differ."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from megatron_distill.evaluation.tasks.paired import ItemValues, TaskItems, differences


def hits(values: list[bool] | np.ndarray, prompt_hash: str = "sha256:0") -> dict[str, TaskItems]:
    one = ItemValues.of_mean(np.array(values, float))
    return {"quiz": TaskItems(prompt_hash, {"acc": one})}


def test_the_error_is_that_of_the_differences_of_pairs() -> None:
    """Far smaller than that of two independent samples, where both models are often right."""
    generator = np.random.default_rng(3)
    first = generator.random(4000) < 0.7
    second = np.where(generator.random(4000) < 0.05, ~first, first)
    found = differences(hits(first), hits(second))["quiz"]["acc"]
    pairs = first.astype(float) - second
    assert found["difference"] == pytest.approx(pairs.mean())
    exact = pairs.std(ddof=1) / math.sqrt(4000)
    assert found["stderr"] == pytest.approx(exact, rel=0.06)
    assert found["low"] == pytest.approx(pairs.mean() - 1.96 * exact, abs=0.3 * exact)
    assert found["high"] == pytest.approx(pairs.mean() + 1.96 * exact, abs=0.3 * exact)
    alone = math.sqrt(2 * 0.7 * 0.3 / 4000)
    assert found["stderr"] < 0.5 * alone
    assert found["n"] == 4000


def test_the_interval_covers_the_true_difference_at_its_nominal_rate() -> None:
    generator = np.random.default_rng(5)
    covered = 0
    for _ in range(200):
        first = generator.random(300) < 0.6
        second = np.where(generator.random(300) < 0.2, generator.random(300) < 0.3, first)
        found = differences(hits(first), hits(second))["quiz"]["acc"]
        covered += found["low"] <= 0.6 - (0.8 * 0.6 + 0.2 * 0.3) <= found["high"]
    assert 180 <= covered <= 199


def test_a_ratio_of_sums_is_resampled_as_one() -> None:
    """Bits per byte: an item brings its bits and its bytes along."""
    generator = np.random.default_rng(7)
    sizes = generator.integers(20, 2000, 500).astype(float)
    bits = [sizes * generator.normal(mean, 0.1, 500) for mean in (1.5, 1.4)]
    one, other = (
        {"text": TaskItems("sha256:0", {"bits_per_byte": ItemValues(values, sizes)})}
        for values in bits
    )
    found = differences(one, other)["text"]["bits_per_byte"]
    ratio = (bits[0] - bits[1]).sum() / sizes.sum()
    assert found["difference"] == pytest.approx(ratio)
    residuals = bits[0] - bits[1] - ratio * sizes
    error = math.sqrt(500) * residuals.std(ddof=1) / sizes.sum()  # the delta method
    assert found["stderr"] == pytest.approx(error, rel=0.1)


def test_the_seed_decides_the_interval_and_equal_models_have_no_difference() -> None:
    first, second = [True, False] * 40, [True, True, False, False] * 20
    found = differences(hits(first), hits(second))
    assert differences(hits(first), hits(second)) == found
    other = differences(hits(first), hits(second), seed=1)["quiz"]["acc"]
    assert other["difference"] == found["quiz"]["acc"]["difference"]
    assert other["stderr"] != found["quiz"]["acc"]["stderr"]
    same = differences(hits(first), hits(first))["quiz"]["acc"]
    assert (same["difference"], same["low"], same["high"], same["stderr"]) == (0, 0, 0, 0)


def test_tasks_with_other_prompts_are_left_out_and_items_survive_a_file() -> None:
    first = hits([True, False])
    assert differences(first, hits([True, False], "sha256:1")) == {}
    assert differences(first, {}) == {}
    plain = json.loads(json.dumps(first["quiz"].as_dict()))
    assert differences({"quiz": TaskItems.from_dict(plain)}, first) == differences(first, first)
    del plain["measures"]["acc"]["weights"][0]
    with pytest.raises(ValueError, match="different lengths"):
        TaskItems.from_dict(plain)

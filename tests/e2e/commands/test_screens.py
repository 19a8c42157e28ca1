"""The screen of real runs: the banner counts the built model, and the losses of a step add up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.e2e.runs import Inputs, assembled, logged, run

SHORT = ("train.steps=3", "schedule.warmup_steps=1")
FEATURES = "objective.features=[{student: 1, teacher: 2, weight: 0.5}]"
TERMS = "objective.terms=[{divergence: forward_kl, weight: 0.3, temperature: 2.0}]"


def counted(rank: int, world: int, config_path: Path, overrides: Sequence[str]) -> Any:
    """Return the parameters that this rank holds, and the rows of padding among them."""
    from megatron_distill.train.throughput import RankParameters

    with assembled(rank, world, config_path, overrides) as (_, parts):
        shape = parts.state.architecture
        own = RankParameters.of(parts.state.student.chunks, [])
        return own, shape.padded_vocab_size(parts.state.student.groups.tensor.size()), shape


@pytest.mark.parametrize(
    "overrides",
    [
        (TERMS, "objective.ce_weight=0.25", FEATURES),
        (FEATURES, "objective.balance={mode: gradient_norm}"),
    ],
)
def test_the_line_of_every_step_adds_up(
    overrides: tuple[str, ...], pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    from megatron_distill.config import load_config
    from megatron_distill.train.progress import total_texts

    path = inputs.folder / "dense.yaml"
    weight = load_config(path, overrides).objective.ce_weight
    records = run(pool, 1, path, tmp_path, *SHORT, *overrides)
    assert len(records) == 3
    for record in records:
        text = total_texts(record, ce_weight=weight)[0]
        assert " = ce " in text, text
        assert " features " in text


def test_the_first_rank_alone_begins_with_the_banner(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    arguments = [f"output={tmp_path}", *SHORT, FEATURES, "parallel.tensor=2"]
    first, second = pool.run(2, logged, inputs.folder / "dense.yaml", arguments)
    assert first.count(f"distillation into {tmp_path}\n") == 1
    assert "  layout     2 ranks = tensor 2; fp32" in first
    assert "+ features: 0.5 x mse; 1 pairs of layers" in first
    assert "distillation into" not in second


def test_the_banner_counts_a_rank_s_parameters(pool: Pool, inputs: Inputs, tmp_path: Path) -> None:
    from megatron_distill.train.reports.banner import parameter_counts

    arguments = [f"output={tmp_path}", *SHORT]
    ((own, rows, shape),) = pool.run(1, counted, inputs.folder / "moe.yaml", arguments)
    padding = 2 * (rows - shape.vocab_size) * shape.hidden_size  # of embedding and head
    assert own.student == parameter_counts(shape)[0] + padding
    arguments += ["parallel.expert=2", f"output={tmp_path}/2"]
    halves = pool.run(2, counted, inputs.folder / "moe.yaml", arguments)
    experts = 4 * 4 * 3 * 24 * shape.hidden_size  # layers, experts, matrices
    assert [half.experts for half, _, _ in halves] == [experts // 2] * 2
    assert [half.student for half, _, _ in halves] == [own.student - experts // 2] * 2

"""The banner of real runs: on the first rank alone, with the parameters of the built model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.distributed.pool import Pool
from tests.e2e.runs import Inputs, assembled, logged

SHORT = ("train.steps=3", "schedule.warmup_steps=1")
FEATURES = "objective.features=[{student: 1, teacher: 2, weight: 0.5}]"


def counted(rank: int, world: int, config_path: Path, overrides: Sequence[str]) -> Any:
    """Return the parameters that this rank holds, and the rows of padding among them."""
    from megatron_distill.train.throughput import RankParameters

    with assembled(rank, world, config_path, overrides) as (_, parts):
        shape = parts.state.architecture
        own = RankParameters.of(parts.state.student.chunks, [])
        return own, shape.padded_vocab_size(parts.state.student.groups.tensor.size()), shape


def test_the_first_rank_alone_begins_with_the_banner(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    arguments = [f"output={tmp_path}", *SHORT, FEATURES, "parallel.tensor=2"]
    first, second = pool.run(2, logged, dense, arguments)
    assert first.count(f"distillation into {tmp_path}\n") == 1
    assert "  layout     2 ranks = tensor 2; fp32" in first
    assert "+ features: 0.5 x mse; 1 pair of layers" in first
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
